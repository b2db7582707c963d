"""What an attention kernel needs to know of a batch. A kernels type: built by the runner, read by every backend."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DecodeRows:
    """Requests of a step with one query row each, padded to their longest context.

    Args:
        rows: int64 `[n]`, their query rows in the batch; None when they are all of it, in order.
        blocks: int64 `[n * width]`, their block tables cut to `width` blocks, end to end.
        mask: bool `[n, 1, 1, width * block_size]`, True where there is a key of the request; None when nothing is padded.
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
    """

    query_start: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
    causal: bool = True
    invariant: bool = False

    @property
    def num_rows(self) -> int:
        return self.query_start[-1]

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor]:
        """`query_start` and `seq_lens` as int64 tensors, for kernels in C++."""
        return torch.tensor(self.query_start), torch.tensor(self.seq_lens)

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
        widths = [-(-self.seq_lens[i] // self.block_size) for i in single]
        if not single:
            return ()
        if len(single) * max(widths) <= 2 * sum(widths):
            return (self._decode_rows(single, max(widths)),)
        classes: dict[int, list[int]] = {}
        for i, width in zip(single, widths, strict=True):
            classes.setdefault(width.bit_length(), []).append(i)
        return tuple(
            self._decode_rows(group, max(-(-self.seq_lens[i] // self.block_size) for i in group)) for group in classes.values()
        )

    def _decode_rows(self, requests: list[int], width: int) -> DecodeRows:
        device = self.block_tables.device
        lengths = [self.seq_lens[i] for i in requests]
        everything = len(requests) == self.num_rows
        tables = self.block_tables if everything else self.block_tables[torch.tensor(requests, device=device)]
        keys, ends = torch.arange(width * self.block_size, device=device), torch.tensor(lengths, device=device)
        padded = any(length != width * self.block_size for length in lengths)
        return DecodeRows(
            rows=None if everything else torch.tensor([self.query_start[i] for i in requests], device=device),
            blocks=tables[:, :width].long().flatten(),
            mask=(keys < ends[:, None])[:, None, None] if padded else None,
        )
