"""The two layouts of the JSON files of Fun-ASR-Nano: the publisher's for vLLM, and that of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....callers.errors import ConfigError

_ENCODER = {
    "output_size": ("hidden_size", 256), "attention_heads": ("num_attention_heads", 4),
    "linear_units": ("intermediate_size", 2048), "num_blocks": ("num_hidden_layers", 6),
    "tp_blocks": ("num_timestamp_prediction_layers", 0), "kernel_size": ("fsmn_kernel_size", 11),
}  # fmt: skip
"""The publisher's key -> the key here, and the default of the publisher's class."""
_FRONTEND = {
    "n_mels": "feature_size", "fs": "sampling_rate", "frame_length": "frame_length", "frame_shift": "frame_shift",
    "lfr_m": "num_frames_lfr", "lfr_n": "stride_lfr", "window": "window",
}  # fmt: skip
_SAMPLE_SCALE = 32768.0  # the publisher's front end takes 16-bit samples, transformers' takes those in -1..1
_ROWS_PER_TOKEN = 8


def hub_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json in transformers' layout. The publisher's gets one more key, `rows_per_token`.

    The decoder reads a token per this many rows of the adaptor: not every eighth row, but the first ones.

    Raises:
        ConfigError: the section of the encoder is not an object, lacks a size, or shifts the memory.
    """
    if "audio_encoder_conf" not in config:
        return config
    encoder = _section(config, "audio_encoder_conf")
    if encoder.get("sanm_shfit"):  # so spelled
        raise ConfigError("sanm_shfit of audio_encoder_conf must be 0; a shifted memory is not supported")
    audio = {new: encoder.get(old, default) for old, (new, default) in _ENCODER.items()}
    width = config.get("hidden_size", 1024)
    for name, value in [*audio.items(), ("hidden_size", width)]:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}, or its other name in audio_encoder_conf, is {value!r}; it must be a positive integer")
    audio["num_hidden_layers"] += audio["num_timestamp_prediction_layers"]
    adaptor = {"hidden_size": width, "intermediate_size": width // 4, "layer_norm_eps": 1e-12}
    text = {key: value for key, value in config.items() if key != "audio_encoder_conf"}
    return {"audio_config": audio, "adaptor_config": adaptor, "text_config": text, "rows_per_token": _ROWS_PER_TOKEN,
            "tie_word_embeddings": config.get("tie_word_embeddings", True)}  # fmt: skip


def hub_extractor(audio: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the JSON of the feature extractor in transformers' layout, with `sample_scale` if it is the publisher's.

    Raises:
        ConfigError: features are normalised, or include the edges of the audio.
    """
    if "frontend_conf" not in audio:
        return audio
    frontend = _section(audio, "frontend_conf")
    if frontend.get("cmvn_file") not in (None, "null") or not frontend.get("snip_edges", True):
        raise ConfigError("frontend_conf of the feature extractor has a cmvn_file or no snip_edges; neither is supported")
    scale = _SAMPLE_SCALE if frontend.get("upsacle_samples", True) else 1.0  # so spelled
    return {**{new: frontend[old] for old, new in _FRONTEND.items() if old in frontend}, "sample_scale": scale}


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config[name]
    if not isinstance(section, Mapping):
        raise ConfigError(f"{name} must be an object")
    return section
