"""VideoLLaMA3: rows of frames that are left out, their limit, options and the sizes of frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.types import FramePlan, ItemGeometry, MediaHeader, VideoItem
from sensorium.models.families.video_llama_3.processing import VideoLlama3ProcessingInfo, changed_squares
from sensorium.processors.files import ProcessorFiles

SIZE = {"size": {"shortest_edge": 28 * 28, "longest_edge": 16 * 28 * 28}}


def info_of(video: dict[str, Any] | None = None, **options: Any) -> VideoLlama3ProcessingInfo:
    files = ProcessorFiles(video=SIZE if video is None else video, encode=lambda text: [ord(letter) for letter in text])
    return VideoLlama3ProcessingInfo(files, options)


def video(frames: int, side: int = 56, changing: bool = True) -> VideoItem:
    rng = np.random.default_rng(frames)
    pixels = rng.integers(0, 256, (frames if changing else 1, side, side, 3), dtype=np.uint8)
    pixels = np.broadcast_to(pixels, (frames, side, side, 3)).copy()
    plan = FramePlan(tuple(range(frames)), tuple(float(i) for i in range(frames)), frames, 1.0)
    return VideoItem(torch.from_numpy(pixels), plan)


def test_squares_that_change_and_one_of_each_still_frame_are_kept() -> None:
    patches = torch.zeros(3, 2, 2, 2, 2, 5)  # frames, lines, 2, columns, 2, numbers
    patches[1, 1, 0, 0, 1] = 1.0
    patches[2] = patches[1]
    mask = changed_squares(patches.view(48, 5), ItemGeometry(3, 4, 4, 2))
    assert mask.tolist() == [[True] * 4, [False, False, True, False], [True, False, False, False]]
    slight = torch.zeros(2, 2, 2, 2, 5)  # frames, 2, columns, 2, numbers
    slight[1, 0, 1, 0, 0] = 0.1 / 255 * 20  # the mean of the 20 numbers of the second square is the least change
    for factor, last in ((0.99, [True, False]), (1.01, [False, True])):
        assert changed_squares(slight.view(16, 5) * factor, ItemGeometry(2, 2, 4, 2)).tolist() == [[True, True], last]


def test_the_decoded_video_tells_the_rows() -> None:
    info, item = info_of(), video(4, changing=False)
    most = info.geometry(item.header)
    assert (most.num_embeds, info.is_exact(item.header)) == (16, False)
    settled = info.for_item(item)
    grid = settled.geometry(item.header)
    assert (grid.num_embeds, grid.times) == (7, (0.0, 1.0, 2.0, 3.0, 4.0, 1.0, 1.0, 1.0))
    assert settled.is_exact(item.header)
    kwargs, same = settled.process(item, torch.float32)
    assert same == grid
    assert kwargs["kept_rows"].data.tolist() == [0, 1, 2, 3, 4, 8, 12]
    tokens = list(info.span("video", grid).token_ids)
    assert tokens.count(info.placeholder_ids["video"]) == 7
    assert tokens[-12:] == [*(ord(letter) for letter in ",Time 3.0s:"), info.placeholder_ids["video"]]


def test_all_rows_are_kept_without_compression() -> None:
    item = video(4, changing=False)
    for info in (info_of(use_token_compression=False), info_of({**SIZE, "use_token_compression": False})):
        assert info.is_exact(item.header)
        assert info.for_item(item).process(item, torch.float32)[1].num_embeds == 16
    assert info_of().is_exact(video(1).header)


def test_compression_that_the_memory_plan_does_not_hold_is_refused() -> None:
    item = video(60, side=448, changing=False)
    info = info_of({"size": {"shortest_edge": 64 * 28 * 28, "longest_edge": 64 * 60 * 28 * 28}})
    with pytest.raises(InputError) as caught:
        info.for_item(item)
    assert (caught.value.info.code, caught.value.info.limit) == ("over_limit", 16)


@pytest.mark.parametrize("json", [{"merge_size": 1}, {"temporal_patch_size": 2}])
def test_other_merges_are_refused(json: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        info_of(json)


def test_frames_share_the_area_of_a_video() -> None:
    """A frame has at least the smallest area, also if all frames then have more than the largest together."""
    info = info_of({"size": {"shortest_edge": 9 * 28 * 28, "longest_edge": 16 * 28 * 28}})
    plan = FramePlan(tuple(range(8)), tuple(float(i) for i in range(8)), 8, 1.0)
    assert info.geometry(MediaHeader("video", 28, 28, plan)).merged == (8, 3, 3)
    assert info.geometry(MediaHeader("video", 560, 560, plan)).merged == (8, 1, 1)
