"""config.json of Moondream 3, whose sections are below `config` and leave out what equals the publisher's defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....callers.errors import ConfigError

_TEXT: Mapping[str, Any] = {
    "dim": 2048, "ff_dim": 8192, "n_layers": 24, "vocab_size": 51200, "max_context": 4096, "n_heads": 32, "n_kv_heads": 32,
    "rope_theta": 1_500_000.0,
}  # fmt: skip
_MOE: Mapping[str, Any] = {"n_experts": 64, "start_layer": 4, "n_experts_per_tok": 8, "expert_inner_dim": 1024}
_VISION: Mapping[str, Any] = {
    "enc_dim": 1152, "enc_patch_size": 14, "enc_n_layers": 27, "enc_ff_dim": 4304, "enc_n_heads": 16, "crop_size": 378,
    "in_channels": 3, "max_crops": 12, "overlap_margin": 4, "proj_inner_dim": 8192,
}  # fmt: skip
_TOKENIZER: Mapping[str, Any] = {"bos_id": 0, "answer_id": 3, "coord_id": 5}


def hub_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections `text`, `moe`, `vision` and `tokenizer` with defaults, and `text_config` with the usual keys.

    Raises:
        ConfigError: a section is not an object, or the sizes of the tower contradict each other.
    """
    stored = _section(config, "config")
    text, vision = {**_TEXT, **_section(stored, "text")}, {**_VISION, **_section(stored, "vision")}
    for key, value in {**text, **vision}.items():
        is_size = key in _TEXT or key in _VISION
        if is_size and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise ConfigError(f"{key} in config.json is {value!r}; it must be a positive number")
    side = vision["crop_size"] // (vision["enc_patch_size"] or 1)
    if not vision["enc_patch_size"] or vision["crop_size"] % vision["enc_patch_size"] or vision["enc_n_layers"] != side:
        sizes = (
            f"crop_size {vision['crop_size']}, enc_patch_size {vision['enc_patch_size']}, enc_n_layers {vision['enc_n_layers']}"
        )
        raise ConfigError(f"config.json has {sizes}; the first must be the product of the others, as rows are pooled")
    return {
        "text": text,
        "moe": {**_MOE, **_section(text, "moe")},
        "vision": vision,
        "tokenizer": {**_TOKENIZER, **_section(stored, "tokenizer")},
        "text_config": {
            "hidden_size": text["dim"],
            "vocab_size": text["vocab_size"],
            "max_position_embeddings": text["max_context"],
        },
    }


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} in config.json must be an object")
    return section
