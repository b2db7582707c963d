"""Batches: rows, slots, positions, key ranges, and which encoder rows replace which tokens."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from prompt_attention import ATTENTIONS
from sensorium.engine.types import RequestUpdate, ScheduledRequest
from sensorium.engine.worker.batch import KVCaches, ModelRows, build_batch, embeds_in_range
from sensorium.engine.worker.sequence_state import SequenceState
from sensorium.mm.rules import Rule
from sensorium.mm.types import PlaceholderRange
from sensorium.models.families.mllama.rules import rows_of_tiles
from sensorium.models.interface import CacheSpec

CACHES = KVCaches([], [0], [CacheSpec("full", 1, 8, torch.float32)], 4)
MASKED = PlaceholderRange(10, 5, torch.tensor([False, True, False, True, True]))


@pytest.mark.parametrize(
    ("where", "start", "stop", "tokens", "rows"),
    [
        (MASKED, 13, 15, [13, 14], (1, 3)),
        (MASKED, 10, 12, [11], (0, 1)),
        (MASKED, 0, 99, [11, 13, 14], (0, 3)),
        (PlaceholderRange(10, 5), 12, 14, [12, 13], (2, 4)),
        (PlaceholderRange(10, 5), 4, 11, [10], (0, 1)),
    ],
)
def test_embeddings_of_an_item_in_a_range(where, start, stop, tokens, rows):
    found = embeds_in_range(where, start, stop)
    assert found[0].tolist() == tokens
    assert found[1:] == rows


@pytest.mark.parametrize(("start", "stop"), [(5, 10), (15, 20), (12, 13), (10, 11)])
def test_a_range_without_embeddings(start, stop):
    assert embeds_in_range(MASKED, start, stop) is None


def make_sequence(toy, tokens=(5, 6, 3, 3, 3, 3, 7, 8)):
    request = toy.make_request("r", random.Random(0), media=False)
    return SequenceState(replace(request, prompt_token_ids=tokens, features=(toy.item(2, 4),)), rope_axes=3)


def test_prompt_and_decode_rows_in_one_batch(toy):
    one, two = make_sequence(toy), make_sequence(toy)
    two.token_ids += [50, 51]
    encoded = {one.features[0].hash: torch.arange(4.0)[:, None].expand(4, 8)}
    tasks = [ScheduledRequest("a", 3, 4, ((7, 2),)), ScheduledRequest("b", 9, 1, ((1, 4, 5),))]
    batch = build_batch(list(zip((one, two), tasks, strict=True)), encoded, CACHES, torch.from_numpy)
    assert batch.input_ids.tolist() == [3, 3, 3, 7, 51]
    assert batch.attn[0].query_start_loc == (0, 4, 5)
    assert batch.attn[0].seq_lens == (7, 10)
    assert batch.attn[0].block_tables.tolist() == [[7, 2, 0], [1, 4, 5]]
    assert batch.attn[0].slot_mapping.tolist() == [31, 8, 9, 10, 21]
    assert batch.embed_index.tolist() == [0, 1, 2]
    assert batch.embed_rows[:, 0].tolist() == [1, 2, 3]
    assert batch.positions.tolist() == [[2, 2, 2, 6, 9], [2, 2, 2, 6, 9], [3, 4, 5, 6, 9]]


def test_a_step_of_text_has_no_embeddings(toy):
    sequence = make_sequence(toy)
    batch = build_batch([(sequence, ScheduledRequest("a", 6, 2, ((0, 1),)))], {}, CACHES, torch.from_numpy)
    assert batch.embed_index is None
    assert batch.embed_rows is None


def test_positions_continue_after_the_prompt_and_follow_updates(toy):
    sequence = make_sequence(toy)
    sequence.token_ids += [9, 9]
    out = np.empty((3, 5), dtype=np.int64)
    sequence.fill_positions(out, 5)
    assert out[0].tolist() == [2, 6, 7, 8, 9]
    sequence.update(RequestUpdate("r", 9, (4, 4), (toy.item(10, 1),), restart=True))
    assert (sequence.token_ids[8:], sequence.turn_start, sequence.media_end) == ([9, 4, 4], 11, 11)
    sequence.update(RequestUpdate("r", 2))
    assert (sequence.features, sequence.turn_start, sequence.positions.shape) == ([], 2, (3, 2))


def key_range_of(sequence, computed, count, window=None, other=None):
    """Return the key ranges of one step, `[2, rows]`, or None."""
    caches = replace(CACHES, specs=[replace(CACHES.specs[0], window=window)])
    tasks = [(sequence, ScheduledRequest("a", computed, count, ((0, 1, 2),)))]
    tasks += [(other, ScheduledRequest("b", 2, 1, ((3,),)))] if other else []
    encoded = {feature.hash: torch.zeros(4, 8) for feature in sequence.features}
    return build_batch(tasks, encoded, caches, torch.from_numpy).attn[0].key_range


def test_rows_of_an_item_attend_to_its_end(toy):
    request = toy.request("r", (5, 6, 3, 3, 3, 3, 3, 3, 7, 8), [toy.item(2, 4, edges=True)])  # rows are the tokens [3, 7)
    sequence = SequenceState(request, 3, ATTENTIONS["bidirectional_items"])
    assert key_range_of(sequence, 1, 8).tolist() == [[0] * 8, [2, 3, 7, 7, 7, 7, 8, 9]]
    assert key_range_of(sequence, 0, 8, window=3).tolist() == [[0, 0, 0, 1, 2, 3, 4, 5], [1, 2, 3, 7, 7, 7, 7, 8]]
    assert key_range_of(sequence, 0, 3) is None
    assert key_range_of(sequence, 7, 3) is None
    other = SequenceState(toy.request("b", (5, 6, 7)), 3, ATTENTIONS["bidirectional_items"])
    assert key_range_of(sequence, 3, 5, None, other).tolist() == [[0] * 6, [7, 7, 7, 7, 8, 3]]


def test_start_and_end_tokens_of_a_bidirectional_range_attend_to_its_end(toy):
    request = toy.request("r", (5, 6, 3, 3, 3, 3, 3, 3, 7, 8), [toy.item(2, 4, edges=True)])
    sequence = SequenceState(request, 3, ATTENTIONS["bidirectional_ranges"])
    assert key_range_of(sequence, 1, 8).tolist() == [[0] * 8, [2, 8, 8, 8, 8, 8, 8, 9]]
    assert key_range_of(sequence, 0, 2) is None
    pair = SequenceState(toy.request("p", (5, *[3] * 7, 6), toy.pair(1, 2)), 3, ATTENTIONS["bidirectional_ranges"])
    assert pair.spans == [(1, 8)]


def test_rows_of_a_bidirectional_prompt_attend_to_all_of_it(toy):
    sequence = SequenceState(toy.request("r", (5, 6, 7, 8)), 3, ATTENTIONS["bidirectional_prompt"])
    assert key_range_of(sequence, 0, 4, window=2).tolist() == [[0] * 4, [4] * 4]
    sequence.token_ids += [9, 9]
    assert key_range_of(sequence, 0, 6, window=2).tolist() == [[0, 0, 0, 0, 3, 4], [4, 4, 4, 4, 5, 6]]
    assert key_range_of(sequence, 4, 2) is None
    sequence.update(RequestUpdate("r", 3, (9, 9), restart=True))
    assert key_range_of(sequence, 0, 5).tolist() == [[0] * 5, [3, 3, 3, 4, 5]]


def test_windows_of_a_bidirectional_prompt_reach_to_both_sides(toy):
    sequence = SequenceState(toy.request("r", (5, 6, 7, 8)), 3, ATTENTIONS["bidirectional_prompt_windows"])
    assert key_range_of(sequence, 0, 4, window=2).tolist() == [[0, 0, 1, 2], [2, 3, 4, 4]]
    assert key_range_of(sequence, 0, 4).tolist() == [[0] * 4, [4] * 4]
    sequence.token_ids += [9, 9]
    assert key_range_of(sequence, 0, 6, window=2).tolist() == [[0, 0, 1, 2, 3, 4], [2, 3, 4, 4, 5, 6]]
    assert key_range_of(sequence, 4, 2, window=2) is None


def test_modality_ids_of_rows(toy):
    request = toy.request("r", (5, 6, 3, 3, 3, 3, 3, 3, 7, 8), [toy.item(2, 4, edges=True)])
    tasks = [
        (SequenceState(request, 3), ScheduledRequest("a", 1, 5, ((0, 1),))),
        (SequenceState(request, 3), ScheduledRequest("b", 6, 3, ((2, 3, 4),))),
    ]
    encoded = {request.features[0].hash: torch.zeros(4, 8)}
    device = torch.from_numpy
    assert build_batch(tasks, encoded, CACHES, device).modality_ids is None
    routed = build_batch(tasks, encoded, CACHES, device, ModelRows({"image": 2, "video": 1})).modality_ids
    assert routed.tolist() == [0, 2, 2, 2, 2, 2, 2, 0]
    assert build_batch(tasks, encoded, CACHES, device, ModelRows({"audio": 1})).modality_ids is None
    tasks = [(SequenceState(request, 3), ScheduledRequest("b", 9, 1, ((2, 3, 4),)))]
    assert build_batch(tasks, encoded, CACHES, device, ModelRows({"image": 2})).modality_ids is None  # behind all items


def test_rows_before_and_after_the_token_of_an_optional_encoder_input(toy):
    """Rows from the token on do not see its last rows. A sequence without an encoder input has no block."""
    caches = KVCaches([], [0, 1], [CACHES.specs[0], CacheSpec("cross", 1, 8, torch.float32, optional=True)], 4)
    item = toy.item(2, 6)
    item = replace(item, range=PlaceholderRange(3, 6), geometry=replace(item.geometry, visible=Rule.of(rows_of_tiles, 2)))
    request = replace(toy.make_request("r", random.Random(0), media=False), prompt_token_ids=tuple(range(4, 12)))
    with_item, without = SequenceState(replace(request, cross=(item,)), rope_axes=3), SequenceState(request, rope_axes=3)
    tasks = [ScheduledRequest("a", 1, 4, ((1, 2), (5, 6)), write_cross=True), ScheduledRequest("b", 6, 2, ((3, 4), ()))]
    tasks.append(ScheduledRequest("c", 7, 1, ((7, 8), (9, 2))))
    batch = build_batch(
        list(zip((with_item, without, with_item), tasks, strict=True)), {item.hash: torch.zeros(6, 8)}, caches, torch.from_numpy
    )
    cross = batch.attn[1]
    assert cross.query_start_loc == (0, 2, 4, 6, 7)  # tokens 1 and 2, then 3 and 4; the others
    assert cross.seq_lens == (6, 4, 1, 4)
    assert cross.block_tables.tolist() == [[5, 6], [5, 6], [0, 0], [9, 2]]
    assert cross.slot_mapping.tolist() == [20, 21, 22, 23, 24, 25]
    assert not cross.causal
    assert batch.attn[0].query_start_loc == (0, 4, 6, 7)
    assert batch.cross_mask.int().tolist() == [[1, 1, 1, 1, 0, 0, 1], [0, 0, 1, 1, 0, 0, 1]]
    alone = build_batch([(without, tasks[1])], {}, caches, torch.from_numpy)
    assert alone.cross_mask is None
