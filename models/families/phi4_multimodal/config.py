"""The two layouts of the config.json of Phi-4-multimodal: the publisher's (`phi4mm`) and that of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....callers.errors import ConfigError, typed

_AUDIO = {
    "attention_dim": "hidden_size",
    "attention_heads": "num_attention_heads",
    "linear_units": "intermediate_size",
    "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
}
_LORAS = {"vision": "vision_lora", "speech": "speech_lora"}
_LAYERS = r"((layers.*self_attn\.(qkv|o)_proj)|(layers.*mlp\.(gate_up|down)_proj))"


def hub_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config in transformers' layout; one that is in it already is returned as it is.

    Raises:
        ConfigError: a section is not an object, or asks for another way of joining tiles than the published one.
    """
    if "embd_layer" not in config:
        return config
    layers = _section(config, "embd_layer")
    image, audio = _section(layers, "image_embd_layer"), _section(layers, "audio_embd_layer")
    for key, supported in (("hd_transform_order", "sub_glb"), ("use_hd_transform", True), ("with_learnable_separator", True)):
        if image.get(key, supported) != supported:
            raise ConfigError(f"{key} of image_embd_layer is {image[key]!r} in config.json; only {supported!r} is supported")
    encoder = _section(_section(config, "audio_processor"), "config")
    named = {_AUDIO.get(key, key): value for key, value in encoder.items()}
    nested = (
        ("nemo_conv_channels", "nemo_conv_settings", "conv_channels"),
        ("bias_max_distance", "relative_attention_bias_args", "t5_bias_max_distance"),
    )
    for key, section, inner in nested:
        if (value := _section(encoder, section).get(inner)) is not None:
            named[key] = value
    vision = {"crop_size": image["crop_size"]} if "crop_size" in image else {}
    if isinstance(config.get("img_processor"), Mapping) and "layer_idx" in config["img_processor"]:
        vision["feature_layer"] = config["img_processor"]["layer_idx"]
    named |= {key: audio[key] for key in ("downsample_rate",) if key in audio}
    return {
        **config,
        "vision_config": {**vision, **(config.get("vision_config") or {})},
        "audio_config": {**named, **(config.get("audio_config") or {})},
    }


def stored_adapters(config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the adapters whose weights are among the model's own: name -> settings as in adapter_config.json."""
    adapters = {name: _section(config, key) for name, key in _LORAS.items() if config.get(key)}
    return {
        name: {**{key: lora[key] for key in ("r", "lora_alpha") if key in lora}, "target_modules": lora.get("layer", _LAYERS)}
        for name, lora in adapters.items()
    }


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} in config.json is {typed(value)}; it must be an object")
    return value
