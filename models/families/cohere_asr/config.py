"""NeMo's sections of config.json, as Cohere publishes them, in the layout of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....callers.errors import ConfigError

_DECODER = {
    "hidden_size": "hidden_size", "inner_size": "intermediate_size", "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads", "hidden_act": "hidden_act", "max_sequence_length": "max_position_embeddings",
}  # fmt: skip
_ENCODER = {
    "d_model": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads", "feat_in": "num_mel_bins",
    "conv_kernel_size": "conv_kernel_size", "subsampling_factor": "subsampling_factor", "xscaling": "scale_input",
    "subsampling_conv_channels": "subsampling_conv_channels", "pos_emb_max_len": "max_position_embeddings",
}  # fmt: skip


def read_nemo_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with the values of `encoder`, `transf_decoder` and `head`, if it has them, under transformers' names.

    Raises:
        ConfigError: one of these sections is not an object.
    """
    encoder, decoder, head = (_section(config, name) for name in ("encoder", "transf_decoder", "head"))
    decoder = _section(decoder, "config_dict")
    top = {new: decoder[old] for old, new in _DECODER.items() if old in decoder}
    sizes = {new: encoder[old] for old, new in _ENCODER.items() if old in encoder}
    if {"d_model", "ff_expansion_factor"} <= encoder.keys():
        sizes["intermediate_size"] = encoder["d_model"] * encoder["ff_expansion_factor"]
    if "num_classes" in head:
        top["vocab_size"] = head["num_classes"]
    return {**config, **top, "encoder_config": {**sizes, **_section(config, "encoder_config")}}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} in config.json must be an object")
    return section
