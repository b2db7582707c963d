"""Qwen3-VL's processing beyond the parity suite: published defaults, sampled frames, timestamps, limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import ensure_torchvision, small_tokenizer
from sensorium.callers.errors import InputError
from sensorium.mm.geometry import sample_indices
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.video import probe_video
from sensorium.mm.types import EmbeddingItem, FramePlan, MediaHeader, VideoItem
from sensorium.models.families.qwen3_vl.processing import Qwen3VLProcessingInfo
from sensorium.processors.files import ProcessorFiles
from sensorium.processors.spans import lay_out

WORDS = small_tokenizer(("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"))
IDS = {key: WORDS.token_to_id(f"<|{name}|>") for key, name in (
    ("image_token_id", "image_pad"), ("video_token_id", "video_pad"),
    ("vision_start_token_id", "vision_start"), ("vision_end_token_id", "vision_end"),
)}  # fmt: skip


def made(video=None, **config):
    config = IDS | {"text_config": {"vocab_size": 640, "hidden_size": 8}} | config
    return Qwen3VLProcessingInfo(ProcessorFiles(config, video=video or {}, encode=lambda text: WORDS.encode(text).ids))


def clip(count, fps=2.0, size=(480, 640), step=1):
    indices = tuple(range(0, count * step, step))
    return MediaHeader("video", *size, FramePlan(indices, tuple(i / (fps * step) for i in indices), count * step, fps))


@pytest.fixture(scope="module")
def theirs():
    ensure_torchvision()
    import transformers as tf

    return tf.Qwen3VLVideoProcessor(cap_pixels_per_frame=False)


@pytest.mark.parametrize(("size", "tokens"), [((28, 28), 64), ((480, 640), 300), ((1080, 1920), 2040)])
def test_images(size, tokens):
    assert made().geometry(MediaHeader("image", *size)).num_embeds == tokens


def test_times_are_text_between_the_steps():
    info = made()
    plan = FramePlan((0, 15, 30, 45), (0.0, 0.5, 1.0, 1.5), 60, 2.0)
    grid = info.geometry(MediaHeader("video", 64, 64, plan))
    assert [WORDS.decode(info.encode(f"<{time:.1f} seconds>")) for time in grid.times] == ["<0.2 seconds>", "<1.2 seconds>"]
    span = info.span("video", grid)
    assert span.is_embed.sum() == grid.num_embeds
    assert span.token_ids.count(info.start) == span.token_ids.count(info.end) == grid.t
    placeholder = info.placeholder_ids["video"]
    for prompt in ([1, placeholder, 2], [1, *span.token_ids, 2]):  # a placeholder, or written out already
        assert lay_out(prompt, {"video": [[span]]}, info.placeholder_ids).expand()[0] == (1, *span.token_ids, 2)


def test_times_of_a_cut_are_those_of_the_whole_video():
    """Timestamps count from the start of the file, as in qwen-vl-utils, and not from `video_start`."""
    info = made().with_kwargs({"video_start": 1.0, "video_end": 2.95})
    header = probe_video((np.zeros((40, 64, 64, 3), np.uint8), {"fps": 10.0}), info.decode_spec.sampling, MediaPolicy())
    assert header.frames.indices == (10, 16, 23, 29)  # both ends of the cut
    assert info.geometry(header).times == pytest.approx(((1.0 + 1.6) / 2, (2.3 + 2.9) / 2))


@pytest.mark.parametrize("total", [1, 2, 3, 5, 24, 100, 1001, 30_000])
@pytest.mark.parametrize("fps", [24.0, 29.97, 1.0])
def test_frames_are_those_of_the_published_processor(theirs, total, fps):
    from transformers.video_utils import VideoMetadata

    wanted = theirs.sample_frames(VideoMetadata(total_num_frames=total, fps=fps)).tolist()
    assert sample_indices(total, fps, made().decode_spec.sampling) == wanted


@pytest.mark.parametrize("cap", [False, True])
def test_sizes_of_videos_are_the_published_ones(cap):
    ensure_torchvision()
    import transformers as tf

    theirs = tf.Qwen3VLVideoProcessor(cap_pixels_per_frame=cap)
    info = made({"cap_pixels_per_frame": cap})
    rng = np.random.default_rng(0)
    for frames, height, width in [(2, 40, 50), (3, 31, 500), (5, 500, 31), (9, 300, 200), (40, 64, 48)]:
        pixels = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
        wanted = theirs(videos=[pixels], do_sample_frames=False, return_tensors="pt")
        grid = info.geometry(clip(frames, size=(height, width)))
        assert [grid.t, grid.h, grid.w] == wanted["video_grid_thw"][0].tolist()


def test_one_frame_is_a_video():
    header = clip(1, size=(64, 64))
    made_of, grid = made().process(VideoItem(torch.zeros(1, 64, 64, 3, dtype=torch.uint8), header.frames), torch.float32)
    assert (grid.t, len(grid.times)) == (1, 1)
    assert len(made_of["pixel_values_videos"].data) == grid.t * grid.h * grid.w


def test_too_many_frames_are_refused():
    assert made().geometry(clip(2048)).t == 1024
    with pytest.raises(InputError, match="2049 of its frames are requested, the limit is 2048"):
        made().geometry(clip(2049))
    assert made({"max_frames": 9999}).decode_spec.sampling.max_frames == 2048


def test_encoder_rows_include_every_deepstack_level():
    info = made(vision_config={"deepstack_visual_indexes": [5, 11, 17]})
    assert info.parser().embeddings["image"].width == 8 * 4
    grid = info.embeds_geometry(EmbeddingItem("video", {"grid": torch.tensor([2, 4, 4])}))
    assert grid.times == (0.25, 1.25)


@pytest.mark.parametrize("rows", [4, 100, 3000])
def test_a_shrunk_video_fits(rows):
    info = made()
    options = info.shrink_kwargs("video", (20, 30, 40), rows)
    tuned = info.with_kwargs({"videos_kwargs": options})
    frames = options.get("num_frames", 40)
    assert tuned.geometry(clip(frames)).num_embeds <= max(rows, frames // 2)
