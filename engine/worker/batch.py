"""Packs the scheduled sequences of a step into one ForwardBatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...kernels.metadata import AttentionMetadata
from ...mm.types import PlaceholderRange
from ...models.interface import AttentionCapture, CacheSpec, ForwardBatch, HiddenCapture
from ..bidirectional_spans import BidirectionalSpan
from ..types import CROSS, ScheduledRequest
from .key_order import KeyOrder
from .sequence_state import SequenceState
from .staging import ToDevice

ScheduledSequence = tuple[SequenceState, ScheduledRequest]


@dataclass(frozen=True, eq=False)
class KVCaches:
    """The KV caches of all layers: `tensors[i]` belongs to the cache group `group_of[i]`, whose spec is `specs[group]`.

    `invariant`: attention gives a row the same bits regardless of the other rows in the batch.
    """

    tensors: Sequence[Tensor]
    group_of: Sequence[int]
    specs: Sequence[CacheSpec]
    block_size: int
    invariant: bool = False


def build_batch(
    scheduled: Sequence[ScheduledSequence],
    encoder_rows: Mapping[str, Tensor],
    caches: KVCaches,
    to_device: ToDevice,
    routes: Mapping[str, int] | None = None,
    adapters: Sequence[str] = (),
    hidden_size: int = 0,
) -> ForwardBatch:
    """Pack the rows of all sequences, in order.

    Args:
        encoder_rows: by the hash of their item.
        routes, adapters, hidden_size: the model's `routes_by_modality`, `adapters` and `hidden_size`.
    """
    counts = [task.num_tokens for _, task in scheduled]
    starts = [0, *accumulate(counts)]
    ids: list[int] = []
    positions = np.empty((len(scheduled[0][0].positions), starts[-1]), dtype=np.int64)
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        known = sequence.token_ids[task.num_computed : task.num_computed + task.num_tokens]
        ids += known + [0] * (task.num_tokens - len(known))  # tokens after the known ones are still on the device
        sequence.fill_positions(positions[:, start : start + task.num_tokens], task.num_computed)
    embed_index, embed_rows = _encoder_rows(scheduled, starts, encoder_rows)
    attn = [_build_attention(scheduled, tuple(starts), caches, group, to_device) for group in range(len(caches.specs))]
    cross_rows = [encoder_rows[sequence.item(CROSS).hash] for sequence, task in scheduled if task.write_cross]
    return ForwardBatch(
        input_ids=to_device(np.array(ids)),
        positions=to_device(positions),
        attn=[attn[group] for group in caches.group_of],
        kv_caches=caches.tensors,
        embed_index=to_device(torch.cat(embed_index).numpy()) if embed_index else None,
        embed_rows=torch.cat(embed_rows) if embed_rows else None,
        cross_rows=torch.cat(cross_rows) if cross_rows else None,
        cross_mask=_cross_mask(scheduled, starts, to_device) if any(spec.optional for spec in caches.specs) else None,
        modality_ids=_modality_ids(scheduled, starts, routes, to_device) if routes else None,
        adapters=_adapter_ids(scheduled, counts, adapters, to_device) if adapters else None,
        token_types=_token_types(scheduled, starts, to_device),
        captures=_captures(scheduled),
        hidden_captures=_hidden_captures(scheduled, starts, hidden_size),
    )


def _captures(scheduled: Sequence[ScheduledSequence]) -> tuple[AttentionCapture, ...]:
    found = []
    for index, (sequence, task) in enumerate(scheduled):
        if sequence.cross_weights is not None:
            assert sequence.request.pooling is not None
            rows = sequence.cross_weights[:, task.num_computed : task.num_computed + task.num_tokens]
            found.append(AttentionCapture(index, sequence.request.pooling.cross_attention, rows))
    return tuple(found)


def _hidden_captures(
    scheduled: Sequence[ScheduledSequence], starts: Sequence[int], hidden_size: int
) -> tuple[HiddenCapture, ...]:
    """Return where each sequence that returns hidden states of a layer keeps those of this step."""
    found = []
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        pooling = sequence.request.pooling
        if pooling is not None and pooling.layer is not None:
            if sequence.kept_rows is None:
                sequence.kept_rows = torch.zeros(sequence.prompt_length, hidden_size)
            rows = sequence.kept_rows[task.num_computed : task.num_computed + task.num_tokens]
            found.append(HiddenCapture(start, pooling.layer, rows))
    return tuple(found)


def _build_attention(
    scheduled: Sequence[ScheduledSequence], starts: tuple[int, ...], caches: KVCaches, group: int, to_device: ToDevice
) -> AttentionMetadata:
    """Build the metadata of a cache group.

    A group has a key per token, written by this step's rows. A cross-attention group has a key per encoder row, written by the
    sequences with `write_cross`. In a group of states, the block tables have two entries: the state to read and the one to
    write. In a group of chunks, the rows of each chunk are a request of their own.
    """
    spec, tasks = caches.specs[group], [task for _, task in scheduled]
    if spec.kind == "cross":
        lengths = [0 if s.request.cross is None else s.request.cross.range.num_embeds for s, _ in scheduled]
        written = [(0, length if task.write_cross else 0) for task, length in zip(tasks, lengths, strict=True)]
        key_range = None
    else:
        lengths = [task.num_computed + task.num_tokens for task in tasks]
        written = [(task.num_computed, length) for task, length in zip(tasks, lengths, strict=True)]
        key_range = _key_range(scheduled, starts, spec.window)
    tables = _block_tables(tasks, group)
    if spec.kind == "state":
        tables, written, key_range = tables[:, :2], [(0, 0) for _ in tasks], None
    ends = list(accumulate(stop - start for start, stop in written))
    slots = np.empty(ends[-1], dtype=np.int64)
    for (sequence, _), table, (start, stop), end in zip(scheduled, tables, written, ends, strict=True):
        order = sequence.key_order if key_range is not None else None
        slots[end - (stop - start) : end] = _slots(table, start, stop, caches.block_size, order)
    if spec.optional:
        starts, lengths, tables = _split_at_items(scheduled, lengths, tables)
    if spec.kind == "chunk":
        assert spec.window is not None
        starts, lengths, tables = _split_chunks(tasks, tables, spec.window, caches.block_size)
        key_range = None
    return AttentionMetadata(
        query_start_loc=starts,
        seq_lens=tuple(lengths),
        block_tables=to_device(tables),
        slot_mapping=to_device(slots),
        block_size=caches.block_size,
        causal=spec.kind != "cross",
        batch_invariant=caches.invariant,
        window=spec.window if spec.kind == "window" else None,
        key_range=None if key_range is None else to_device(key_range),
        reordered=key_range is not None and any(sequence.key_order is not None for sequence, _ in scheduled),
    )


def _split_chunks(
    tasks: Sequence[ScheduledRequest], tables: np.ndarray, chunk: int, block_size: int
) -> tuple[tuple[int, ...], list[int], np.ndarray]:
    """Return the first rows, lengths and block tables of the sequences' chunks, each as if it were a sequence.

    A chunk is a whole number of blocks (`num_cache_blocks` checks it).
    """
    parts = [  # (sequence, first token of the chunk, first and last row's token + 1)
        (row, first, max(first, task.num_computed), min(first + chunk, task.num_computed + task.num_tokens))
        for row, task in enumerate(tasks)
        for first in range(task.num_computed - task.num_computed % chunk, task.num_computed + task.num_tokens, chunk)
    ]
    lengths = [stop - first for _, first, _, stop in parts]
    split = np.zeros((len(parts), -(-max(lengths) // block_size)), dtype=np.int32)
    for own, (row, first, _, stop) in zip(split, parts, strict=True):
        blocks = tables[row, first // block_size : -(-stop // block_size)]
        own[: len(blocks)] = blocks
    return (0, *accumulate(stop - start for _, _, start, stop in parts)), lengths, split


def _split_at_items(
    scheduled: Sequence[ScheduledSequence], lengths: Sequence[int], tables: np.ndarray
) -> tuple[tuple[int, ...], list[int], np.ndarray]:
    """Return first rows, lengths and block tables of the parts of sequences before and from their cross-attention item on.

    Each part is a request of the metadata: the second does not attend to the item's last rows (`ItemGeometry.hidden`). The rows
    of sequences without an item attend to one key of any other; the model masks the result (`ForwardBatch.cross_mask`).
    """
    parts = []
    for row, ((sequence, task), length) in enumerate(zip(scheduled, lengths, strict=True)):
        cross = sequence.request.cross
        before = task.num_tokens if cross is None else min(max(cross.range.offset - task.num_computed, 0), task.num_tokens)
        hidden = 0 if cross is None else cross.geometry.hidden
        both = (row, before, max(1, length)), (row, task.num_tokens - before, length - hidden)
        parts += [part for part in both if part[1]]
    width = tables if tables.shape[1] else np.zeros((len(tables), 1), dtype=tables.dtype)
    rows = [row for row, _, _ in parts]
    return (0, *accumulate(count for _, count, _ in parts)), [length for _, _, length in parts], width[rows]


def _cross_mask(scheduled: Sequence[ScheduledSequence], starts: Sequence[int], to_device: ToDevice) -> Tensor | None:
    """Return `ForwardBatch.cross_mask`."""
    if all(sequence.request.cross is None for sequence, _ in scheduled):
        return None
    mask = np.zeros((2, starts[-1]), dtype=bool)
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        if sequence.request.cross is not None:
            first = min(max(sequence.request.cross.range.offset - task.num_computed, 0), task.num_tokens)
            mask[0, start : start + task.num_tokens] = mask[1, start + first : start + task.num_tokens] = True
    return to_device(mask)


def _block_tables(tasks: Sequence[ScheduledRequest], group: int) -> np.ndarray:
    """Return int32 `[sequences, max blocks]`, padded with 0."""
    tables = np.zeros((len(tasks), max(len(task.block_ids[group]) for task in tasks)), dtype=np.int32)
    for row, task in zip(tables, tasks, strict=True):
        row[: len(task.block_ids[group])] = task.block_ids[group]
    return tables.clip(min=0)  # blocks behind a window are NULL_BLOCK (-1)


def _slots(table: np.ndarray, start: int, stop: int, block_size: int, order: KeyOrder | None = None) -> np.ndarray | int:
    """Return the cache slots of the tokens `[start, stop)`."""
    if stop - start == 1:
        return int(table[start // block_size]) * block_size + start % block_size
    token = np.arange(start, stop)
    if order is not None and start < len(order.places):
        token[: len(order.places) - start] = order.places[start:stop]
    return table[token // block_size] * np.int64(block_size) + token % block_size  # type: ignore[no-any-return]


def _key_range(scheduled: Sequence[ScheduledSequence], starts: Sequence[int], window: int | None) -> np.ndarray | None:
    """Return the key range of each row, int64 `[2, rows]`; None if no row is in a bidirectional span.

    Rows of a span attend up to its end. Those of an item keep their window; those of a bidirectional prompt see all of it.
    """
    wide = [
        (sequence, task, start)
        for (sequence, task), start in zip(scheduled, starts, strict=False)
        if _spans_in_step(sequence, task) and (window is not None or sequence.prompt_attention != "bidirectional_windows")
    ]
    if not wide:
        return None
    own = np.concatenate([np.arange(task.num_computed, task.num_computed + task.num_tokens) for _, task in scheduled])
    key_range = np.stack((np.zeros_like(own) if window is None else (own + 1 - window).clip(min=0), own + 1))
    for sequence, task, start in wide:
        for first, last in _spans_in_step(sequence, task):
            inside = slice(start + first - task.num_computed, start + last - task.num_computed)
            key_range[1, inside] = last
            if sequence.prompt_attention == "bidirectional_prompt":
                key_range[0, inside] = first
            if sequence.key_order is not None:
                key_range[:, inside] = sequence.key_order.key_range
    return key_range


def _spans_in_step(sequence: SequenceState, task: ScheduledRequest) -> list[BidirectionalSpan]:
    """Return the bidirectional spans that this step computes."""
    if not sequence.spans or task.num_computed >= sequence.spans[-1][1]:
        return []
    return [(first, last) for first, last in sequence.spans if task.num_computed <= first < task.num_computed + task.num_tokens]


def _modality_ids(
    scheduled: Sequence[ScheduledSequence], starts: Sequence[int], routes: Mapping[str, int], to_device: ToDevice
) -> Tensor | None:
    """Return each row's modality id, int64 `[rows]`; None if all are 0, as in steps without items."""
    ids = None
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        for feature in sequence.items_in_step(task):
            ends = (feature.range.offset - task.num_computed, feature.range.end - task.num_computed)
            first, last = (start + min(max(end, 0), task.num_tokens) for end in ends)
            if feature.modality in routes:
                ids = np.zeros(starts[-1], dtype=np.int64) if ids is None else ids
                ids[first:last] = routes[feature.modality]
    return None if ids is None else to_device(ids)


def _token_types(scheduled: Sequence[ScheduledSequence], starts: Sequence[int], to_device: ToDevice) -> Tensor | None:
    """Return each row's token type, int64 `[rows]`: 1 for the second text of a pair. Return None if there is no pair."""
    types = None
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        pooling = sequence.request.pooling
        if pooling is not None and pooling.first_tokens is not None:
            types = np.zeros(starts[-1], dtype=np.int64) if types is None else types
            first = min(max(pooling.first_tokens - task.num_computed, 0), task.num_tokens)
            types[start + first : start + task.num_tokens] = 1
    return None if types is None else to_device(types)


def _adapter_ids(
    scheduled: Sequence[ScheduledSequence], counts: Sequence[int], adapters: Sequence[str], to_device: ToDevice
) -> Tensor | None:
    """Return each row's adapter id, int64 `[rows]`: 0 for none, then from 1 on. Return None if no row has an adapter."""
    numbers = {name: number for number, name in enumerate(("", *adapters))}
    own = [numbers[sequence.adapter] for sequence, _ in scheduled]
    return to_device(np.repeat(own, counts)) if any(own) else None


def _encoder_rows(
    scheduled: Sequence[ScheduledSequence], starts: Sequence[int], encoder_rows: Mapping[str, Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return, for each item of this step, the batch rows that encoder rows replace, and those encoder rows."""
    index: list[Tensor] = []
    replacements: list[Tensor] = []
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        if task.num_computed >= sequence.media_end:
            continue
        for feature in sequence.features:
            found = embeds_in_range(feature.range, task.num_computed, task.num_computed + task.num_tokens)
            if found is not None:
                tokens, first, last = found
                index.append(tokens + (start - task.num_computed))
                replacements.append(encoder_rows[feature.hash][first:last])
    return index, replacements


def embeds_in_range(where: PlaceholderRange, start: int, stop: int) -> tuple[Tensor, int, int] | None:
    """Return which of the tokens `[start, stop)` are embeddings of an item, and the range of the item's rows for them.

    Returns (token indices, first row, end row), or None if there are none. Example: the item is at offset 10 and its mask is
    F T F T T. In [12, 15), tokens 13 and 14 are its rows 1 and 2: ([13, 14], 1, 3).
    """
    begin, end = max(0, start - where.offset), min(where.length, stop - where.offset)
    if begin >= end:
        return None
    first, last = where.rows(begin, end)
    if first == last:
        return None
    tokens = torch.arange(begin, end) if where.is_embed is None else where.is_embed[begin:end].nonzero().flatten() + begin
    return tokens + where.offset, first, last
