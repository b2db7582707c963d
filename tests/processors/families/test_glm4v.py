"""Frames that GLM samples from a video, compared with transformers, and the text of their timestamps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import ensure_torchvision, small_tokenizer
from sensorium.mm.embeddings import ROWS
from sensorium.mm.geometry import sample_indices
from sensorium.mm.types import EmbeddingItem, FramePlan, MediaHeader
from sensorium.models.families.glm4v.processing import (
    GLM_4_1V,
    GLM_4_6V,
    Glm4VProcessingInfo,
    Glm46VProcessingInfo,
    GlmOcrProcessingInfo,
)
from sensorium.processors.files import ProcessorFiles

WORDS = small_tokenizer(["<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"])
IDS = dict(
    zip(("image_start_token_id", "image_end_token_id", "image_token_id", "video_token_id"), range(626, 630), strict=True)
)


def info_of(kind: type[Glm4VProcessingInfo], *options: dict[str, Any]) -> Glm4VProcessingInfo:
    encode = lambda text: WORDS.encode(text, add_special_tokens=False).ids  # noqa: E731
    config = {**IDS, "text_config": {"vocab_size": 640, "hidden_size": 64}}
    return kind(ProcessorFiles(config, {}, {"fps": 2, "num_frames": 16}, encode=encode), *options)


def published(stem: str, total: int, fps: float, wanted: float | None = None) -> list[int]:
    """Return the published frames, without the repetition of the last one that fills the last step."""
    ensure_torchvision()
    import transformers as tf
    from transformers.video_utils import VideoMetadata

    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    found = getattr(tf, f"{stem}VideoProcessor")().sample_frames(metadata, fps=wanted)
    return list(dict.fromkeys(int(i) for i in found))


@pytest.mark.parametrize(
    ("total", "fps"),
    [(1, 25.0), (3, 1.0), (30, 30.0), (100, 24.0), (251, 29.97), (7500, 25.0), (9001, 30.0), (30000, 25.0), (400, 0.5)],
)
@pytest.mark.parametrize("wanted", [2, 1, 3.5])
def test_frames_are_the_published_ones(total: int, fps: float, wanted: float) -> None:
    policy = info_of(Glm4VProcessingInfo, {"fps": float(wanted)}).decode_spec.sampling
    assert sample_indices(total, fps, policy) == published("Glm4v", total, fps, wanted)


@pytest.mark.parametrize("kind", [Glm46VProcessingInfo, GlmOcrProcessingInfo])
@pytest.mark.parametrize(("total", "fps"), [(24, 24.0), (720, 24.0), (750, 25.0), (775, 25.0), (9000, 30.0), (9030, 30.0)])
def test_longer_videos_use_fewer_frames_per_second(kind: type[Glm4VProcessingInfo], total: int, fps: float) -> None:
    """Videos of whole seconds: the published sampler adds up sixths of a second, so it may be one frame late."""
    ours, theirs = sample_indices(total, fps, info_of(kind).decode_spec.sampling), published("Glm46V", total, fps)
    assert len(ours) == len(theirs)
    assert all(0 <= late - frame <= 1 for frame, late in zip(ours, theirs, strict=True))


def test_the_moe_architecture_uses_either_processor() -> None:
    """GLM-4.5V's and the large GLM-4.6V's checkpoints are of one architecture."""
    for said in ({"video_processor_type": "Glm46VVideoProcessor"}, {"video_processor_type": "Glm4vVideoProcessor"}):
        info = Glm4VProcessingInfo(ProcessorFiles({**IDS, "vocab_size": 640}, video=said))
        style = GLM_4_6V if said["video_processor_type"] == "Glm46VVideoProcessor" else GLM_4_1V
        assert info.style is info.with_kwargs({}).style is style


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("stem", ["Glm4v", "Glm4vMoe"])
def test_ids_that_config_json_leaves_out(stem: str, later: bool) -> None:
    import transformers as tf

    config = getattr(tf, f"{stem}Config")()
    said = {"video_processor_type": "Glm46VVideoProcessor"} if later else {}
    info = Glm4VProcessingInfo(ProcessorFiles({"model_type": config.model_type}, video=said))
    assert info.placeholder_ids == {"image": config.image_token_id, "video": config.video_token_id}
    assert (info.start, info.end) == (config.image_start_token_id, config.image_end_token_id)
    assert info.with_kwargs({}).placeholder_ids == info.placeholder_ids


def test_max_frames() -> None:
    policy = info_of(Glm46VProcessingInfo).decode_spec.sampling
    frames = sample_indices(90_000, 30.0, policy)
    assert (len(frames), frames[0], frames[-1]) == (640, 0, 89_999)
    assert len(sample_indices(90_000, 30.0, info_of(Glm46VProcessingInfo, {"num_frames": 7}).decode_spec.sampling)) == 7


@pytest.mark.parametrize(
    ("kind", "words"), [(Glm4VProcessingInfo, ("0", "2")), (Glm46VProcessingInfo, ("0.9 seconds", "2.6 seconds"))]
)
def test_timestamps_are_those_of_first_frames(kind: type[Glm4VProcessingInfo], words: tuple[str, str]) -> None:
    info = info_of(kind)
    grid = info.geometry(MediaHeader("video", 112, 112, FramePlan((0, 1, 2), (0.9, 1.8, 2.64), 3, 1.1)))
    assert (grid.t, grid.times) == (2, (0.9, 2.64))
    span = info.span("video", grid)
    text = WORDS.decode(span.token_ids, skip_special_tokens=False)
    rows = "<|begin_of_image|>" + "<|image|>" * (grid.num_embeds // 2) + "<|end_of_image|>"
    assert text == rows + words[0] + rows + words[1]
    assert span.is_embed is not None
    assert int(span.is_embed.sum()) == grid.num_embeds


def test_precomputed_embeddings_of_a_video_have_timestamps() -> None:
    item = EmbeddingItem("video", {ROWS: torch.zeros(8, 64), "grid": torch.tensor([2, 4, 4])})
    assert info_of(Glm4VProcessingInfo).embeds_geometry(item).times == (0.0, 1.0)
