"""From scheduled sequences to one packed ForwardBatch. Knows the layout of a step and no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ..kernels.metadata import AttentionMetadata
from ..mm.positions import mrope_positions
from ..mm.types import MultiModalFeature, PlaceholderRange
from ..models.interface import CacheSpec, ForwardBatch
from .atoms import Atom, atoms
from .request import CROSS
from .sample_row import SampleRow
from .staging import Place
from .structured import GrammarFactory
from .types import EngineRequest, Logprob, RequestUpdate, ScheduledRequest


@dataclass(eq=False)
class Track:
    """The worker's copy of one sequence: tokens, items, and the positions of all tokens it was given.

    `prefill` as in SchedulerLimits: the tokens of an atom see each other.
    """

    message: EngineRequest
    axes: int
    prefill: str = "causal"
    token_ids: list[int] = field(init=False)
    features: list[MultiModalFeature] = field(init=False)
    turn_start: int = field(init=False)
    positions: np.ndarray = field(init=False)  # int64 [axes, tokens given]
    delta: int = field(init=False)  # position minus index of every later token
    media_end: int = field(init=False)
    prompt_length: int = field(init=False)  # tokens it began with, less what was taken back of them
    atoms: list[Atom] = field(init=False)
    forbidden: tuple[tuple[int, ...], ...] = ()  # sequences that the rest of the answer must not contain
    prompt_logprobs: list[dict[int, Logprob] | None] | None = field(default_factory=list)  # None: they are told
    grammars: GrammarFactory | None = None
    row: SampleRow = field(init=False)  # what the sampler keeps of it
    adapter: str = field(init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.message.prompt_token_ids)
        self.features = list(self.message.features)
        self.turn_start = self.prompt_length = len(self.token_ids)
        message, self.adapter = self.message, self.message.adapter
        ends = tuple(dict.fromkeys((*message.params.stop_ids, *message.eos_token_ids)))
        self.row = SampleRow(
            message.params,
            self.token_ids,
            self.turn_start,
            message.seed,
            ends,
            message.bad_word_ids,
            message.eos_token_ids,
            self.grammars,
        )
        self._place()

    def item(self, index: int) -> MultiModalFeature:
        """By index, CROSS for the encoder side."""
        cross = self.message.cross
        return cross if index == CROSS and cross is not None else self.features[index]

    def read_items(self, task: ScheduledRequest) -> Iterator[MultiModalFeature]:
        """Items whose rows this step reads."""
        if task.write_cross:
            yield self.item(CROSS)
        start, stop = task.num_computed, task.num_computed + task.num_tokens
        if start < self.media_end:
            yield from (f for f in self.features if f.range.offset < stop and f.range.end > start)

    def update(self, change: RequestUpdate) -> None:
        """Roll back, then continue; positions are those of a prompt that reads the same."""
        del self.token_ids[change.num_tokens :]
        self.prompt_length = min(self.prompt_length, change.num_tokens)
        self.features = [f for f in self.features if f.range.offset < change.num_tokens] + list(change.features)
        self.token_ids += change.token_ids
        self.turn_start = len(self.token_ids) if change.restart else min(self.turn_start, change.num_tokens)
        self.forbidden = () if change.restart else (*self.forbidden, *change.forbid)
        self.adapter = self.adapter if change.adapter is None else change.adapter
        self.row.changed(change.num_tokens, self.turn_start, (*self.message.bad_word_ids, *self.forbidden))
        self._place()

    def _place(self) -> None:
        placed = [(feature.range, feature.geometry) for feature in self.features]
        positions, self.delta = mrope_positions(len(self.token_ids), placed, self.axes)
        self.positions = positions.numpy()
        self.media_end = max((feature.range.end for feature in self.features), default=0)
        self.atoms = atoms(self.prefill, self.prompt_length, self.features)

    def fill_positions(self, out: np.ndarray, start: int) -> None:
        """Write the positions of the tokens from `start` into `[axes, n]`."""
        known = self.positions.shape[1]
        stop = start + out.shape[1]
        if start < known:
            out[:, : known - start] = self.positions[:, start:stop]
        if stop > known:
            first = max(start, known)
            out[:, first - start :] = np.arange(first + self.delta, stop + self.delta)


Row = tuple[Track, ScheduledRequest]


@dataclass(frozen=True, eq=False)
class Caches:
    """Keys and values of all layers: `tensors[i]` is in the group `group_of[i]`, of `specs[group]`.

    `invariant`: reading them gives a row the same bits in any company.
    """

    tensors: Sequence[Tensor]
    group_of: Sequence[int]
    specs: Sequence[CacheSpec]
    block_size: int
    invariant: bool = False


def build_batch(
    rows: Sequence[Row],
    encoded: Mapping[str, Tensor],
    caches: Caches,
    place: Place,
    routes: Mapping[str, int] | None = None,
    adapters: Sequence[str] = (),
) -> ForwardBatch:
    """Pack the rows of all sequences, in order; encoder rows are looked up by hash.

    `routes`, `adapters`: the model's routes_by_modality and adapters.
    """
    counts = [task.num_tokens for _, task in rows]
    starts = [0, *accumulate(counts)]
    ids: list[int] = []
    positions = np.empty((rows[0][0].axes, starts[-1]), dtype=np.int64)
    for (sequence, task), start in zip(rows, starts, strict=False):
        known = sequence.token_ids[task.num_computed : task.num_computed + task.num_tokens]
        ids += known + [0] * (task.num_tokens - len(known))  # the device knows
        sequence.fill_positions(positions[:, start : start + task.num_tokens], task.num_computed)
    index, embeds = _embeds(rows, starts, encoded)
    build = {True: build_cross, False: build_attention}
    attn = [build[spec.kind == "cross"](rows, tuple(starts), caches, group, place) for group, spec in enumerate(caches.specs)]
    cross = [encoded[sequence.item(CROSS).hash] for sequence, task in rows if task.write_cross]
    return ForwardBatch(
        input_ids=place(np.array(ids)),
        positions=place(positions),
        attn=[attn[group] for group in caches.group_of],
        kv_caches=caches.tensors,
        embed_index=place(torch.cat(index).numpy()) if index else None,
        embed_rows=torch.cat(embeds) if embeds else None,
        cross_rows=torch.cat(cross) if cross else None,
        modality_ids=_modalities(rows, starts, routes, place) if routes else None,
        adapters=_adapters(rows, counts, adapters, place) if adapters else None,
    )


def build_attention(
    rows: Sequence[Row], starts: tuple[int, ...], caches: Caches, group: int, place: Place
) -> AttentionMetadata:
    """Of a group that holds a key per token: tables, and the slots of this step's rows."""
    tasks = [task for _, task in rows]
    tables = _tables(tasks, group)
    slots = np.empty(starts[-1], dtype=np.int64)
    for i, task in enumerate(tasks):
        first = task.num_computed
        slots[starts[i] : starts[i + 1]] = _slots(tables[i], first, first + task.num_tokens, caches.block_size)
    seen = _seen(rows, starts, caches.specs[group].window)
    return AttentionMetadata(
        query_start=starts,
        seq_lens=tuple(task.num_computed + task.num_tokens for task in tasks),
        block_tables=place(tables),
        slot_mapping=place(slots),
        block_size=caches.block_size,
        invariant=caches.invariant,
        window=caches.specs[group].window,
        seen=None if seen is None else place(seen),
    )


def build_cross(rows: Sequence[Row], starts: tuple[int, ...], caches: Caches, group: int, place: Place) -> AttentionMetadata:
    """Of a group that holds a key per row of the encoder side: tables, and the slots of those that are written in this step."""
    lengths = [sequence.item(CROSS).range.num_embeds for sequence, _ in rows]
    tables = _tables([task for _, task in rows], group)
    slots = [
        _slots(tables[i], 0, length, caches.block_size)
        for i, (length, (_, task)) in enumerate(zip(lengths, rows, strict=True))
        if task.write_cross
    ]
    return AttentionMetadata(
        query_start=starts,
        seq_lens=tuple(lengths),
        block_tables=place(tables),
        slot_mapping=place(np.concatenate(slots or [np.empty(0, dtype=np.int64)])),
        block_size=caches.block_size,
        causal=False,
        invariant=caches.invariant,
    )


def _tables(tasks: Sequence[ScheduledRequest], group: int) -> np.ndarray:
    """int32 `[sequences, most blocks]`, 0 where there is none."""
    tables = np.zeros((len(tasks), max(len(task.block_ids[group]) for task in tasks)), dtype=np.int32)
    for row, task in zip(tables, tasks, strict=True):
        row[: len(task.block_ids[group])] = task.block_ids[group]
    return tables.clip(min=0)  # holes behind a window


def _slots(table: np.ndarray, start: int, stop: int, block_size: int) -> np.ndarray | int:
    """Physical slots of the tokens `[start, stop)`."""
    if stop - start == 1:
        return int(table[start // block_size]) * block_size + start % block_size
    token = np.arange(start, stop)
    return table[token // block_size] * np.int64(block_size) + token % block_size  # type: ignore[no-any-return]


def _seen(rows: Sequence[Row], starts: Sequence[int], window: int | None) -> np.ndarray | None:
    """As in AttentionMetadata: rows of an atom see it to its end, and a prompt that sees itself from its beginning."""
    wide = [(track, task, start) for (track, task), start in zip(rows, starts, strict=False) if _in_atoms(track, task)]
    if not wide:
        return None
    own = np.concatenate([np.arange(task.num_computed, task.num_computed + task.num_tokens) for _, task in rows])
    seen = np.stack((np.zeros_like(own) if window is None else (own + 1 - window).clip(min=0), own + 1))
    for track, task, start in wide:
        for first, last in _in_atoms(track, task):
            inside = slice(start + first - task.num_computed, start + last - task.num_computed)
            seen[1, inside] = last
            if track.prefill == "prompt_atomic":  # an item sees no more of itself than a window holds, a prompt does
                seen[0, inside] = first
    return seen


def _in_atoms(track: Track, task: ScheduledRequest) -> list[Atom]:
    """Atoms that are computed in this step."""
    if not track.atoms or task.num_computed >= track.atoms[-1][1]:
        return []
    return [(first, last) for first, last in track.atoms if task.num_computed <= first < task.num_computed + task.num_tokens]


def _modalities(rows: Sequence[Row], starts: Sequence[int], routes: Mapping[str, int], place: Place) -> Tensor | None:
    """int64 `[rows]`, of each the number of its item's modality; None where that is 0 for all, as in steps without items."""
    ids = None
    for (track, task), start in zip(rows, starts, strict=False):
        for feature in track.read_items(task):
            ends = (feature.range.offset - task.num_computed, feature.range.end - task.num_computed)
            first, last = (start + min(max(end, 0), task.num_tokens) for end in ends)
            if feature.modality in routes:
                ids = np.zeros(starts[-1], dtype=np.int64) if ids is None else ids
                ids[first:last] = routes[feature.modality]
    return None if ids is None else place(ids)


def _adapters(rows: Sequence[Row], counts: Sequence[int], adapters: Sequence[str], place: Place) -> Tensor | None:
    """As in ForwardBatch."""
    numbers = {name: number for number, name in enumerate(("", *adapters))}
    own = [numbers[track.adapter] for track, _ in rows]
    return place(np.repeat(own, counts)) if any(own) else None


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
