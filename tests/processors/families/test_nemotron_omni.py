"""Nemotron 3 Omni's config in both layouts, its sizes, and its limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import small_tokenizer
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.tiling.whole import FixedSize, PatchRange, PatchTarget
from sensorium.mm.types import FramePlan, MediaHeader, VideoItem
from sensorium.models.families.nemotron_omni.config import publisher_config
from sensorium.models.families.nemotron_omni.processing import NemotronOmniProcessingInfo
from sensorium.processors.files import ProcessorFiles

WORDS = ["<image>", "<img>", "</img>", "<so_start>", "<so_embedding>", "<so_end>"]
SOUND = {"num_mel_bins": 128, "max_position_embeddings": 750}


def info(*options: dict[str, Any], **files: Any) -> NemotronOmniProcessingInfo:
    words = small_tokenizer(WORDS)
    config = {"sound_config": SOUND, "llm_config": {"vocab_size": 700}, **files.pop("config", {})}
    plain = ProcessorFiles(
        config,
        encode=lambda text: words.encode(text, add_special_tokens=False).ids,
        decode=lambda ids: words.decode(list(ids), skip_special_tokens=True),
        token_to_id=words.token_to_id,
        **files,
    )
    return NemotronOmniProcessingInfo(plain, *options)


def test_both_layouts_of_the_config_are_one() -> None:
    published = {"img_context_token_id": 18, "sound_context_token_id": 27, "sound_config": SOUND, "vit_hidden_size": 64}
    hub = {
        "image_token_id": 18,
        "audio_token_id": 27,
        "audio_config": SOUND,
        "vision_hidden_size": 64,
        "force_image_size": None,
    }
    assert publisher_config(published) == publisher_config(hub)
    radio = {"hidden_size": 64, "mlp_ratio": 1.5, "num_cls_tokens": 2, "num_registers": 6, "max_img_size": 512}
    vision = publisher_config({"vision_config": radio})["vision_config"]
    assert vision["intermediate_size"] == 96
    assert len(vision["args"]["teachers"]) == 2
    assert (vision["args"]["cpe_max_size"], vision["args"]["cpe_num_registers"]) == (512, 6)
    args = {"teachers": [{"name": "a"}], "register_multiple": 4}
    assert publisher_config({"vision_config": {"args": args}})["vision_config"]["args"].items() >= args.items()


@pytest.mark.parametrize("changes", [{"use_swiglu_ffn": True}, {"hidden_act": "silu"}, {"qkv_bias": False}])
def test_other_image_encoders_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        publisher_config({"vision_config": changes})


def test_sizes_are_those_of_the_preprocessors() -> None:
    plain = info().specs
    assert plain["image"].tiling == PatchRange(16, 2, 1024, 13312)
    assert plain["video"].tiling == PatchTarget(16, 2, 1024)
    assert plain["image"].unrounded
    assert plain["audio"].num_mel_bins == 128
    other = info(
        image={"min_num_patches": 16, "max_num_patches": 0, "max_model_len": 104},
        video={"video_target_num_patches": 256, "video_maintain_aspect_ratio": False},
    ).specs
    assert other["image"].tiling == PatchRange(16, 2, 16, 400)
    assert other["video"].tiling == FixedSize((256, 256))
    assert info({"max_num_patches": 3000}).specs["image"].tiling == PatchRange(16, 2, 1024, 3000)


def test_a_model_without_an_audio_encoder_takes_no_audio() -> None:
    assert info(config={"sound_config": None}).modalities == ("image", "video")


def test_audio_is_limited_by_the_encoders_positions() -> None:
    made = info()
    longest = 59 * 16_000 + 15_840  # 5,999 frames, and one of padding
    assert made.geometry(MediaHeader("audio", 0, 0, samples=longest)).num_embeds == 750
    with pytest.raises(InputError) as raised:
        made.geometry(MediaHeader("audio", 0, 0, samples=longest + 160))
    assert (raised.value.info.code, raised.value.info.limit) == ("over_limit", 59.99)
    with pytest.raises(InputError):
        made.geometry(MediaHeader("audio", 0, 0, samples=319))


def test_audio_that_fills_its_rows_has_a_row_of_padding() -> None:
    made = info()
    rows = [made.geometry(MediaHeader("audio", 0, 0, samples=160 * frames)).num_embeds for frames in (7, 8, 15, 16)]
    assert rows == [1, 2, 2, 3]


def test_frames_are_joined_in_pairs() -> None:
    made = info()
    plan = FramePlan((0, 15, 30), (0.0, 0.5, 1.0), 31, 1 / 30)
    frames = torch.arange(3).view(3, 1, 1, 1).expand(3, 64, 64, 3).to(torch.uint8)
    kwargs, grid = made.process(VideoItem(frames, plan), torch.float32)
    assert (grid.t, grid.times) == (2, (0.0, 0.495, 0.99))
    first, second = kwargs["pixel_values"].data.view(2, -1, 2, 768).mean((1, 3))
    assert first[0] < first[1] < second[0]
    assert second[0] == second[1]  # the last frame stands twice
    text = made.files.decode(made.span("video", grid).token_ids)
    assert text == ("Frame 1 sampled at 0.00 seconds and frame 2 sampled at 0.49 seconds: \nFrame 3 sampled at 0.99 seconds: ")
    assert made.shrink_kwargs("video", (4, 32, 32), 512) == {"num_frames": 4}
