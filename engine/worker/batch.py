"""Packs the scheduled sequences of a step into one ForwardBatch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...kernels.metadata import AttentionMetadata
from ...mm.rules import KeyOrder
from ...mm.types import MultiModalFeature, PlaceholderRange
from ...models.interface import AttentionCapture, CacheSpec, ForwardBatch, HiddenCapture
from ..bidirectional_spans import BidirectionalSpan
from ..pooling_requests import CrossAttentionWeights, LayerStates
from ..types import ScheduledRequest
from .sequence_state import PlacedSequence
from .staging import ToDevice

ScheduledSequence = tuple[PlacedSequence, ScheduledRequest]


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


@dataclass(frozen=True)
class ModelRows:
    """Sizes and rules of a model by which batches are built. The names are those of Model.

    Args:
        routes: `routes_by_modality`.
    """

    routes: Mapping[str, int] | None = None
    adapters: Sequence[str] = ()
    hidden_size: int = 0


def build_batch(
    scheduled: Sequence[ScheduledSequence],
    encoder_rows: Mapping[str, Tensor],
    caches: KVCaches,
    to_device: ToDevice,
    model: ModelRows = ModelRows(),
) -> ForwardBatch:
    """Pack the rows of all sequences, in order. `encoder_rows`: by the hash of their item."""
    counts = [task.num_tokens for _, task in scheduled]
    starts = [0, *accumulate(counts)]
    ids: list[int] = []
    positions = np.empty((len(scheduled[0][0].positions), starts[-1]), dtype=np.int64)
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        tokens = sequence.token_ids[task.num_computed : task.num_computed + task.num_tokens]
        tokens += task.draft_token_ids
        ids += tokens + [0] * (task.num_tokens - len(tokens))  # tokens after the known ones are still on the device
        sequence.fill_positions(positions[:, start : start + task.num_tokens], task.num_computed)
    embed_index, embed_rows = _encoder_rows(scheduled, starts, encoder_rows)
    attn = [_build_attention(scheduled, tuple(starts), caches, group, to_device) for group in range(len(caches.specs))]
    cross_rows = [part for sequence, task in scheduled if task.write_cross for part in _ordered_rows(sequence, encoder_rows)]
    return ForwardBatch(
        input_ids=to_device(np.array(ids)),
        positions=to_device(positions),
        attn=[attn[group] for group in caches.group_of],
        kv_caches=caches.tensors,
        embed_index=to_device(torch.cat(embed_index).numpy()) if embed_index else None,
        embed_rows=torch.cat(embed_rows) if embed_rows else None,
        cross_rows=torch.cat(cross_rows) if cross_rows else None,
        cross_mask=_cross_mask(scheduled, starts, to_device) if any(spec.optional for spec in caches.specs) else None,
        modality_ids=_modality_ids(scheduled, starts, model.routes, to_device) if model.routes else None,
        adapters=_adapter_ids(scheduled, counts, model.adapters, to_device) if model.adapters else None,
        token_types=_token_types(scheduled, starts, to_device),
        captures=_captures(scheduled),
        hidden_captures=_hidden_captures(scheduled, starts, model.hidden_size),
    )


def cross_counts(scheduled: Sequence[ScheduledSequence]) -> list[int]:
    """Return how many of a step's cross-attention rows each sequence has."""
    items = (sequence.message.cross if task.write_cross else () for sequence, task in scheduled)
    return [sum(item.range.num_embeds for item in of_sequence) for of_sequence in items]


def _ordered_rows(sequence: PlacedSequence, encoder_rows: Mapping[str, Tensor]) -> Iterator[Tensor]:
    """Yield the encoder rows that cross-attention reads, in the order of its keys: the hidden ones of all items come last."""
    items = [(encoder_rows[item.hash], _visible_rows(item)) for item in sequence.message.cross]
    yield from (rows[:visible] for rows, visible in items)
    yield from (rows[visible:] for rows, visible in items if visible < len(rows))


def _visible_rows(item: MultiModalFeature) -> int:
    """Return how many rows of a cross-attention item the tokens from the item on attend to."""
    rows, rule = item.range.num_embeds, item.geometry.visible
    return rows if rule is None else int(rule(rows))


def _captures(scheduled: Sequence[ScheduledSequence]) -> tuple[AttentionCapture, ...]:
    captures = []
    for index, (sequence, task) in enumerate(scheduled):
        if sequence.cross_weights is not None:
            assert isinstance(sequence.message.pooling, CrossAttentionWeights)
            rows = sequence.cross_weights[:, task.num_computed : task.num_computed + task.num_tokens]
            captures.append(AttentionCapture(index, sequence.message.pooling.heads, rows))
    return tuple(captures)


def _hidden_captures(
    scheduled: Sequence[ScheduledSequence], starts: Sequence[int], hidden_size: int
) -> tuple[HiddenCapture, ...]:
    """Return where each sequence that returns hidden states of a layer keeps those of this step."""
    captures = []
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        pooling = sequence.message.pooling
        if isinstance(pooling, LayerStates):
            if sequence.kept_rows is None:
                sequence.kept_rows = torch.zeros(sequence.prompt_length, hidden_size)
            rows = sequence.kept_rows[task.num_computed : task.num_computed + task.num_tokens]
            captures.append(HiddenCapture(start, pooling.layer, rows))
    return tuple(captures)


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
        lengths = [sequence.cross_rows for sequence, _ in scheduled]
        written = [(0, length if task.write_cross else 0) for task, length in zip(tasks, lengths, strict=True)]
        key_range = _cross_key_range(scheduled)
    else:
        stops = [task.num_computed + task.num_tokens for task in tasks]
        lengths, written = stops, [(task.num_computed, stop) for task, stop in zip(tasks, stops, strict=True)]
        if spec.answer_window is not None:
            prompts = [sequence.turn_start for sequence, _ in scheduled]
            lengths = [spec.num_slots(stop, prompt) for stop, prompt in zip(stops, prompts, strict=True)]
            written = [_written(spec, *tokens, prompt) for tokens, prompt in zip(written, prompts, strict=True)]
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


def _written(spec: CacheSpec, start: int, stop: int, prompt: int) -> tuple[int, int]:
    """Return the first slot and the end of the slots of the keys of tokens `[start, stop)`, whose slots are adjacent."""
    first = spec.slot(start, prompt)
    return first, first + stop - start


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
    for row_blocks, (row, first, _, stop) in zip(split, parts, strict=True):
        blocks = tables[row, first // block_size : -(-stop // block_size)]
        row_blocks[: len(blocks)] = blocks
    return (0, *accumulate(stop - start for _, _, start, stop in parts)), lengths, split


def _split_at_items(
    scheduled: Sequence[ScheduledSequence], lengths: Sequence[int], tables: np.ndarray
) -> tuple[tuple[int, ...], list[int], np.ndarray]:
    """Return first rows, lengths and block tables of the parts of sequences before and from their first cross-attention item.

    Each part is a request of the metadata: the second attends to `ItemGeometry.visible` rows of each item. The rows of
    sequences without an item attend to one key of any other; the model masks the result (`ForwardBatch.cross_mask`).
    """
    parts = []
    for row, ((sequence, task), length) in enumerate(zip(scheduled, lengths, strict=True)):
        before = _rows_before_items(sequence, task)
        hidden = sum(item.range.num_embeds - _visible_rows(item) for item in sequence.message.cross)
        both = (row, before, max(1, length)), (row, task.num_tokens - before, length - hidden)
        parts += [part for part in both if part[1]]
    width = tables if tables.shape[1] else np.zeros((len(tables), 1), dtype=tables.dtype)
    rows = [row for row, _, _ in parts]
    return (0, *accumulate(count for _, count, _ in parts)), [length for _, _, length in parts], width[rows]


def _cross_mask(scheduled: Sequence[ScheduledSequence], starts: Sequence[int], to_device: ToDevice) -> Tensor | None:
    """Return `ForwardBatch.cross_mask`."""
    if not any(sequence.message.cross for sequence, _ in scheduled):
        return None
    mask = np.zeros((2, starts[-1]), dtype=bool)
    for (sequence, task), start in zip(scheduled, starts, strict=False):
        if sequence.message.cross:
            first = _rows_before_items(sequence, task)
            mask[0, start : start + task.num_tokens] = mask[1, start + first : start + task.num_tokens] = True
    return to_device(mask)


def _rows_before_items(sequence: PlacedSequence, task: ScheduledRequest) -> int:
    """Return how many rows of a step come before the sequence's first cross-attention item; all of them if it has none."""
    items = sequence.message.cross
    return min(max(items[0].range.offset - task.num_computed, 0), task.num_tokens) if items else task.num_tokens


def _cross_key_range(scheduled: Sequence[ScheduledSequence]) -> np.ndarray | None:
    """Return the range of cross-attention keys of each row, int64 `[2, rows]`; None if no sequence has several items.

    Items whose tokens are adjacent form a group. A row attends to the items of the last group that has begun, as far as their
    tokens have come. Rows before all items attend to all keys, hidden ones included. Source: transformers' MllamaProcessor.
    """
    if all(len(sequence.message.cross) < 2 for sequence, _ in scheduled):
        return None
    parts = []
    for sequence, task in scheduled:
        offsets, total = [item.range.offset for item in sequence.message.cross], 0
        ranges = [(0, max(1, sequence.cross_rows))]
        for number, item in enumerate(sequence.message.cross):
            joins = number and offsets[number] == offsets[number - 1] + 1
            first = ranges[-1][0] if joins else total
            total += _visible_rows(item)
            ranges.append((first, total))
        row = np.arange(task.num_computed, task.num_computed + task.num_tokens)
        parts.append(np.array(ranges)[np.searchsorted(offsets, row, side="right")])
    key_range: np.ndarray = np.concatenate(parts).T.copy()  # contiguous, because kernels take its address
    return key_range


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
    slots: np.ndarray = table[token // block_size] * np.int64(block_size) + token % block_size
    return slots


def _key_range(scheduled: Sequence[ScheduledSequence], starts: Sequence[int], window: int | None) -> np.ndarray | None:
    """Return the key range of each row, int64 `[2, rows]`; None if no row is in a bidirectional span.

    Rows of a span attend up to its end. Those of an item keep their window; those of a bidirectional prompt see all of it, or
    as many rows ahead as behind.
    """
    wide = [
        (sequence, task, start)
        for (sequence, task), start in zip(scheduled, starts, strict=False)
        if _spans_in_step(sequence, task) and (window is not None or not sequence.prompt_attention.windows_only)
    ]
    if not wide:
        return None
    positions = np.concatenate([np.arange(task.num_computed, task.num_computed + task.num_tokens) for _, task in scheduled])
    key_range = np.stack((np.zeros_like(positions) if window is None else (positions + 1 - window).clip(min=0), positions + 1))
    for sequence, task, start in wide:
        for first, last in _spans_in_step(sequence, task):
            inside = slice(start + first - task.num_computed, start + last - task.num_computed)
            key_range[1, inside] = last
            if sequence.prompt_attention.two_sided_windows and window is not None:
                key_range[1, inside] = np.minimum(last, positions[inside] + window)
            elif sequence.prompt_attention.whole_prompt:
                key_range[0, inside] = first
            if sequence.key_order is not None:
                key_range[:, inside] = sequence.key_order.key_range
    return key_range


def _spans_in_step(sequence: PlacedSequence, task: ScheduledRequest) -> list[BidirectionalSpan]:
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
        first_tokens = sequence.message.first_tokens
        if first_tokens is not None:
            types = np.zeros(starts[-1], dtype=np.int64) if types is None else types
            first = min(max(first_tokens - task.num_computed, 0), task.num_tokens)
            types[start + first : start + task.num_tokens] = 1
    return None if types is None else to_device(types)


def _adapter_ids(
    scheduled: Sequence[ScheduledSequence], counts: Sequence[int], adapters: Sequence[str], to_device: ToDevice
) -> Tensor | None:
    """Return each row's adapter id, int64 `[rows]`: 0 for none, then from 1 on. Return None if no row has an adapter."""
    numbers = {name: number for number, name in enumerate(("", *adapters))}
    row_adapters = [numbers[sequence.adapter] for sequence, _ in scheduled]
    return to_device(np.repeat(row_adapters, counts)) if any(row_adapters) else None


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
            in_range = embeds_in_range(feature.range, task.num_computed, task.num_computed + task.num_tokens)
            if in_range is not None:
                tokens, first, last = in_range
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
