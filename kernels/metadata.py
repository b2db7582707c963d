"""What an attention kernel needs to know of a batch. A kernels type: built by the runner, read by every backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Requests of a step with one query row each, padded to their longest context.

    Args:
        rows: int64 `[n]`, their query rows in the batch; None when they are all of it, in order.
        blocks: int64 `[n * width]`, of each block table the last blocks with keys, `width` of them, end to end.
        mask: bool `[n, 1, 1, width * block_size]`, True where there is a key that the row sees; None where it sees them all.
    """

    rows: Tensor | None
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionMetadata:
    """Rows of several requests in one packed step; prompt chunks and decode rows mixed.

    Request i owns the query rows `[query_start[i], query_start[i + 1])`; they are the *last* rows of its
    `seq_lens[i]` positions (causal). Python ints sit beside the tensors so that CPU paths never read a tensor back.

    Args:
        query_start: `num_requests + 1` ints, starting with 0.
        seq_lens: keys of each request after this step, this step's rows included.
        block_tables: int32 `[num_requests, max_blocks]`, physical block of each logical block; unused entries 0.
        slot_mapping: int64 `[rows]`, physical slot (`block * block_size + offset`) each row's key and value go to.
        block_size: tokens per block.
        causal: False where every row sees all keys of its request (cross-attention): then keys are no rows of the batch,
            and `slot_mapping` belongs to the keys written this step, however many.
        invariant: a row's bits must not depend on its company or on where its prompt is cut, whatever that costs.
        window: a row sees only so many keys up to its own; None: all. What lies before them is not read.
        seen: int64 `[2, rows]`, the first key that each row sees and the end of them, where some see keys behind their own
            (items and prompts that see themselves whole); None: all rows see what `causal` and `window` say.
    """

    query_start: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
    causal: bool = True
    invariant: bool = False
    window: int | None = None
    seen: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.query_start[-1]

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """`query_start` and `seq_lens` as int64 tensors, for kernels in C++."""
        return torch.tensor(self.query_start), torch.tensor(self.seq_lens)

    @cached_property
    def device_bounds(self) -> tuple[Tensor, Tensor]:
        """`query_start` and `seq_lens` as int32 tensors beside the tables, for kernels on a GPU."""
        both = self.on_device(torch.tensor((*self.query_start, *self.seq_lens), dtype=torch.int32))
        return both[: len(self.query_start)], both[len(self.query_start) :]

    @cached_property
    def layouts(self) -> dict[object, Any]:
        """What a backend lays out once per step for all layers, under keys of its own."""
        return {}

    def on_device(self, made: Tensor) -> Tensor:
        """A new tensor of the CPU beside the tables; nobody waits for the copy."""
        device = self.block_tables.device
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)

    @property
    def plain(self) -> bool:
        """Whether all rows see all keys up to their own, or all."""
        return self.window is None and self.seen is None

    def ranges(self, request: int) -> Tensor:
        """int64 `[2, n]`: of each row of a request, the first key that it sees and the end of them."""
        first, last, length = self.query_start[request], self.query_start[request + 1], self.seq_lens[request]
        if self.seen is not None:
            return self.seen[:, first:last]
        stop = torch.arange(length - (last - first), length, device=self.block_tables.device) + 1
        stop = stop if self.causal else torch.full_like(stop, length)
        return torch.stack((torch.zeros_like(stop) if self.window is None else (stop - self.window).clamp(min=0), stop))

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Indices of the requests with more than one query row."""
        starts = self.query_start
        return tuple(i for i in range(len(self.seq_lens)) if starts[i + 1] - starts[i] > 1)

    @cached_property
    def decodes(self) -> tuple[DecodeRows, ...]:
        """The single-row requests, laid out once per step for all layers, in groups of like width.

        One group while padding at most doubles the keys gathered, else one per power of two: a long context among
        short ones must not widen them all.
        """
        starts = self.query_start
        single = [i for i in range(len(self.seq_lens)) if starts[i + 1] - starts[i] == 1]
        widths = [self._width(i) for i in single]
        if not single:
            return ()
        if len(single) * max(widths) <= 2 * sum(widths):
            return (self._decode_rows(single, max(widths)),)
        classes: dict[int, list[int]] = {}
        for i, width in zip(single, widths, strict=True):
            classes.setdefault(width.bit_length(), []).append(i)
        return tuple(self._decode_rows(group, max(map(self._width, group))) for group in classes.values())

    def first_block(self, request: int) -> int:
        """The first block that a row of a request sees."""
        before = self.seq_lens[request] - (self.query_start[request + 1] - self.query_start[request])  # of its first row
        return 0 if self.window is None else max(0, before + 1 - self.window) // self.block_size

    def _width(self, request: int) -> int:
        """Blocks from that one on."""
        return -(-self.seq_lens[request] // self.block_size) - self.first_block(request)

    def _decode_rows(self, requests: list[int], width: int) -> DecodeRows:
        device, size = self.block_tables.device, self.block_size
        first = torch.tensor([self.first_block(i) for i in requests], device=device)
        stop = torch.tensor([self.seq_lens[i] for i in requests], device=device)
        everything = len(requests) == self.num_rows
        tables = self.block_tables if everything else self.block_tables[torch.tensor(requests, device=device)]
        if self.window is None:
            blocks, start = tables[:, :width], None
        else:  # entries behind the end are those of block 0
            there = (first[:, None] + torch.arange(width, device=device)).clamp(max=tables.shape[1] - 1)
            blocks, start = tables.gather(1, there), stop - self.window
        key = first[:, None] * size + torch.arange(width * size, device=device)
        whole = self.window is None and all(self.seq_lens[i] == width * size for i in requests)
        mask = key < stop[:, None] if start is None else (key < stop[:, None]) & (key >= start[:, None])
        return DecodeRows(
            rows=None if everything else torch.tensor([self.query_start[i] for i in requests], device=device),
            blocks=blocks.long().flatten(),
            mask=None if whole else mask[:, None, None],
        )
