"""From scheduled sequences to one packed ForwardBatch. Knows the layout of a step and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..kernels.metadata import AttentionMetadata
from ..mm.positions import mrope_positions
from ..mm.types import MultiModalFeature, PlaceholderRange
from ..models.interface import ForwardBatch
from .sampler import SampleRow
from .types import EngineRequest, Logprob, RequestUpdate, ScheduledRequest


@dataclass(eq=False)
class Track:
    """The worker's copy of one sequence: tokens, items, and the positions of all tokens it was given."""

    message: EngineRequest
    axes: int
    token_ids: list[int] = field(init=False)
    features: list[MultiModalFeature] = field(init=False)
    turn_start: int = field(init=False)
    positions: np.ndarray = field(init=False)  # int64 [axes, tokens given]
    delta: int = field(init=False)  # position minus index of every later token
    media_end: int = field(init=False)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.message.prompt_token_ids)
        self.features = list(self.message.features)
        self.turn_start = len(self.token_ids)
        ends = (*self.message.params.stop_ids, *self.message.eos_token_ids)
        self.end_ids = tuple(dict.fromkeys(ends))
        self._place()

    def update(self, change: RequestUpdate) -> None:
        """Roll back, then continue; positions are those of a prompt that reads the same."""
        del self.token_ids[change.num_tokens :]
        self.features = [f for f in self.features if f.range.offset < change.num_tokens] + list(change.features)
        self.token_ids += change.token_ids
        self.turn_start = len(self.token_ids) if change.restart else min(self.turn_start, change.num_tokens)
        self._place()

    def _place(self) -> None:
        placed = [(feature.range, feature.geometry) for feature in self.features]
        positions, self.delta = mrope_positions(len(self.token_ids), placed, self.axes)
        self.positions = positions.numpy()
        self.media_end = max((feature.range.end for feature in self.features), default=0)

    def fill_positions(self, out: np.ndarray, start: int) -> None:
        """Write the positions of the tokens from `start` into `[axes, n]`."""
        known = self.positions.shape[1]
        stop = start + out.shape[1]
        if start < known:
            out[:, : known - start] = self.positions[:, start:stop]
        if stop > known:
            first = max(start, known)
            out[:, first - start :] = np.arange(first + self.delta, stop + self.delta)

    def sample_row(self) -> SampleRow:
        message = self.message
        return SampleRow(message.params, self.token_ids, self.turn_start, message.seed, self.end_ids, message.bad_word_ids)


Row = tuple[Track, ScheduledRequest]


def build_batch(
    rows: Sequence[Row],
    encoded: Mapping[str, Tensor],
    kv_caches: Sequence[Tensor],
    group_of: Sequence[int],
    block_size: int,
    device: torch.device,
) -> ForwardBatch:
    """Pack the rows of all sequences, in order; encoder rows are looked up by hash, `group_of` is the group of each cache."""
    counts = [task.num_tokens for _, task in rows]
    starts = [0, *accumulate(counts)]
    ids: list[int] = []
    positions = np.empty((rows[0][0].axes, starts[-1]), dtype=np.int64)
    for (sequence, task), start in zip(rows, starts, strict=False):
        ids += sequence.token_ids[task.num_computed : task.num_computed + task.num_tokens]
        sequence.fill_positions(positions[:, start : start + task.num_tokens], task.num_computed)
    index, embeds = _embeds(rows, starts, encoded)
    tasks = [task for _, task in rows]
    attn = [build_attention(tasks, tuple(starts), block_size, device, group) for group in range(max(group_of) + 1)]
    return ForwardBatch(
        input_ids=torch.tensor(ids, device=device),
        positions=torch.from_numpy(positions).to(device),
        attn=[attn[group] for group in group_of],
        kv_caches=kv_caches,
        embed_index=torch.cat(index).to(device) if index else None,
        embed_rows=torch.cat(embeds) if embeds else None,
    )


def build_attention(
    tasks: Sequence[ScheduledRequest], starts: tuple[int, ...], block_size: int, device: torch.device, group: int = 0
) -> AttentionMetadata:
    """Block tables and slots of one cache group."""
    tables = np.zeros((len(tasks), max(len(task.block_ids[group]) for task in tasks)), dtype=np.int32)
    slots = np.empty(starts[-1], dtype=np.int64)
    for i, task in enumerate(tasks):
        blocks, first = task.block_ids[group], task.num_computed
        tables[i, : len(blocks)] = blocks
        if task.num_tokens == 1:
            slots[starts[i]] = blocks[first // block_size] * block_size + first % block_size
        else:
            token = np.arange(first, first + task.num_tokens)
            slots[starts[i] : starts[i + 1]] = tables[i, token // block_size] * np.int64(block_size) + token % block_size
    return AttentionMetadata(
        query_start=starts,
        seq_lens=tuple(task.num_computed + task.num_tokens for task in tasks),
        block_tables=torch.from_numpy(tables).to(device),
        slot_mapping=torch.from_numpy(slots).to(device),
        block_size=block_size,
    )


def _embeds(rows: Sequence[Row], starts: Sequence[int], encoded: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Batch rows to be replaced, and by what, for every item that overlaps this step's window of its sequence."""
    index: list[Tensor] = []
    embeds: list[Tensor] = []
    for (sequence, task), row in zip(rows, starts, strict=False):
        if task.num_computed >= sequence.media_end:
            continue
        for feature in sequence.features:
            where = window(feature.range, task.num_computed, task.num_computed + task.num_tokens)
            if where is not None:
                tokens, first, last = where
                index.append(tokens + (row - task.num_computed))
                embeds.append(encoded[feature.hash][first:last])
    return index, embeds


def window(where: PlaceholderRange, start: int, stop: int) -> tuple[Tensor, int, int] | None:
    """What tokens `[start, stop)` of the sequence use of an item: (token indices, first row, last row), None for nothing.

    An item at 10 of length 5 with the mask F T F T T, seen through [12, 15): tokens 13 and 14, rows 1 and 2.
    """
    begin, end = max(0, start - where.offset), min(where.length, stop - where.offset)
    if begin >= end:
        return None
    first, last = where.rows(begin, end)
    if first == last:
        return None
    tokens = torch.arange(begin, end) if where.is_embed is None else where.is_embed[begin:end].nonzero().flatten() + begin
    return tokens + where.offset, first, last
