"""The publisher's config and names of tensors, in the Hub's layout.

Source: the conversion script of transformers (convert_vibevoice_asr_to_hf.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ....callers.errors import ConfigError, short_repr

KINDS = ("acoustic", "semantic")
_FIXED: Mapping[str, Any] = {
    "mixer_layer": "depthwise_conv", "conv_norm": "none", "pad_mode": "constant", "layernorm": "RMSNorm", "causal": True,
    "conv_bias": True, "disable_last_norm": True, "layernorm_elementwise_affine": True,
}  # fmt: skip
_KEYS = {"vae_dim": "hidden_size", "encoder_n_filters": "num_filters", "layernorm_eps": "rms_norm_eps", "channels": "channels"}
_STAGE = re.compile(r"^model\.(acoustic|semantic)_tokenizer\.encoder\.(downsample_layers|stages)\.(\d+)\.")
_CONNECTOR = re.compile(r"^model\.(acoustic|semantic)_connector\.(?:fc([12])|norm)\.")


def hub_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json in the Hub's layout. In that layout no head is tied, as in transformers' class.

    Raises:
        ConfigError: a section is not an object, or an encoder has another kind of layers or depths that cannot be read.
    """
    if "acoustic_tokenizer_config" not in config:
        untied = {"tie_word_embeddings": False}
        return {**config, "text_config": {**section_of(config, "text_config"), **untied}, **untied}
    encoders = {f"{kind}_tokenizer_encoder_config": _encoder(config, f"{kind}_tokenizer_config") for kind in KINDS}
    text = section_of(config, "decoder_config")
    return {**config, **encoders, "text_config": text, "tie_word_embeddings": bool(text.get("tie_word_embeddings", False))}


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of config.json, {} if there is none. Raise ConfigError if it is not an object."""
    section = config.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} in config.json is {short_repr(section)}; it must be an object")
    return section


def _encoder(whole: Mapping[str, Any], name: str) -> dict[str, Any]:
    config, section = section_of(whole, name), f"{name} in config.json"
    for key, value in _FIXED.items():
        if config.get(key, value) != value:
            raise ConfigError(f"{key} of {section} is {short_repr(config[key])}; only {value!r} is supported")
    depths = config.get("encoder_depths", "3-3-3-3-3-3-8")
    parts: Sequence[Any] = depths.split("-") if isinstance(depths, str) else depths
    try:
        read = {"depths": [int(part) for part in parts]}
        ratios = config.get("encoder_ratios")
        read |= {"downsampling_ratios": [int(ratio) for ratio in reversed(ratios)]} if ratios else {}
    except (TypeError, ValueError):
        raise ConfigError(f"encoder_depths and encoder_ratios of {section} must be lists of integers") from None
    return {name: config[key] for key, name in _KEYS.items() if key in config} | read


def hub_name(name: str) -> str | None:
    """Return the Hub's name of a tensor; None for those of the decoder of sounds, which this model does not use."""
    if name.startswith("model.acoustic_tokenizer.decoder."):
        return None
    if match := _CONNECTOR.match(name):
        kind, number = match.groups()
        part = f"linear_{number}" if number else "norm"
        return f"model.multi_modal_projector.{kind}_{part}.{name[match.end() :]}"
    if match := _STAGE.match(name):
        kind, what, number = match.groups()
        root = f"model.{kind}_tokenizer_encoder."
        stage = "stem." if number == "0" else f"conv_layers.{int(number) - 1}."
        rest = name[match.end() :]
        rest = f"stage.{rest}" if what == "stages" else rest.removeprefix("0.")
        return root + stage + rest.replace(".mixer.conv.conv.conv.", ".mixer.conv.")
    for kind in KINDS:
        head = f"model.{kind}_tokenizer.encoder.head.conv.conv."
        if name.startswith(head):
            return f"model.{kind}_tokenizer_encoder.head.conv.{name.removeprefix(head)}"
    return name
