"""Data types: placeholder ranges, grids, headers, pickling."""

from __future__ import annotations

import pickle

import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError, MediaError, SensoriumError
from sensorium.mm.types import (
    AudioItem,
    FramePlan,
    ImageItem,
    ItemGeometry,
    MediaHeader,
    PlaceholderRange,
    VideoItem,
    VisionChunk,
)
from sensorium.models.registry import find_architecture, native_architectures

ARCHITECTURES = native_architectures()

MASKED = PlaceholderRange(2, 5, torch.tensor([False, True, False, True, True]))


def test_rows_of_a_masked_range():
    assert MASKED.num_embeds == 3
    assert MASKED.end == 7
    assert MASKED.rows(3, 5) == (1, 3)
    assert MASKED.rows(0, 2) == (0, 1)
    assert MASKED.rows(-4, 99) == (0, 3)
    assert MASKED.mask().tolist() == [False, True, False, True, True]


def test_rows_without_a_mask_are_the_tokens():
    plain = PlaceholderRange(10, 4)
    assert [plain.rows(*window) for window in [(0, 4), (1, 3), (-2, 2), (3, 9), (4, 6)]] == [
        (0, 4),
        (1, 3),
        (0, 2),
        (3, 4),
        (4, 4),
    ]
    assert plain.num_embeds == 4
    assert plain.mask().all()


def test_an_empty_mask_uses_no_rows():
    nothing = PlaceholderRange(0, 3, torch.zeros(3, dtype=torch.bool))
    assert (nothing.num_embeds, nothing.rows(0, 3)) == (0, (0, 0))


def test_grids():
    grid = ItemGeometry(3, 4, 6, 2)
    assert (grid.merged, grid.num_embeds) == ((3, 2, 3), 18)


def test_extra_rows_are_counted():
    lines = ItemGeometry(1, 20, 30, 2, extra=10, tiles=(2, 3))
    assert (lines.merged, lines.num_embeds) == ((1, 10, 15), 160)
    assert ItemGeometry(0, 0, 0, extra=7).num_embeds == 7


def test_runs_of_adjacent_embeddings():
    assert MASKED.runs == ((3, 4), (5, 7))
    assert PlaceholderRange(4, 3).runs == ((4, 7),)
    assert PlaceholderRange(4, 0).runs == PlaceholderRange(0, 2, torch.zeros(2, dtype=torch.bool)).runs == ()


def test_ranges_are_shared_if_no_token_is_a_row_of_both():
    other = PlaceholderRange(2, 5, torch.tensor([False, False, True, False, False]))
    assert MASKED.shares(other)
    assert other.shares(MASKED)
    assert not MASKED.shares(MASKED)
    assert not MASKED.shares(PlaceholderRange(2, 5))
    assert not MASKED.shares(PlaceholderRange(3, 5, other.is_embed))


def test_items_know_their_size_and_pickle():
    image = ImageItem(torch.zeros(4, 6, 3, dtype=torch.uint8))
    clip = VideoItem(torch.zeros(2, 4, 6, 3, dtype=torch.uint8), FramePlan((0, 5), (0.0, 0.5), 10, 2.0))
    assert image.header.size == clip.header.size == (4, 6)
    assert AudioItem(torch.zeros(7), 16000).header == MediaHeader("audio", samples=7)
    assert VisionChunk(clip.frames, clip.plan).header == MediaHeader("vision_chunk", 4, 6, clip.plan)
    assert torch.equal(pickle.loads(pickle.dumps(image)).pixels, image.pixels)


def test_errors_have_one_base_class():
    error = MediaError("image", 3, "it is broken")
    assert str(error) == "image 3: it is broken"
    assert isinstance(error, InputError)
    assert isinstance(error, SensoriumError)
    assert isinstance(error, ValueError)


def test_registry_names_the_nearest():
    for name in ARCHITECTURES:
        assert find_architecture(name) is ARCHITECTURES[name]
    with pytest.raises(ConfigError, match="Qwen2VLForConditionalGeneration"):
        find_architecture("Qwen2VLForConditionalGenerator")
    with pytest.raises(
        ConfigError, match=r"'ZyxwvForConditionalGeneration' here \(docs/models\.md lists the known ones\)"
    ):  # only its ending is known
        find_architecture("ZyxwvForConditionalGeneration")
    with pytest.raises(ConfigError, match="no implementation of the architecture 'x'"):
        find_architecture("x")
