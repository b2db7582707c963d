"""M-RoPE positions: published values, transformers' rule where it agrees, and invariants."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracle import build_model, token_ids
from sensorium.mm.positions import grid_positions, interleave_by_time, mrope_positions
from sensorium.mm.rules import Rule
from sensorium.mm.types import ItemGeometry, PlaceholderRange
from sensorium.models.families.bagel.rules import one_position
from sensorium.models.families.hunyuan_vl.rules import lines_on_a_page
from sensorium.models.families.isaac.rules import grid_from_zero
from sensorium.models.families.keye.rules import with_sides
from sensorium.models.families.minicpmv.rules import on_canvas
from sensorium.models.families.qwen2_5_omni.rules import joined_edges


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


def test_the_product_of_step_and_time_is_truncated():
    assert grid_positions(0, clip(5, 0.5))[0, ::4].tolist() == [0, 0, 1, 1, 2]
    assert grid_positions(7, clip(4, 2 * 2 / 24))[0, ::4].tolist() == [7, 7, 7, 7]


def test_text_inside_a_range_counts_as_text():
    mask = torch.tensor([False, True, True, True, True, False])
    positions, delta = mrope_positions(8, [(PlaceholderRange(1, 6, mask), SQUARE)])
    assert positions.tolist() == [digits("0 1 2222 4 5"), digits("0 1 2233 4 5"), digits("0 1 2323 4 5")]
    assert delta == -2


def masked(offset: int, text: str) -> PlaceholderRange:
    """Return a range from a string: `.` is a token of text, `#` an embedding."""
    return PlaceholderRange(offset, len(text), torch.tensor([letter == "#" for letter in text]))


def test_frames_with_text_between_them_are_separate_grids():
    """Each group of frames has "<0.2 seconds>", start, grid and end."""
    where, clip = masked(1, "..####...####."), ItemGeometry(2, 4, 4, 2, time_step=7.0, times=(0.2, 1.2))
    positions, delta = mrope_positions(17, [(where, clip)])
    assert positions.tolist() == [
        digits("0 1 2 3333 5 6 7 8888") + [10, 11, 12],
        digits("0 1 2 3344 5 6 7 8899") + [10, 11, 12],
        digits("0 1 2 3434 5 6 7 8989") + [10, 11, 12],
    ]
    assert delta == -4


def test_steps_of_different_sizes_are_separate_grids():
    where, clip = masked(1, ".####.##.####"), with_sides(ItemGeometry(3, 4, 4, 2), ((4, 4), (2, 4), (4, 4)))
    assert clip.num_embeds == 10
    positions, delta = mrope_positions(15, [(where, clip)])
    assert positions.tolist() == [
        digits("0 1 2222 4 55 7 8888") + [10],
        digits("0 1 2233 4 55 7 8899") + [10],
        digits("0 1 2323 4 56 7 8989") + [10],
    ]
    assert delta == -4


def test_a_run_of_several_steps_keeps_its_time():
    where, clip = masked(0, "########.####"), ItemGeometry(3, 4, 4, 2, time_step=2.0)
    assert mrope_positions(13, [(where, clip)])[0][0].tolist() == digits("0000 2222 3 4444")


def test_a_run_with_an_incomplete_step_fails_an_assertion():
    with pytest.raises(AssertionError, match="not a whole number of steps of 2 x 2"):
        mrope_positions(5, [(masked(0, "##.##"), SQUARE)])
    with pytest.raises(AssertionError, match="3 tokens for 4 embeddings"):
        mrope_positions(5, [(masked(0, "###.."), SQUARE)])


def test_audio_advances_as_text_does():
    sound = ItemGeometry(5, 1, 1, linear=True)
    positions, delta = mrope_positions(8, place((1, sound)))
    assert positions.tolist() == [list(range(8))] * 3
    assert delta == 0
    assert mrope_positions(9, [(masked(1, "##.###"), sound)])[0].tolist() == [list(range(9))] * 3


@pytest.mark.parametrize("axes", [1, 3])
def test_all_tokens_of_a_still_item_have_one_position(axes):
    image = replace(SQUARE, merge=2, positions=Rule.of(one_position))
    positions, delta = mrope_positions(17, [(masked(2, ".####."), image), (masked(8, ".####."), image)], axes)
    assert positions.tolist() == [digits("01 222222 333333 456")] * axes
    assert delta == -10
    assert mrope_positions(3, [], axes)[0].tolist() == [[0, 1, 2]] * axes


def test_tiles_and_the_whole_image_lie_on_one_canvas():
    """Two lines of a tile of 1 x 2 rows, after the whole image of 1 x 2 rows; newlines after both tiles."""
    image = ItemGeometry(1, 2, 2, extra=2, tiles=(2, 1), linear=True, positions=Rule.of(on_canvas, (1, 2), (1, 2)))
    positions, delta = mrope_positions(16, [(masked(1, ".##..##...##.."), image)])
    rows = ["0 1 11 1 1 11 1 1 1 11 1 1 4", "0 0 11 3 1 11 1 1 2 22 2 1 4", "0 0 12 3 1 12 2 3 1 12 2 1 4"]
    assert positions.tolist() == [digits(one) for one in rows]
    assert delta == -11


def test_with_one_axis_only_one_position_differs_from_indices():
    rules = [Rule.of(lines_on_a_page), Rule.of(grid_from_zero), Rule.of(joined_edges), Rule.of(on_canvas, (2, 2), (2, 2))]
    for rule in rules:
        positions, delta = mrope_positions(13, place((1, replace(SQUARE, positions=rule)), (6, IMAGE)), axes=1)
        assert (positions.tolist(), delta) == ([list(range(13))], 0)


def test_a_fourth_axis_counts_rows():
    positions, delta = mrope_positions(7, place((1, SQUARE)), axes=4)
    assert positions.tolist() == [digits("0 1234 5 6"), digits("0 1111 5 6"), digits("0 1122 5 6"), digits("0 1212 5 6")]
    assert delta == 0


def shared(offset: int, clip: ItemGeometry, sound: ItemGeometry, span: int = 1) -> list[tuple[PlaceholderRange, ItemGeometry]]:
    """Return a video and its audio that share a range, with a token before and after the rows of both."""
    ours = interleave_by_time(clip, sound, span)
    edge = torch.zeros(1, dtype=torch.bool)
    masks = [torch.cat([edge, mask, edge]) for mask in (ours, ~ours)]
    return [(PlaceholderRange(offset, len(mask), mask), geometry) for mask, geometry in zip(masks, (clip, sound), strict=True)]


def test_a_video_and_its_audio_start_together():
    clip, sound = ItemGeometry(2, 2, 4, 2, time_step=3.0), ItemGeometry(5, 1, 1, linear=True)
    assert interleave_by_time(clip, sound).tolist() == [bool(int(c)) for c in "110001100"]
    assert interleave_by_time(clip, sound, span=4).tolist() == [bool(int(c)) for c in "111100000"]
    positions, delta = mrope_positions(13, shared(1, clip, sound))
    assert positions.tolist() == [
        digits("0 1 22 234 55 56 7 8"),
        digits("0 1 22 234 22 56 7 8"),
        digits("0 1 23 234 23 56 7 8"),
    ]
    assert delta == -4
    positions, delta = mrope_positions(13, shared(1, replace(clip, positions=Rule.of(joined_edges)), sound))
    assert positions[0].tolist() == digits("0 0 11 123 44 45 6 6")
    assert delta == -6


def test_positions_with_one_axis_are_indices():
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
def test_positions_never_overlap_and_decoding_continues(parts, tail):
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
def test_equal_to_transformers_where_no_video_outlasts_its_grid(oracle, data):
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


def stub(family: str, methods: tuple[str, ...], owner: str, **attributes) -> SimpleNamespace:
    """Return transformers' position rule of a family, without a model."""
    from importlib import import_module

    cls = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), owner)
    model = SimpleNamespace(**attributes)
    for name in methods:
        setattr(model, name, getattr(cls, name).__get__(model))
    return model


PARTED = {"qwen3_vl": "Qwen3VLModel", "glm4v": "Glm4vModel", "ernie4_5_vl_moe": "Ernie4_5_VLMoeModel"}


@pytest.mark.parametrize("family", PARTED)
@given(data=st.data())
def test_equal_to_the_oracle_for_videos_with_timestamps_or_temporal_merging(family, data):
    vision = SimpleNamespace(spatial_merge_size=2, temporal_merge_size=2)
    model = stub(
        family, ("get_rope_index", "get_vision_position_ids"), PARTED[family], config=SimpleNamespace(vision_config=vision)
    )
    types, grids, placed = [0], {1: [], 2: []}, []
    for _ in range(data.draw(st.integers(1, 4))):
        kind, h, w = data.draw(st.sampled_from([1, 2])), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        merges = kind == 2 and family == "ernie4_5_vl_moe"
        t = 1 if kind == 1 else data.draw(st.integers(1, max(h, w))) * (1 + merges)
        geometry = ItemGeometry(t, 2 * h, 2 * w, 2, merge_t=1 + merges)
        grids[kind].append([t, 2 * h, 2 * w])
        inside = [kind] * geometry.num_embeds if merges or kind == 1 else ([0, 0, 0] + [kind] * h * w + [0]) * t
        mask = torch.tensor(inside) > 0
        placed.append((PlaceholderRange(len(types), len(inside), None if mask.all() else mask), geometry))
        types += [*inside, *[0] * data.draw(st.integers(1, 3))]
    want, want_delta = model.get_rope_index(
        torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types], dtype=torch.int32),
        image_grid_thw=torch.tensor(grids[1]) if grids[1] else None,
        video_grid_thw=torch.tensor(grids[2]) if grids[2] else None,
        attention_mask=torch.ones(1, len(types), dtype=torch.int64),
    )
    positions, delta = mrope_positions(len(types), placed)
    assert torch.equal(positions, want[:, 0])
    assert delta == int(want_delta)


OMNI = {  # family -> class, positions per second, mel frames of so many rows, positions in which rows are taken in turn
    "qwen2_5_omni": ("Qwen2_5OmniPreTrainedModelForConditionalGeneration", 25, lambda rows: 4 * rows, 50),
    "qwen3_omni_moe": (
        "Qwen3OmniMoePreTrainedModelForConditionalGeneration",
        13,
        lambda rows: (rows // 13) * 100 + rows % 13 * 8,
        1,
    ),
}
TEXT, IMAGE_ID, VIDEO_ID, SOUND_ID, VISION_START, SOUND_START, END = range(7)


@pytest.mark.parametrize("family", OMNI)
@given(data=st.data())
def test_equal_to_the_oracle_with_audio(family, data):
    """Images, videos and audio, and videos with their audio in one range that lasts at least as long."""
    owner, per_second, mels, span = OMNI[family]
    audio = SimpleNamespace(n_window=50)
    config = SimpleNamespace(
        image_token_id=IMAGE_ID, video_token_id=VIDEO_ID, audio_token_id=SOUND_ID, vision_start_token_id=VISION_START,
        audio_start_token_id=SOUND_START, position_id_per_seconds=per_second, seconds_per_chunk=2, audio_config=audio,
    )  # fmt: skip
    methods = ("get_rope_index", "get_llm_pos_ids_for_vision", "get_chunked_index")
    model = stub(family, methods, owner, config=config, spatial_merge_size=2)
    joint = data.draw(st.booleans())  # the oracle takes videos with audio or without, not both
    ids, grids, sounds, seconds, placed = [TEXT], {IMAGE_ID: [], VIDEO_ID: []}, [], [], []

    def write(start, items, end):
        ids.extend(start)
        length = items[0][0].length
        content = torch.full((length,), END)
        content[0] = SOUND_START  # of a video with its audio, else it is a row
        for where, geometry, token in items:
            content[where.mask()] = token
            placed.append((PlaceholderRange(len(ids), length, where.is_embed), geometry))
        ids.extend([*content.tolist(), *end, *[TEXT] * data.draw(st.integers(1, 3))])

    for kind in [IMAGE_ID, *data.draw(st.lists(st.sampled_from([IMAGE_ID, VIDEO_ID, SOUND_ID]), max_size=3))]:
        h, w, t = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
        rows = data.draw(st.integers(1, 150))
        sound = ItemGeometry(rows, 1, 1, linear=True)
        if kind == SOUND_ID:
            write([SOUND_START], [(PlaceholderRange(0, rows), sound, SOUND_ID)], [END])
            sounds.append(mels(rows))
            continue
        second = data.draw(st.sampled_from([1.0, 2.0]))
        clip = ItemGeometry(1 if kind == IMAGE_ID else t, 2 * h, 2 * w, 2, second * per_second)
        grids[kind].append([clip.t, 2 * h, 2 * w])
        seconds += [second] if kind == VIDEO_ID else []
        if kind == IMAGE_ID or not joint:
            write([VISION_START], [(PlaceholderRange(0, clip.num_embeds), clip, kind)], [END])
            continue
        assume(rows > (t - 1) * clip.time_step + max(h, w))
        (ours, _), (theirs, _) = shared(0, clip, sound, span)
        if family == "qwen2_5_omni":  # which counts the two starts as one
            clip = replace(clip, positions=Rule.of(joined_edges))
        write([VISION_START], [(ours, clip, VIDEO_ID), (theirs, sound, SOUND_ID)], [END])
        sounds.append(mels(rows))
    want, want_delta = model.get_rope_index(
        torch.tensor([ids]),
        torch.tensor(grids[IMAGE_ID]),
        torch.tensor(grids[VIDEO_ID]) if grids[VIDEO_ID] else None,
        torch.ones(1, len(ids), dtype=torch.int64),
        joint,
        torch.tensor(sounds) if sounds else None,
        torch.tensor(seconds) if seconds else None,
    )
    positions, delta = mrope_positions(len(ids), placed)
    assert torch.equal(positions, want[:, 0].long())
    assert delta == int(want_delta)


def test_timed_items_advance_by_their_steps_alone():
    image, film, dot, line = (
        replace(grid, positions=Rule.of(grid_from_zero))
        for grid in (SQUARE, clip(2, 1.0), ItemGeometry(1, 1, 1), ItemGeometry(1, 1, 9))
    )
    positions, delta = mrope_positions(17, place((1, image), (6, film), (15, dot)))
    assert positions[0].tolist() == digits("0 1111 2 3333 4444 5 6 7")
    assert positions[1].tolist() == digits("0 0011 2 0011 0011 5 0 7")
    assert positions[2].tolist() == digits("0 0101 2 0101 0101 5 0 7")
    assert delta == 8 - 17
    wide, delta = mrope_positions(10, place((0, line)))
    assert (wide[:, -1].tolist(), delta) == ([1, 1, 1], 9 - 10)


def test_absolute_items_count_columns_lines_and_items():
    image = ItemGeometry(
        1, 4, 4, 2, extra=4, positions=Rule.of(lines_on_a_page)
    )  # 2 lines of 2 squares and an end, between two rows
    positions, delta = mrope_positions(20, place((1, image), (10, image)), axes=4)
    assert positions[0].tolist() == list(range(20))
    for axis, lines in ((1, [0, 1, 2, 0, 1, 2]), (2, [0, 0, 0, 1, 1, 1])):
        assert positions[axis].tolist() == [0, 1, *lines, 8, 9, 10, *lines, *range(17, 20)]
    assert positions[3].tolist() == [0, 1, *[0] * 6, 8, 9, 10, *[1] * 6, *range(17, 20)]
    assert delta == 0


def test_absolute_items_are_counted_without_the_prompt_embeds_beside_them():
    image = ItemGeometry(1, 4, 4, 2, extra=4, positions=Rule.of(lines_on_a_page))
    rows = ItemGeometry(1, 1, 5, linear=True)
    with_rows, _ = mrope_positions(30, place((0, rows), (6, image), (16, rows), (21, image)), axes=4)
    alone, _ = mrope_positions(30, place((6, image), (21, image)), axes=4)
    assert torch.equal(with_rows, alone)
