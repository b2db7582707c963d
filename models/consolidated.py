"""Checkpoints of params.json and consolidated weights: their config and their names as the Hub's layout has them.

Knows that layout, and no tower and no decoder. Source: the published params.json files and weights of Mistral AI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..mm.errors import ConfigError, typed
from .config import count

FILE = "params.json"
_TEXT = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
}
_SOUND = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_source_positions": "max_source_positions",
}
_BANDS = {"num_mel_bins": "feature_size", "sampling_rate": "sampling_rate", "hop_length": "hop_length", "window_size": "n_fft"}
_PUBLISHED_BANDS = {"feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400}
_NEEDED = ("dim", "hidden_dim", "n_layers", "n_heads", "vocab_size")
_REFUSED = ("llama_4_scaling", "lora", "moe", "quantization", "softmax_scale", "use_biases", "yarn", "ada_rms_norm_t_cond")
_REFUSED_SOUND = ("causal", "sliding_window")
_PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_HEARING = {
    "attention.wo": "self_attn.out_proj",
    "feed_forward.w1": "fc1",
    "feed_forward.w2": "fc2",
    "attention_norm": "self_attn_layer_norm",
    "ffn_norm": "final_layer_norm",
}
_WHOLE = {
    "tok_embeddings": "model.language_model.embed_tokens",
    "norm": "model.language_model.norm",
    "output": "lm_head",
    "vision_language_adapter.w_in": "model.multi_modal_projector.linear_1",
    "vision_language_adapter.w_out": "model.multi_modal_projector.linear_2",
    "pre_mm_projector_norm": "model.multi_modal_projector.norm",
    "patch_merger.merging_layer": "model.multi_modal_projector.patch_merger.merging_layer",
    "heard.tok_embeddings": "model.language_model.embed_tokens",
    "heard.conv_layers.0": "model.audio_tower.conv1",
    "heard.conv_layers.1": "model.audio_tower.conv2",
    "heard.transformer.norm": "model.audio_tower.layer_norm",
    "heard.audio_language_projection.0": "model.multi_modal_projector.linear_1",
    "heard.audio_language_projection.2": "model.multi_modal_projector.linear_2",
}
_LAYER = re.compile(r"(?:(vision_encoder|heard)\.transformer\.)?layers\.(\d+)\.(.+)\.(weight|bias)")
_HEARD = re.compile(r"mm_\w+_embeddings\.(?:\w+_encoder\.)?")  # before all that is for sounds


def hub_config(params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A params.json as the Hub's config.json, behind its kind: "pictures", "sounds" or, with a merger, "merged pictures".

    Raises:
        ConfigError: a feature that has no place there, by its key, a missing key, or a model of text alone.
    """
    _check(params, _REFUSED, _NEEDED)
    vision, several = _part(params, "vision_encoder"), _part(params, "multimodal")
    heard = _part(several, next(iter(several))) if several else {}
    text = {"tie_word_embeddings": False} | {new: params[old] for old, new in _TEXT.items() if params.get(old) is not None}
    common = {"dtype": "bfloat16", "eos_token_id": 2, "text_config": {"model_type": "mistral"} | text}
    if vision:
        return _with_pictures(vision, common)
    if heard:
        return "sounds", common | _sounds(heard)
    raise ConfigError(f"{FILE} has no vision_encoder and no sounds (multimodal); text-only models are not served")


def _with_pictures(vision: Mapping[str, Any], common: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    merge = vision.get("spatial_merge_size", 1)
    shapes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_channels", "patch_size")
    config = {
        **common,
        "image_token_id": vision.get("image_token_id", 10),
        "spatial_merge_size": merge,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": bool(vision.get("adapter_bias", True)),
        "vision_config": {"hidden_act": "silu", "rope_theta": vision.get("rope_theta", 10000.0)}
        | {name: vision[name] for name in shapes if name in vision}
        | {"image_size": vision.get("max_image_size", vision.get("image_size", 1024))},
    }
    return "merged pictures" if vision.get("mm_projector_id") == "patch_merge" else "pictures", config


def _sounds(heard: Mapping[str, Any]) -> dict[str, Any]:
    """Of an encoder whose rows are joined; `feature_extractor` is what the Hub has in a file of its own."""
    audio = _part(heard, "encoder_args")
    _check(audio, _REFUSED_SOUND, _NEEDED[:-1])
    bands = _PUBLISHED_BANDS | {
        _BANDS[old]: value for old, value in _part(audio, "audio_encoding_args").items() if old in _BANDS
    }
    shape = {new: audio[old] for old, new in _SOUND.items() if old in audio}
    joined = count({"downsample_factor": 4} | _part(heard, "downsample_args"), "downsample_factor", FILE)
    dim, inner = (count(audio, key, FILE) for key in ("dim", "hidden_dim"))
    if inner != joined * dim:
        raise ConfigError(f"downsample_factor {joined} in {FILE} does not fit a hidden_dim of {inner}")
    hop, rate = (count(bands, key, FILE) for key in ("hop_length", "sampling_rate"))
    positions = count({"max_source_positions": 1500} | audio, "max_source_positions", FILE)
    return {
        "audio_config": shape | {"num_mel_bins": bands["feature_size"]},
        "feature_extractor": bands | {"chunk_length": 2 * positions * hop // rate},
    }


def _part(owner: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object behind this key, an empty one where there is none; ConfigError for what is none."""
    part = owner.get(key)
    if not isinstance(part, dict | None):
        raise ConfigError(f"{key} in {FILE} is {typed(part)}; it must be an object")
    return part or {}


def _check(part: Mapping[str, Any], refused: Sequence[str], needed: Sequence[str]) -> None:
    said = [key for key in refused if part.get(key)]
    if said:
        raise ConfigError(f"{said[0]} in {FILE} is not supported; use the checkpoint in the Hub's layout")
    missing = [key for key in needed if part.get(key) is None]
    if missing:
        raise ConfigError(f"{FILE} lacks {missing[0]!r}; it is not complete")


def hub_names(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors under the Hub's names; a name that has none stays."""
    for name, tensor in weights:
        yield _hub_name(name), tensor


def _hub_name(stored: str) -> str:
    name = _HEARD.sub("heard.", stored, count=1)
    found = _LAYER.fullmatch(name)
    if found is None:
        stem, _, kind = name.rpartition(".")
        return f"{_WHOLE[stem]}.{kind}" if stem in _WHOLE else stored.replace("vision_encoder.", "model.vision_tower.", 1)
    tower, layer, part, kind = found.groups()
    if tower is None:
        return f"model.language_model.layers.{layer}.{_PARTS.get(part, part)}.{kind}"
    if tower == "heard":
        return f"model.audio_tower.layers.{layer}.{_HEARING.get(part, _PARTS.get(part, part))}.{kind}"
    inner = _PARTS.get(part, part).replace("self_attn.", "attention.").replace("mlp.", "feed_forward.")
    norm = part if part.endswith("_norm") else inner
    return f"model.vision_tower.transformer.layers.{layer}.{norm}.{kind}"
