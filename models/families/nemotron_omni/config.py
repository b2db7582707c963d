"""The config of Nemotron-Omni's publisher, from that of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....callers.errors import ConfigError

_NAMES = {
    "image_token_id": "img_context_token_id",
    "video_token_id": "video_context_token_id",
    "audio_token_id": "sound_context_token_id",
    "audio_config": "sound_config",
    "vision_hidden_size": "vit_hidden_size",
}
"""Keys of transformers -> the publisher's keys, which `nemotron_vl` reads."""

SOUND_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False, "scale_input": False, "num_mel_bins": 80, "subsampling_factor": 8,
    "max_position_embeddings": 5000, "hidden_size": 1024,
}  # fmt: skip
"""Values of the audio encoder that published config.json files leave out."""


def publisher_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the publisher's keys. Keys of transformers have precedence, and null is as if left out.

    Raises:
        ConfigError: the image encoder has gates, an activation other than GELU, or no biases of queries, keys and values.
    """
    out = {key: value for key, value in config.items() if value is not None}
    for name, published in _NAMES.items():
        if name in out:
            out[published] = out.pop(name)
    vision = dict(out.get("vision_config") or {})
    args = dict(vision.get("args") or {})
    vision["args"] = {"min_num_patches": 1024, "max_num_patches": 13312, **_radio_args(vision, args)}
    frames = out.get("video_temporal_patch_size", 2)
    out["vision_config"] = {
        "video_temporal_patch_size": frames,
        "video_target_num_patches": 1024,
        "video_maintain_aspect_ratio": True,
        **vision,
    }
    if "sound_config" in out:
        out["sound_config"] = {**SOUND_DEFAULTS, **out["sound_config"]}
    return out


def _radio_args(vision: dict[str, Any], args: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the publisher's `args` of RADIO, and put the width of the MLPs into `vision`."""
    if "hidden_size" in vision:
        vision.setdefault("intermediate_size", int(vision["hidden_size"] * vision.get("mlp_ratio", 4.0)))
    if "teachers" in args:
        return args
    for key, value in (("use_swiglu_ffn", False), ("hidden_act", "gelu"), ("qkv_bias", True)):
        if vision.get(key, value) != value:
            raise ConfigError(f"{key} of vision_config is {vision[key]!r}; only {value!r} is supported")
    return {
        "model": "vit_huge",
        "cpe_max_size": vision.get("max_img_size", 2048),
        "teachers": [{"name": str(number)} for number in range(vision.get("num_cls_tokens", 3))],
        "cpe_num_registers": vision.get("num_registers", 7),
        **args,
    }
