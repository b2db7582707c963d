"""Molmo2's processor and model beyond the parity suite: the published JSON, options, limits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sensorium.callers.errors import ConfigError, InputError
from sensorium.mm.geometry import sample_indices
from sensorium.mm.types import FramePlan, MediaHeader
from sensorium.models.families.molmo2.model import Molmo2
from sensorium.models.families.molmo2.processing import Molmo2ProcessingInfo
from sensorium.models.weights import named_layers
from sensorium.processors.files import ProcessorFiles

CONFIG: dict[str, Any] = {
    "adapter_config": {
        "head_dim": 72, "hidden_act": "silu", "hidden_size": 1152, "intermediate_size": 9728, "num_attention_heads": 16,
        "num_key_value_heads": 16, "text_hidden_size": 2560, "vit_layers": [-3, -9],
    },
    "frame_end_token_id": 151944, "frame_start_token_id": 151943, "image_col_id": 151939, "image_end_token_id": 151937,
    "image_patch_id": 151938, "image_start_token_id": 151936, "low_res_image_start_token_id": 151940,
    "text_config": {
        "additional_vocab_size": 128, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728,
        "layer_norm_eps": 1e-5, "max_position_embeddings": 36864, "norm_after": False, "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "qk_norm_type": "qwen3", "qkv_bias": False, "rope_scaling": None,
        "rope_scaling_layers": None, "rope_theta": 5000000.0, "vocab_size": 151936,
    },
    "tie_word_embeddings": False, "use_frame_special_tokens": False,
    "vit_config": {
        "head_dim": 72, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_default_input_size": [378, 378],
        "image_num_pos": 729, "image_patch_size": 14, "intermediate_size": 4304, "layer_norm_eps": 1e-6,
        "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    },
}  # fmt: skip
"""Part of the published config.json of Molmo2-4B."""
IMAGE = {
    "max_crops": 8,
    "overlap_margins": [4, 4],
    "patch_size": 14,
    "pooling_size": [2, 2],
    "size": {"height": 378, "width": 378},
}
PLACEHOLDERS = {"<|image|>": 151940 + 5, "<|video|>": 151940 + 6}
FILES = ProcessorFiles(CONFIG, IMAGE, encode=lambda text: [ord(one) for one in text], token_to_id=PLACEHOLDERS.get)


def test_the_published_config_builds() -> None:
    model = Molmo2(CONFIG, torch.bfloat16, torch.device("meta"))
    assert (model.tower.spec.features, model.feature_order) == ((19, 25), (1, 0))
    assert model.tower.spec.depth == 27
    assert (model.vocab_size, model.spec.unpredicted, model.spec.eps) == (151936 + 128, 128, 1e-5)
    shapes = {name: view.shape for _, views in named_layers(model).values() for name, view in views.items()}
    assert shapes["patch_pooling.k_proj.weight"] == (1152, 2304)
    assert shapes["projector.down_proj.weight"] == (2560, 9728)
    assert shapes["head.lm_head.weight"] == (151936, 2560)
    assert model.is_unused("model.vision_backbone.image_vit.transformer.resblocks.25.attention.wq.weight")


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("vit_config", "image_default_input_size", 378),
        ("vit_config", "image_default_input_size", ["378", "378"]),
        ("vit_config", "image_default_input_size", [378, 392]),
        ("vit_config", "head_dim", "72"),
        ("vit_config", "num_key_value_heads", "16"),
        ("adapter_config", "vit_layers", -3),
    ],
)
def test_bad_sections_are_refused(section: str, key: str, value: object) -> None:
    names = {"image_default_input_size": "image_size", "vit_layers": "vision_feature_layer"}
    with pytest.raises(ConfigError, match=names.get(key, key)):
        Molmo2({**CONFIG, section: {**CONFIG[section], key: value}}, torch.bfloat16, torch.device("meta"))


def test_the_publishers_tensors_are_read() -> None:
    model = Molmo2(CONFIG, torch.float32, torch.device("meta"))
    stored = {
        "model.transformer.wte.embedding": torch.zeros(3, 2),
        "model.transformer.blocks.0.self_attn.att_proj.weight": torch.arange(6144.0)[:, None],
        "model.transformer.blocks.0.mlp.ff_proj.weight": torch.tensor([[1.0], [2.0]]),
        "model.transformer.wte.new_embedding": torch.ones(1, 2),
        "model.vision_backbone.image_vit.patch_embedding.weight": torch.arange(12.0)[None],
        "model.vision_backbone.image_projector.w3.weight": torch.ones(1, 1),
    }
    read = dict(model.convert_weights(stored.items()))
    assert read["model.language_model.embed_tokens.weight"].sum(1).tolist() == [0, 0, 0, 2]
    heads = [read[f"model.transformer.blocks.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert [len(part) for part in heads] == [4096, 1024, 1024]
    assert read["model.transformer.blocks.0.mlp.gate_proj.weight"].item() == 2
    channels_first = read["model.vision_backbone.image_vit.patch_embedding.weight"]
    assert channels_first.tolist() == [[0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]]
    assert "model.vision_backbone.image_projector.up_proj.weight" in read


def test_tokens_of_both_views() -> None:
    info = Molmo2ProcessingInfo(FILES)
    grid = info.geometry(MediaHeader("image", 1000, 1500))
    tall, wide = (2 * 19 + 8) // 2, (4 * 19 + 8) // 2
    assert (grid.tiles, grid.h, grid.w) == ((2, 4), tall, wide)
    span = info.span("image", grid)
    assert span.num_tokens == span.num_embeds == grid.num_embeds == 2 + 14 * 15 + 2 + tall * (wide + 1)
    ids = span.token_ids
    assert (ids[0], ids[1], ids[15], ids[211], ids[212], ids[-1]) == (151940, 151938, 151939, 151937, 151936, 151937)


def test_frames_follow_their_times_between_the_tokens_of_images() -> None:
    info = Molmo2ProcessingInfo(FILES)
    grid = info.geometry(MediaHeader("video", 480, 640, FramePlan((0, 45), (0.0, 1.5), 60, 30.0)))
    span = info.span("video", grid)
    assert span.num_embeds == grid.num_embeds == 2 * 83
    assert "".join(chr(one) for one in span.token_ids if one < 128) == "0.0  1.5 "
    assert span.token_ids[4] == 151936, "use_frame_special_tokens is false"
    assert info.shrink_kwargs("video", (8, 9, 9), 400) == {"num_frames": 4}


def test_several_videos_and_images_beside_a_video_are_refused() -> None:
    info = Molmo2ProcessingInfo(FILES)
    for items in ({"video": 2}, {"video": 1, "image": 1}):
        with pytest.raises(InputError, match="images, or one video"):
            info.preprocess_prompt([5], items)
    assert list(info.preprocess_prompt([5], {"image": 3})) == [5]


@pytest.mark.parametrize(
    ("key", "value"), [("pooling_size", [3, 3]), ("overlap_margins", [6, 6]), ("size", {"height": 378, "width": 392})]
)
def test_other_preprocessors_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        Molmo2ProcessingInfo(replace(FILES, image={**IMAGE, key: value}))


def test_an_image_shrinks_to_one_crop() -> None:
    info = Molmo2ProcessingInfo(FILES)
    grid = info.geometry(MediaHeader("image", 1000, 1500))
    assert info.shrink_kwargs("image", (1, grid.h, grid.w), 500) == {"max_crops": 1}
    assert info.with_kwargs({"max_crops": 1}).geometry(MediaHeader("image", 1000, 1500)).tiles == (1, 1)
    with pytest.raises(ConfigError, match="max_crops is 12, the limit is 8"):
        info.with_kwargs({"max_crops": 12})


def published_indices(total: int, fps: float, most: int, max_fps: float | None) -> list[int]:
    """Sample frames in the mode uniform_last_frame, as the publisher's processor does; it repeats frames of slow videos."""
    if max_fps is None or (total > 2 and total / fps > (most - 1) / max_fps):
        return np.linspace(0, total - 1, min(most, total)).astype(int).tolist()
    if total <= 2:
        return list(range(total))
    places = np.arange(0.0, total - 1, fps / max_fps)
    places = places if np.round(places[-1]) == total - 1 else np.append(places, total - 1)
    return sorted(set(np.round(places).astype(int).tolist()))


@pytest.mark.parametrize("fps", [1.0, 2.0, 24.0, 29.97, 30.0])
@pytest.mark.parametrize("max_fps", [2.0, 8.0, None])
def test_videos_end_with_their_last_frame(fps: float, max_fps: float | None) -> None:
    video = {**IMAGE, "pooling_size": [3, 3], "frame_sample_mode": "uniform_last_frame", "max_fps": max_fps, "num_frames": 20}
    policy = Molmo2ProcessingInfo(replace(FILES, video=video)).decode_spec.sampling
    for total in (1, 2, 3, 15, 16, 19, 20, 21, 70, 284, 285, 286, 1000):
        assert sample_indices(total, fps, policy) == published_indices(total, fps, 20, max_fps), total
