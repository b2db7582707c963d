"""Attention metadata of a batch: built by the model runner, read by every backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Requests with a single query row, padded to the longest context among them.

    Args:
        rows: int64 `[n]`, their query rows in the batch; None if they are the whole batch, in order.
        blocks: int64 `[n * width]`, the last `width` blocks of each block table.
        mask: bool `[n, 1, 1, width * block_size]`, True where the row attends to a key; None if it attends to all.
    """

    rows: Tensor | None
    blocks: Tensor
    mask: Tensor | None


@dataclass(frozen=True)
class AttentionMetadata:
    """The places of the rows, keys and values of a packed batch. Prompt chunks and decode rows may be mixed.

    Request i owns the query rows `[query_start_loc[i], query_start_loc[i + 1])`. They are the *last* rows of its
    `seq_lens[i]` positions (causal). Offsets and lengths are Python ints, so CPU code never reads a tensor back.

    Args:
        query_start_loc: `num_requests + 1` ints, starting with 0.
        seq_lens: number of keys of each request after this step.
        block_tables: int32 `[num_requests, max_blocks]`, physical block of each logical block; unused entries are 0.
        slot_mapping: int64 `[rows]`, physical slot (`block * block_size + offset`) of each row's key and value.
        block_size: tokens per block.
        causal: False in cross-attention, where keys are not rows of the batch and `slot_mapping` has one slot per key that this
            step writes. A row attends to all keys of its request, or to those of its `key_range`.
        batch_invariant: a row's bits must not depend on the rest of the batch or on where its prompt is chunked, at any cost.
        window: a row attends to this many keys up to its own (sliding window); earlier keys are not read. None: no window.
        key_range: int64 `[2, rows]`, first key and end of keys of each row, for batches where some rows attend to later keys
            (bidirectional items and prompts), or in cross-attention to the keys of some items only. None: `causal` and `window`
            decide.
        reordered: the keys of some requests are not in the order of their rows, and key ranges count places in the cache.
    """

    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
    causal: bool = True
    batch_invariant: bool = False
    window: int | None = None
    key_range: Tensor | None = None
    reordered: bool = False

    @property
    def num_rows(self) -> int:
        return self.query_start_loc[-1]

    @cached_property
    def cpu_starts_and_lens(self) -> tuple[Tensor, Tensor]:
        """`query_start_loc` and `seq_lens` as int64 tensors, for C++ kernels."""
        return torch.tensor(self.query_start_loc), torch.tensor(self.seq_lens)

    @cached_property
    def device_starts_and_lens(self) -> tuple[Tensor, Tensor]:
        """`query_start_loc` and `seq_lens` as int32 tensors on the device of the block tables, for GPU kernels."""
        both = self.on_device(torch.tensor((*self.query_start_loc, *self.seq_lens), dtype=torch.int32))
        return both[: len(self.query_start_loc)], both[len(self.query_start_loc) :]

    @cached_property
    def backend_cache(self) -> dict[object, Any]:
        """Data that a backend prepares once per step for all layers, under its own keys."""
        return {}

    def on_device(self, tensor: Tensor) -> Tensor:
        """Copy a CPU tensor to the device of the block tables, without waiting for the copy."""
        device = self.block_tables.device
        return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)

    @property
    def full_attention(self) -> bool:
        """Return whether every row attends to all keys up to its own (or to all keys), without window or key range."""
        return self.window is None and self.key_range is None

    def key_ranges(self, request: int) -> Tensor:
        """Return int64 `[2, n]`: first key and end of keys of each row of a request."""
        first, last, length = self.query_start_loc[request], self.query_start_loc[request + 1], self.seq_lens[request]
        if self.key_range is not None:
            return self.key_range[:, first:last]
        stop = torch.arange(length - (last - first), length, device=self.block_tables.device) + 1
        stop = stop if self.causal else torch.full_like(stop, length)
        return torch.stack((torch.zeros_like(stop) if self.window is None else (stop - self.window).clamp(min=0), stop))

    @cached_property
    def prefills(self) -> tuple[int, ...]:
        """Indices of the requests with more than one query row."""
        starts = self.query_start_loc
        return tuple(i for i in range(len(self.seq_lens)) if starts[i + 1] - starts[i] > 1)

    @cached_property
    def decode_groups(self) -> tuple[DecodeGroup, ...]:
        """Requests with a single query row, in groups of similar context length. Computed once per step for all layers.

        There is one group while padding at most doubles the keys that are gathered. Otherwise there is one group per power
        of two, so that one long context does not pad all short ones.
        """
        starts = self.query_start_loc
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
        """Return the first logical block that any row of a request attends to."""
        if self.window is None:
            return 0
        rows = self.query_start_loc[request + 1] - self.query_start_loc[request]
        return max(0, self.seq_lens[request] - rows + 1 - self.window) // self.block_size

    def _width(self, request: int) -> int:
        """Return the number of blocks from `first_block` on."""
        return -(-self.seq_lens[request] // self.block_size) - self.first_block(request)

    def _decode_rows(self, requests: list[int], width: int) -> DecodeGroup:
        device, size = self.block_tables.device, self.block_size
        first = torch.tensor([self.first_block(i) for i in requests], device=device)
        stop = torch.tensor([self.seq_lens[i] for i in requests], device=device)
        all_rows = len(requests) == self.num_rows
        tables = self.block_tables if all_rows else self.block_tables[torch.tensor(requests, device=device)]
        if self.window is None:
            blocks, start = tables[:, :width], torch.zeros_like(stop)
        else:  # unused entries of a table name block 0
            columns = (first[:, None] + torch.arange(width, device=device)).clamp(max=tables.shape[1] - 1)
            blocks, start = tables.gather(1, columns), stop - self.window
        key = first[:, None] * size + torch.arange(width * size, device=device)
        whole = self.full_attention and all(self.seq_lens[i] == width * size for i in requests)
        if self.key_range is not None:
            start, stop = self.key_range[:, torch.tensor([self.query_start_loc[i] for i in requests], device=device)]
        mask = (key < stop[:, None]) & (key >= start[:, None])
        return DecodeGroup(
            rows=None if all_rows else torch.tensor([self.query_start_loc[i] for i in requests], device=device),
            blocks=blocks.long().flatten(),
            mask=None if whole else mask[:, None, None],
        )
