"""Ernie-4.5-VL compared with transformers: sampled frames, drawn timestamps, start and end tokens, rows, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ensure_torchvision
from PIL import ImageFont
from sensorium.callers.errors import ConfigError, MediaError
from sensorium.mm.embeddings import ROWS
from sensorium.mm.geometry import sample_indices
from sensorium.mm.types import EmbeddingItem, FramePlan, MediaHeader, VideoItem
from sensorium.models.families.ernie4_5_vl.processing import Ernie45VLProcessingInfo, draw_timestamps, timestamp_text
from sensorium.processors.files import ProcessorFiles

FONT = "Roboto-Regular.ttf"
NAMES = ("image_token_id", "image_start_token_id", "image_end_token_id")
NAMES += tuple(name.replace("image", "video") for name in NAMES)
IDS = dict(zip(NAMES, range(10, 16), strict=True))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint folder with a font that comes with Pillow."""
    (tmp_path / FONT).write_bytes(ImageFont.load_default(10).font_bytes)
    return tmp_path


def made(folder: Path | None = None, *options: dict[str, Any], **video: Any) -> Ernie45VLProcessingInfo:
    config = {**IDS, "text_config": {"vocab_size": 640, "hidden_size": 8}}
    return Ernie45VLProcessingInfo(ProcessorFiles(config, {}, {"temporal_patch_size": 2, **video}, folder=folder), *options)


def oracle(folder: Path) -> Any:
    ensure_torchvision()
    import transformers as tf

    return tf.Ernie4_5_VLMoeVideoProcessor(font=str(folder / FONT))


def plan(frames: int, fps: float = 2.0) -> FramePlan:
    return FramePlan(tuple(range(frames)), tuple(i / fps for i in range(frames)), frames, fps)


@pytest.mark.parametrize("total", [1, 15, 16, 179, 180, 181, 400, 1009])
def test_the_published_frames_are_used(total, folder):
    from transformers.video_utils import VideoMetadata

    wanted = oracle(folder).sample_frames(VideoMetadata(total_num_frames=total, fps=30.0, duration=total / 30))
    assert sample_indices(total, 30.0, made().decode_spec.sampling) == wanted.tolist()


@pytest.mark.parametrize("size", [(100, 140), (231, 64), (9, 300)])
def test_times_are_drawn_as_published(size, folder):
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, *size, 3), dtype=np.uint8))
    seconds, before = [0.0, 59.996, 3725.25], frames.clone()
    ours = draw_timestamps(frames, seconds, folder / FONT)
    assert torch.equal(frames, before)
    if min(size) < 10:
        assert torch.equal(ours, frames)
        return
    theirs = oracle(folder)
    for frame, time, mine in zip(frames, seconds, ours, strict=True):
        drawn = theirs._render_image_with_timestamp(frame.permute(2, 0, 1), theirs._convert_timestamp(time))
        assert torch.equal(mine, drawn.permute(1, 2, 0))
        assert not torch.equal(mine, frame)


def test_times_as_text():
    assert [timestamp_text(s) for s in (0.0, 61.5, 3725.25)] == ["time: 00:00:00.00", "time: 00:01:01.50", "time: 01:02:05.25"]


def test_a_font_that_is_missing_is_named(tmp_path):
    item = VideoItem(torch.zeros(2, 56, 56, 3, dtype=torch.uint8), plan(2))
    with pytest.raises(ConfigError, match=FONT):
        made(tmp_path).process(item, torch.float32)
    (tmp_path / FONT).write_bytes(b"no font")
    with pytest.raises(ConfigError, match="not a readable font"):
        made(tmp_path).process(item, torch.float32)
    plain, grid = made(tmp_path, draw_on_frames=False).process(item, torch.float32)
    assert plain["pixel_values_videos"].data.shape == (grid.t * grid.h * grid.w, 588)


def test_other_temporal_patch_sizes_are_refused():
    with pytest.raises(ConfigError, match="temporal_patch_size is 4"):
        made(temporal_patch_size=4)


def test_missing_start_and_end_tokens_are_added():
    info = made()
    assert info.preprocess_prompt([1, 11, 10, 12, 2, 10, 3, 14, 13, 15], {"image": 2, "video": 1}) == [1, 10, 2, 10, 3, 13]
    assert info.preprocess_prompt([11, 10, 10, 12, 14, 13, 12], {}) == [
        11,
        10,
        10,
        12,
        14,
        13,
        12,
    ]  # written out, and none's marks
    span = info.span("image", info.geometry(MediaHeader("image", 56, 84)))
    assert span.token_ids == (11, *[10] * 6, 12)
    assert span.is_embed is not None
    assert span.is_embed.tolist() == [False, *[True] * 6, False]


def test_frames_are_merged_in_pairs():
    grid = made(size={"shortest_edge": 784, "longest_edge": 78400}).geometry(MediaHeader("video", 56, 84, plan(5)))
    assert (grid.t, grid.h, grid.w, grid.merged, grid.num_embeds) == (6, 4, 6, (3, 2, 3), 18)


def test_precomputed_embeddings_of_a_video_have_a_grid_of_frames():
    info, rows = made(), torch.ones(18, 8)
    (source,) = info.parser().parse({"video": {"video_embeds": rows, "video_grid_thw": [[6, 4, 6]]}})["video"]
    assert info.embeds_geometry(source.data).num_embeds == 18
    assert info.embeds_geometry(EmbeddingItem("image", {ROWS: rows, "grid": torch.tensor([1, 4, 6])})).num_embeds == 6
    with pytest.raises(MediaError, match="5 frames"):
        info.parser().parse({"video": {"video_embeds": rows, "video_grid_thw": [[5, 4, 6]]}})


@pytest.mark.parametrize("rows", [4, 100, 3000])
def test_a_shrunk_video_fits(rows):
    info = made()
    options = info.shrink_kwargs("video", (40, 60, 80), rows)
    tuned = info.with_kwargs({"videos_kwargs": options})
    assert tuned.geometry(MediaHeader("video", 840, 1120, plan(options.get("num_frames", 40)))).num_embeds <= rows
