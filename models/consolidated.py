"""Converts Mistral AI's own checkpoint layout (params.json, consolidated weights) to the config and tensor names of the Hub's.

Source: the published params.json files and weights of Mistral AI.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..mm.errors import ConfigError, typed
from .config import positive_int

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
    "tied_embeddings": "tie_word_embeddings",
}
_AUDIO = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "max_source_positions": "max_source_positions",
}
_MEL_KEYS = {
    "num_mel_bins": "feature_size",
    "sampling_rate": "sampling_rate",
    "hop_length": "hop_length",
    "window_size": "n_fft",
}
_MEL_DEFAULTS = {"feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400}
_NEEDED = ("dim", "hidden_dim", "n_layers", "n_heads", "vocab_size")
_REFUSED = ("lora", "softmax_scale", "use_biases", "ada_rms_norm_t_cond")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LATENT_EXPERTS = {
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_shared_experts": "n_shared_experts",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "routed_scale": "routed_scaling_factor",
}
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
}
_TRAINED = "original_max_position_embeddings"
_REFUSED_AUDIO = ("causal", "sliding_window")
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
    "feed_forward.gate": "mlp.gate",
    "gate": "mlp.gate",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "shared_experts.w1": "mlp.shared_experts.gate_proj",
    "shared_experts.w2": "mlp.shared_experts.down_proj",
    "shared_experts.w3": "mlp.shared_experts.up_proj",
}
_ENDS = {"qscale_weight": "weight_scale", "qscale_act": "input_scale"}
_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_AUDIO_PARTS = {
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
    "audio.tok_embeddings": "model.language_model.embed_tokens",
    "audio.conv_layers.0": "model.audio_tower.conv1",
    "audio.conv_layers.1": "model.audio_tower.conv2",
    "audio.transformer.norm": "model.audio_tower.layer_norm",
    "audio.audio_language_projection.0": "model.multi_modal_projector.linear_1",
    "audio.audio_language_projection.2": "model.multi_modal_projector.linear_2",
}
_LAYER = re.compile(r"(?:(vision_encoder|audio)\.transformer\.)?layers\.(\d+)\.(.+)\.(\w+)")
_EXPERT = re.compile(r"(?:feed_forward\.)?experts\.(\d+)\.(w[123])")
_UNUSED = "fake_quantizer."  # scales of the KV cache and of queries
_AUDIO_PREFIX = re.compile(r"mm_\w+_embeddings\.(?:\w+_encoder\.)?")


def hub_config(params: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the layout of a params.json and the Hub's config.json.

    The layout is "images", "merged images" (with a patch merger), "audio" or "text".

    Raises:
        ConfigError: a feature is unsupported, or a key is missing; the message names it.
    """
    _check(params, _REFUSED, _NEEDED)
    multimodal = _part(params, "multimodal")
    vision = _part(params, "vision_encoder") or _part(multimodal, "vision_encoder_args")
    audio = _part(multimodal, next(iter(multimodal))) if multimodal and not vision else {}
    text: dict[str, Any] = {"model_type": "mistral", "tie_word_embeddings": False}
    text |= {new: params[old] for old, new in _TEXT.items() if params.get(old) is not None}
    text |= _windows(params) | _rope(params) | (_latent(params) if params.get("kv_lora_rank") else _experts(params))
    common = {"dtype": "bfloat16", "eos_token_id": 2, "text_config": text, **_quantization(params)}
    if vision:
        return _image_config(vision, common)
    if multimodal and not audio:
        raise ConfigError(f"multimodal in {FILE} holds no vision encoder and no audio encoder; download it again")
    return ("audio", common | _audio_sections(audio)) if audio else ("text", common)


def _windows(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sliding window. A list of windows is repeated over the layers and also gives the type of each layer."""
    window, layers = params.get("sliding_window"), positive_int(params, "n_layers", FILE)
    if not isinstance(window, list) or not window:
        return {"sliding_window": window or None}
    widths = {positive_int({"sliding_window": width}, "sliding_window", FILE) for width in window if width is not None}
    if len(widths) > 1 or layers % len(window):
        raise ConfigError(f"sliding_window in {FILE} is {str(window)[:60]}; windows of different widths are not supported")
    kinds = ["full_attention" if width is None else "sliding_attention" for width in window]
    return {"sliding_window": next(iter(widths), None), "layer_types": kinds * (layers // len(window))}


def _rope(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_parameters for YaRN and query scaling (llama_4_scaling)."""
    yarn, growth = _part(params, "yarn"), _part(params, "llama_4_scaling")
    if growth and not yarn:
        raise ConfigError(f"llama_4_scaling in {FILE} needs yarn, which {FILE} lacks; use the checkpoint in the Hub's layout")
    if growth and growth.get(_TRAINED) != yarn.get(_TRAINED):
        raise ConfigError(f"llama_4_scaling in {FILE} has another {_TRAINED} than yarn, which is not supported")
    if not yarn:
        return {}
    unknown = yarn.keys() - _YARN.keys() - {"apply_scale"}
    if unknown or not all(yarn.get(key) for key in ("factor", _TRAINED)):
        raise ConfigError(f"yarn in {FILE} has {sorted(yarn)}; factor, {_TRAINED}, beta, alpha and apply_scale are supported")
    rope = {"rope_type": "yarn", "rope_theta": params.get("rope_theta", 10000.0)}
    rope |= {new: yarn[old] for old, new in _YARN.items() if old in yarn}
    if not yarn.get("apply_scale", True):
        rope["attention_factor"] = 1.0
    elif params.get("kv_lora_rank"):  # scores are scaled, not cosines and sines
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    return {"rope_parameters": rope | ({"llama_4_scaling_beta": growth["beta"]} if growth.get("beta") else {})}


def _experts(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of Mixtral's mixture of experts."""
    moe = _part(params, "moe")
    unknown = [key for key, value in moe.items() if value and key not in ("num_experts", "num_experts_per_tok")]
    if unknown:
        raise ConfigError(f"moe in {FILE} has {unknown[0]!r}, which is not supported; use the checkpoint in the Hub's layout")
    return (
        {"model_type": "mixtral", **{key: positive_int(moe, key, FILE) for key in ("num_experts", "num_experts_per_tok")}}
        if moe
        else {}
    )


def _latent(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of latent attention and its mixture of experts (Mistral Large 3)."""
    moe = _part(params, "moe")
    if moe.get("route_every_n", 1) != 1:
        raise ConfigError(f"route_every_n in {FILE} is {moe['route_every_n']}; only 1 is supported")
    keys = {key: params[key] for key in _LATENT if params.get(key) is not None}
    keys |= {new: moe[old] for old, new in _LATENT_EXPERTS.items() if moe.get(old) is not None}
    return {"model_type": "mistral4", "head_dim": None, **keys}


def _quantization(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a quantization_config: FP8 weights with one scale per tensor, or the stored one of compressed-tensors."""
    found = _part(params, "quantization") or _part(params, "quantization_config")
    if found.get("qformat_weight") == "fp8_e4m3":
        return {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    if str(found.get("quant_method", "")).lower().replace("_", "-") == "compressed-tensors":
        return {"quantization_config": {**found, "quant_method": "compressed-tensors"}}
    if found:
        raise ConfigError(f"quantization in {FILE} is {str(found)[:60]}; fp8_e4m3 and compressed-tensors are supported")
    return {}


def _image_config(vision: Mapping[str, Any], common: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
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
    return "merged images" if vision.get("mm_projector_id") == "patch_merge" else "images", config


def _audio_sections(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the audio part of config.json; `feature_extractor` holds what the Hub has in a file of its own."""
    audio = _part(params, "encoder_args")
    _check(audio, _REFUSED_AUDIO, _NEEDED[:-1])
    mel = _MEL_DEFAULTS | {
        _MEL_KEYS[old]: value for old, value in _part(audio, "audio_encoding_args").items() if old in _MEL_KEYS
    }
    shape = {new: audio[old] for old, new in _AUDIO.items() if old in audio}
    joined = positive_int({"downsample_factor": 4} | _part(params, "downsample_args"), "downsample_factor", FILE)
    dim, inner = (positive_int(audio, key, FILE) for key in ("dim", "hidden_dim"))
    if inner != joined * dim:
        raise ConfigError(f"downsample_factor {joined} in {FILE} does not fit a hidden_dim of {inner}")
    hop, rate = (positive_int(mel, key, FILE) for key in ("hop_length", "sampling_rate"))
    positions = positive_int({"max_source_positions": 1500} | audio, "max_source_positions", FILE)
    return {
        "audio_config": shape | {"num_mel_bins": mel["feature_size"]},
        "feature_extractor": mel | {"chunk_length": 2 * positions * hop // rate},
    }


def _part(owner: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object under this key, empty if the key is missing; ConfigError if it is not an object."""
    part = owner.get(key)
    if not isinstance(part, dict | None):
        raise ConfigError(f"{key} in {FILE} is {typed(part)}; it must be an object")
    return part or {}


def _check(part: Mapping[str, Any], refused: Sequence[str], needed: Sequence[str]) -> None:
    """Raise ConfigError for a refused feature that is set, or for a missing key."""
    found = [key for key in refused if part.get(key)]
    if found:
        raise ConfigError(f"{found[0]} in {FILE} is not supported; use the checkpoint in the Hub's layout")
    missing = [key for key in needed if part.get(key) is None]
    if missing:
        raise ConfigError(f"{FILE} lacks {missing[0]!r}; download it again")


def hub_names(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Rename tensors to the Hub's names; unknown names stay as they are."""
    for name, tensor in weights:
        if _UNUSED not in name:
            yield _hub_name(name), tensor


def _hub_name(stored: str) -> str:
    name = _AUDIO_PREFIX.sub("audio.", stored, count=1)
    found = _LAYER.fullmatch(name)
    if found is None:
        stem, _, kind = name.rpartition(".")
        return f"{_WHOLE[stem]}.{kind}" if stem in _WHOLE else stored.replace("vision_encoder.", "model.vision_tower.", 1)
    tower, layer, part, kind = found.groups()
    if tower is None:
        expert = _EXPERT.fullmatch(part)
        own = _PARTS.get(part, part) if expert is None else f"mlp.experts.{expert[1]}.{_EXPERTS[expert[2]]}"
        return f"model.language_model.layers.{layer}.{own}.{_ENDS.get(kind, kind)}"
    if tower == "audio":
        return f"model.audio_tower.layers.{layer}.{_AUDIO_PARTS.get(part, _PARTS.get(part, part))}.{kind}"
    inner = _PARTS.get(part, part).replace("self_attn.", "attention.").replace("mlp.", "feed_forward.")
    norm = part if part.endswith("_norm") else inner
    return f"model.vision_tower.transformer.layers.{layer}.{norm}.{kind}"
