"""InternVL: tiles through a tower with layer scale, pixel shuffle, any decoder (arXiv 2312.14238, 2404.16821)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ....mm.geometry import pixel_shuffle_side
from ...decoder_model import TEXT_PREFIXES
from ...internlm2 import internlm2_weights
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stacks import stack_of
from ...tower_model import TOWER_PREFIXES, TowerModel, feature_states
from ...vision.spec import TableSpec, TowerNames, TowerSpec

_VISION: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "image_size": 448,
    "patch_size": 14, "num_channels": 3, "layer_norm_eps": 1e-6, "hidden_act": "gelu",
}  # fmt: skip
_NAMES = TowerNames(
    patch="embeddings.patch_embeddings.projection",
    table="embeddings.position_embeddings",
    class_token="embeddings.cls_token",
    post_norm="layernorm",
    layers="encoder.layer",
    norms=("layernorm_before", "layernorm_after"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.projection_layer",
    qk_norms=("attention.q_norm", "attention.k_norm"),
)


_CHAT_VISION: Mapping[str, Any] = {
    **_VISION,
    "hidden_size": 3200, "num_hidden_layers": 48, "num_attention_heads": 25, "intermediate_size": 12800, "image_size": 224,
    "norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": False,
}  # fmt: skip
_CHAT_NAMES = TowerNames(
    patch="embeddings.patch_embedding",
    table="embeddings.position_embedding",
    class_token="embeddings.class_embedding",
    layers="encoder.layers",
    scales=("ls1", "ls2"),
)


_QIANFAN_NAMES = {
    ".norm1.": ".layernorm_before.", ".norm2.": ".layernorm_after.", ".ls1": ".lambda_1", ".ls2": ".lambda_2",
    ".attn.proj.": ".attention.projection_layer.", ".class_embedding": ".cls_token",
    ".position_embedding": ".position_embeddings", ".patch_embedding.": ".patch_embeddings.projection.",
}  # fmt: skip
_QIANFAN = re.compile("|".join(map(re.escape, _QIANFAN_NAMES)))


class InternVL(TowerModel):
    """InternVL in the Hub's layout."""

    prefixes = TOWER_PREFIXES
    ignored = ("tower.embeddings.mask_token",)  # used in training only

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*_specs(config, _NAMES), dtype, device)


class InternVLChat(TowerModel):
    """InternVL in its publisher's own layout: q, k and v as one matrix, the decoder's config as `llm_config`."""

    prefixes = (
        ("vision_model.", "tower."),
        ("mlp1.0.", "projector.layer_norm."),
        ("mlp1.1.", "projector.linear_1."),
        ("mlp1.3.", "projector.linear_2."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*self.specs(hub_config(config)), dtype, device)

    def specs(self, config: Mapping[str, Any]) -> tuple[DecoderSpec, TowerSpec, ProjectorSpec]:
        """Hook: read decoder, tower and projector from a config of the Hub's layout."""
        return _specs(config, _CHAT_NAMES)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return internlm2_weights(weights, self.spec)


class QianfanOcr(TowerModel):
    """Qianfan-OCR: the Hub's config; weights have the names of InternVL's publisher."""

    prefixes = (
        ("vision_model.encoder.", "tower."),
        ("vision_model.", "tower."),
        ("mlp1.0.", "projector.layer_norm."),
        ("mlp1.1.", "projector.linear_1."),
        ("mlp1.3.", "projector.linear_2."),
        *TOWER_PREFIXES,
    )
    ignored = InternVL.ignored

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = require(config, "vision_config")
        bias = vision.get("attention_bias", vision.get("qkv_bias", True))
        config = {
            "tie_word_embeddings": False,
            **config,
            "text_config": {"model_type": "qwen3", **require(config, "text_config")},
            "vision_config": {**vision, "attention_bias": bias},
        }
        super().__init__(*_specs(config, replace(_NAMES, layers="layers")), dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename the publisher's layers, and split q, k and v."""
        for name, tensor in weights:
            stored = _QIANFAN.sub(lambda part: _QIANFAN_NAMES[part[0]], name) if name.startswith("vision_model.") else name
            if ".attn.qkv." in stored:
                for kind, part in zip("qkv", tensor.chunk(3), strict=True):
                    yield stored.replace(".attn.qkv.", f".attention.{kind}_proj."), part
            else:
                yield stored, tensor


def _specs(config: Mapping[str, Any], names: TowerNames) -> tuple[DecoderSpec, TowerSpec, ProjectorSpec]:
    stack = stack_of(config, "qwen2")
    text = decoder_spec(config, replace(stack, defaults={"tie_word_embeddings": True} | dict(stack.defaults)))
    tower = replace(_tower(config), names=names)
    projector = ProjectorSpec(
        width=tower.width,
        out=text.hidden_size,
        layers=("linear_1", "linear_2"),
        group=tower.merge**2,
        inner=text.hidden_size,
        act=config.get("projector_hidden_act", "gelu"),
        norm="layer_norm",
        joined_norm=True,
    )
    return text, tower, projector


def hub_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a config.json of the publisher's layout to the Hub's; ConfigError for features of older models."""
    vision, text = {**_CHAT_VISION, **require(config, "vision_config")}, require(config, "llm_config")
    if text.get("model_type") == "internlm2" and "bias" in text:
        text = {**text, "attention_bias": text["bias"]}
    if config.get("ps_version", "v1") != "v2":
        raise ConfigError("ps_version in config.json is not v2, so images would be transposed; use a newer checkpoint")
    return {
        "downsample_ratio": config.get("downsample_ratio", 0.5),
        "text_config": text,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "vision_config": vision | {"use_qk_norm": vision["qk_normalization"], "attention_bias": vision["qkv_bias"]},
        "vision_feature_layer": config.get("select_layer", -1),
    }


def _tower(config: Mapping[str, Any]) -> TowerSpec:
    vision = {**_VISION, **require(config, "vision_config")}
    if config.get("vision_feature_select_strategy", "default") != "default":
        raise ConfigError("vision_feature_select_strategy keeps the class token; only default, which drops it, is supported")
    patch, side = (_square(vision[key], key) for key in ("patch_size", "image_size"))
    depth = positive_int(vision, "num_hidden_layers")
    features = feature_states(config.get("vision_feature_layer", -1), depth)
    return TowerSpec(
        depth=depth,
        width=positive_int(vision, "hidden_size"),
        heads=positive_int(vision, "num_attention_heads"),
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=vision["num_channels"] * patch**2,
        act=vision["hidden_act"],
        merge=pixel_shuffle_side(config),
        eps=vision["layer_norm_eps"],
        rms=vision.get("norm_type", "layer_norm") == "rms_norm",
        qkv_bias=bool(vision.get("attention_bias", False)),
        qk_norm="all" if vision.get("use_qk_norm", False) else None,
        table=TableSpec(side // patch) if vision.get("use_absolute_position_embeddings", True) else None,
        class_token=True,
        post_norm=not vision.get("use_mean_pooling", True) and not features,
        layer_scale=True,
        features=features,
        names=_NAMES,
    )


def _square(value: Any, key: str) -> int:
    """Return a side that config.json gives as one number or as two equal ones."""
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1:
        reason = f"{key} in vision_config is {value}, but the rows of an image are folded into a square"
        raise ConfigError(f"{reason}; both sides must be equal")
    return positive_int({key: sides.pop()}, key)
