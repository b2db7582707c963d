"""Rotary positions: the published values, transformers where its rule agrees, and what must hold for all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import build_model, token_ids
from sensorium.mm.positions import grid_run, mrope_positions
from sensorium.mm.types import ItemGeometry, PlaceholderRange


def place(*items: tuple[int, ItemGeometry]) -> list[tuple[PlaceholderRange, ItemGeometry]]:
    return [(PlaceholderRange(offset, g.num_embeds), g) for offset, g in items]


def digits(text: str) -> list[int]:
    return [int(c) for c in text if c != " "]


IMAGE = ItemGeometry(1, 4, 6, 2)
SQUARE = ItemGeometry(1, 4, 4, 2)


def clip(t: int, step: float) -> ItemGeometry:
    return ItemGeometry(t, 4, 4, 2, step)


@pytest.mark.parametrize(
    ("length", "placed", "axes", "delta"),
    [
        (10, place((2, IMAGE)), ["0 1 222222 5 6", "0 1 222 333 5 6", "0 1 234 234 5 6"], -3),
        (14, place((1, SQUARE), (7, SQUARE)), ["0 1111 3 4 5555 7 8 9", "0 1122 3 4 5566 7 8 9", "0 1212 3 4 5656 7 8 9"], -4),
        (10, place((1, clip(2, 1.0))), ["0 1111 2222 3", "0 1122 1122 3", "0 1212 1212 3"], -6),
        (14, place((1, clip(3, 2.0))), ["0 1111 3333 5555 6", "0 1122 1122 1122 6", "0 1212 1212 1212 6"], -7),
        (14, place((1, clip(3, 1.0))), ["0 1111 2222 3333 4", "0 1122 1122 1122 4", "0 1212 1212 1212 4"], -9),
        (7, place((1, IMAGE)), ["0 111111", "0 111222", "0 123123"], -3),  # at the very end
        (4, [], ["0123", "0123", "0123"], 0),
        (0, [], ["", "", ""], 0),
    ],
)
def test_published_values(length, placed, axes, delta):
    positions, got = mrope_positions(length, placed)
    assert positions.tolist() == [digits(axis) for axis in axes]
    assert positions.dtype == torch.int64
    assert got == delta


def test_the_product_is_cut_not_the_step():
    assert grid_run(0, clip(5, 0.5))[0, ::4].tolist() == [0, 0, 1, 1, 2]
    assert grid_run(7, clip(4, 2 * 2 / 24))[0, ::4].tolist() == [7, 7, 7, 7]


def test_text_inside_a_range_counts_as_text():
    mask = torch.tensor([False, True, True, True, True, False])
    positions, delta = mrope_positions(8, [(PlaceholderRange(1, 6, mask), SQUARE)])
    assert positions.tolist() == [digits("0 1 2222 4 5"), digits("0 1 2233 4 5"), digits("0 1 2323 4 5")]
    assert delta == -2


def test_one_axis_is_a_plain_count():
    positions, delta = mrope_positions(9, place((1, SQUARE)), axes=1)
    assert positions.tolist() == [list(range(9))]
    assert delta == 0


def test_items_may_come_in_any_order():
    placed = place((1, SQUARE), (7, IMAGE))
    assert torch.equal(mrope_positions(15, placed)[0], mrope_positions(15, placed[::-1])[0])


geometries = st.builds(
    lambda t, h, w, step: ItemGeometry(t, 2 * h, 2 * w, 2, step),
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.sampled_from([0.3, 1.0, 2.0, 4.5]),
)  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 4), geometries), max_size=4), st.integers(0, 4))
def test_positions_never_overlap_and_decoding_goes_on(parts, tail):
    placed, token = [], 0
    for text, geometry in parts:
        placed.append((PlaceholderRange(token + text, geometry.num_embeds), geometry))
        token = placed[-1][0].end
    length = token + tail
    positions, delta = mrope_positions(length, placed)
    assert positions.shape == (3, length)
    high = -1
    covered = {i for where, _ in placed for i in range(where.offset, where.end)}
    index = 0
    while index < length:
        stop = next((w.end for w, _ in placed if w.offset == index), index + 1)
        block = positions[:, index:stop]
        assert int(block.min()) == high + 1  # starts right after all that came before
        if index not in covered:
            assert len(set(block[:, 0].tolist())) == 1
        high, index = int(block.max()), stop
    assert length + delta == high + 1


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen2_5_vl"])
def oracle(request):
    return request.param, build_model(request.param, layers=1, vision_depth=2, full_attention=(1,)).model


@given(data=st.data())
def test_equal_to_transformers_where_no_clip_outlasts_its_grid(oracle, data):
    family, model = oracle
    ids, types, grids, placed, seconds = [1], [0], {1: [], 2: []}, [], []
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from([1, 2]))
        h, w = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
        t = 1 if kind == 1 else data.draw(st.integers(1, max(h, w)))
        second = data.draw(st.sampled_from([0.1, 0.25, 0.5])) if kind == 2 else 0.5
        step = 2 * second if family == "qwen2_5_vl" and kind == 2 else 1.0
        geometry = ItemGeometry(t, 2 * h, 2 * w, 2, step)
        placed.append((PlaceholderRange(len(ids), geometry.num_embeds), geometry))
        ids += [token_ids()["<|image_pad|>" if kind == 1 else "<|video_pad|>"]] * geometry.num_embeds + [2, 3]
        types += [kind] * geometry.num_embeds + [0, 0]
        grids[kind].append([t, 2 * h, 2 * w])
        seconds += [second] if kind == 2 else []
    extra = {"second_per_grid_ts": torch.tensor(seconds)} if family == "qwen2_5_vl" and seconds else {}
    want, want_delta = model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([types], dtype=torch.int32),
        image_grid_thw=torch.tensor(grids[1]) if grids[1] else None,
        video_grid_thw=torch.tensor(grids[2]) if grids[2] else None,
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        **extra,
    )
    positions, delta = mrope_positions(len(ids), placed)
    assert torch.equal(positions, want[:, 0])
    assert delta == int(want_delta)
