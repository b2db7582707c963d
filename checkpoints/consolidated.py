"""Converts Mistral AI's own checkpoint layout (params.json, consolidated weights) to the config and tensor names of the Hub's.

Source: the published params.json files and weights of Mistral AI.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..callers.errors import ConfigError, typed
from .config import positive_int

FILE = "params.json"
_TOKENIZER_FILE = "tekken.json"
_LAYERS = {
    "dim": "hidden_size", "hidden_dim": "intermediate_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
}  # fmt: skip
_AUDIO = {**_LAYERS, "max_source_positions": "max_source_positions"}
_CAUSAL_AUDIO = {
    **_LAYERS, "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim", "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}  # fmt: skip
_TEXT = {
    **_CAUSAL_AUDIO, "vocab_size": "vocab_size", "model_max_length": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings", "max_position_embeddings": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
}  # fmt: skip
_CAUSAL_FIXED = {"pos_embed": "rope", "ffn_type": "swiglu", "norm_type": "rms_norm", "use_biases": True}
_MEL_KEYS = {
    "num_mel_bins": "feature_size",
    "sampling_rate": "sampling_rate",
    "hop_length": "hop_length",
    "window_size": "n_fft",
}
_MEL_DEFAULTS = {"feature_size": 128, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400}
_NEEDED = ("dim", "hidden_dim", "n_layers", "n_heads", "vocab_size")
_ADAPTIVE = "ada_rms_norm_t_cond"
_REFUSED = ("lora", "softmax_scale", "use_biases")
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
    "ada_rms_norm_t_cond.0": "ada_rms_norm.linear1",
    "ada_rms_norm_t_cond.2": "ada_rms_norm.linear2",
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
_CAUSAL_PARTS = {"attention_norm": "self_attn_layer_norm", "ffn_norm": "final_layer_norm"}
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
_CAUSAL_WHOLE = {
    "audio.conv_layers.0.conv": "model.audio_tower.embedder.conv1",
    "audio.conv_layers.1.conv": "model.audio_tower.embedder.conv2",
    "audio.transformer.norm": "model.audio_tower.norm",
}
_LAYER = re.compile(r"(?:(vision_encoder|audio)\.transformer\.)?layers\.(\d+)\.(.+)\.(\w+)")
_EXPERT = re.compile(r"(?:feed_forward\.)?experts\.(\d+)\.(w[123])")
_UNUSED = "fake_quantizer."  # scales of the KV cache and of queries
_AUDIO_PREFIX = re.compile(r"mm_\w+_embeddings\.(?:embedding_module\.)?(?:\w+_encoder\.)?")


def hub_config(params: Mapping[str, Any], tokenizer: Mapping[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the layout of a params.json and the Hub's config.json.

    The layout is "images", "merged images" (with a patch merger), "audio", "causal audio" (Voxtral-Realtime) or "text".

    Args:
        tokenizer: the content of tekken.json, which states the delay of a causal encoder.

    Raises:
        ConfigError: a feature is unsupported, or a key is missing; the message names it.
    """
    multimodal = _part(params, "multimodal")
    vision = _part(params, "vision_encoder") or _part(multimodal, "vision_encoder_args")
    audio = _part(multimodal, next(iter(multimodal))) if multimodal and not vision else {}
    causal = bool(_part(audio, "encoder_args").get("causal"))
    _check(params, _REFUSED if causal else (*_REFUSED, _ADAPTIVE), _NEEDED)
    if causal and not params.get(_ADAPTIVE):
        raise ConfigError(f"causal in {FILE} is set without {_ADAPTIVE}, which is not supported")
    text: dict[str, Any] = {"model_type": "mistral", "tie_word_embeddings": causal}
    text |= {new: params[old] for old, new in _TEXT.items() if params.get(old) is not None}
    text |= _windows(params) | _rope(params) | (_latent(params) if params.get("kv_lora_rank") else _experts(params))
    common = {"dtype": "bfloat16", "eos_token_id": 2, "text_config": text, **_quantization(params)}
    if vision:
        return _image_config(vision, common)
    if multimodal and not audio:
        raise ConfigError(f"multimodal in {FILE} holds no vision encoder and no audio encoder; download it again")
    if causal:
        return "causal audio", common | _causal_sections(audio, tokenizer or {})
    return ("audio", common | _audio_sections(audio)) if audio else ("text", common)


def _windows(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sliding window. A list of windows is repeated over the layers and also gives the type of each layer."""
    window, layers = params.get("sliding_window"), positive_int(params, "n_layers", FILE)
    if not isinstance(window, list) or not window:
        return {"sliding_window": _as_number(window) or None}
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
    quantization = _part(params, "quantization") or _part(params, "quantization_config")
    if quantization.get("qformat_weight") == "fp8_e4m3":
        return {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}
    if str(quantization.get("quant_method", "")).lower().replace("_", "-") == "compressed-tensors":
        return {"quantization_config": {**quantization, "quant_method": "compressed-tensors"}}
    if quantization:
        raise ConfigError(f"quantization in {FILE} is {str(quantization)[:60]}; fp8_e4m3 and compressed-tensors are supported")
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
    mel = _mel(audio)
    shape = {new: audio[old] for old, new in _AUDIO.items() if old in audio}
    joined = _joined_rows(params)
    dim, inner = (positive_int(audio, key, FILE) for key in ("dim", "hidden_dim"))
    if inner != joined * dim:
        raise ConfigError(f"downsample_factor {joined} in {FILE} does not fit a hidden_dim of {inner}")
    hop, rate = (positive_int(mel, key, FILE) for key in ("hop_length", "sampling_rate"))
    positions = positive_int({"max_source_positions": 1500} | audio, "max_source_positions", FILE)
    return {
        "audio_config": shape | {"num_mel_bins": mel["feature_size"]},
        "feature_extractor": mel | {"chunk_length": 2 * positions * hop // rate},
    }


def _causal_sections(params: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the audio part of config.json for a causal encoder, with the numbers of rows that tekken.json states."""
    audio = _part(params, "encoder_args")
    _check(audio, (), (*_NEEDED[:-1], "sliding_window"))
    for key, value in _CAUSAL_FIXED.items():
        if audio.get(key) not in (None, value):
            raise ConfigError(f"{key} in {FILE} is {str(audio[key])[:60]!r}; a causal encoder must have {value!r}")
    mel, joined = _mel(audio), _joined_rows(params)
    hop, rate = (positive_int(mel, key, FILE) for key in ("hop_length", "sampling_rate"))
    loudest = _part(audio, "audio_encoding_args").get("global_log_mel_max")
    if loudest is not None:
        mel["global_log_mel_max"] = _number(loudest, "global_log_mel_max", FILE)
    speech, frames = _part(tokenizer, "audio", _TOKENIZER_FILE), 2 * joined
    for part, file in ((_part(audio, "audio_encoding_args"), FILE), (speech, _TOKENIZER_FILE)):
        stated = part.get("frame_rate")
        if stated is not None and _number(stated, "frame_rate", file) * frames * hop != rate:
            raise ConfigError(f"frame_rate in {file} is {stated}; it must be {rate / frames / hop:g}")
    shape = {new: audio[old] for old, new in _CAUSAL_AUDIO.items() if audio.get(old) is not None}
    window = positive_int({"sliding_window": _as_number(audio["sliding_window"])}, "sliding_window", FILE)
    return {
        "audio_config": shape | {"num_mel_bins": mel["feature_size"], "sliding_window": window},
        "feature_extractor": mel,
        "downsample_factor": joined,
        "audio_length_per_tok": frames,
        **_silent_rows(speech, 1000 * frames * hop / rate),
    }


def _silent_rows(speech: Mapping[str, Any], milliseconds: float) -> dict[str, Any]:
    """Return the rows of the delay and those before the audio, of this many milliseconds each.

    A key that tekken.json lacks is left out: the model and the processor have the published value.
    """
    rows: dict[str, Any] = {}
    if speech.get("transcription_delay_ms") is not None:
        delay = _number(speech["transcription_delay_ms"], "transcription_delay_ms", _TOKENIZER_FILE)
        if delay <= 0 or delay % milliseconds:
            which = f"transcription_delay_ms in {_TOKENIZER_FILE} is {delay:g}"
            raise ConfigError(f"{which}; it must be a multiple of {milliseconds:g} above 0")
        rows["default_num_delay_tokens"] = round(delay / milliseconds)
    key = "streaming_n_left_pad_tokens"
    return rows if speech.get(key) is None else rows | {key: positive_int(speech, key, _TOKENIZER_FILE)}


def _mel(audio: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the feature extractor."""
    stated = _part(audio, "audio_encoding_args")
    return _MEL_DEFAULTS | {_MEL_KEYS[old]: value for old, value in stated.items() if old in _MEL_KEYS}


def _joined_rows(params: Mapping[str, Any]) -> int:
    """Return the number of the encoder's rows that the projector joins."""
    return positive_int({"downsample_factor": 4} | _part(params, "downsample_args"), "downsample_factor", FILE)


def _as_number(value: Any) -> Any:
    """Return a number that is stored as a string; any other value as it is."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _number(value: Any, key: str, file: str) -> float:
    """Return a finite number; ConfigError names the key and the file otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{key} in {file} is {repr(value)[:60]}; it must be a number")
    return value


def _part(owner: Mapping[str, Any], key: str, file: str = FILE) -> dict[str, Any]:
    """Return the object under this key, empty if the key is missing; ConfigError if it is not an object."""
    part = owner.get(key)
    if not isinstance(part, dict | None):
        raise ConfigError(f"{key} in {file} is {typed(part)}; it must be an object")
    return part or {}


def _check(part: Mapping[str, Any], refused: Sequence[str], needed: Sequence[str]) -> None:
    """Raise ConfigError for a refused feature that is set, or for a missing key."""
    unsupported_keys = [key for key in refused if part.get(key)]
    if unsupported_keys:
        raise ConfigError(f"{unsupported_keys[0]} in {FILE} is not supported; use the checkpoint in the Hub's layout")
    missing = [key for key in needed if part.get(key) is None]
    if missing:
        raise ConfigError(f"{FILE} lacks {missing[0]!r}; download it again")


def hub_names(weights: Iterable[tuple[str, Tensor]], causal: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Rename tensors to the Hub's names; unknown names stay as they are. `causal`: the audio encoder is causal."""
    for name, tensor in weights:
        if _UNUSED not in name:
            yield _hub_name(name, causal), tensor


def _hub_name(stored: str, causal: bool) -> str:
    name = _AUDIO_PREFIX.sub("audio.", stored, count=1)
    match = _LAYER.fullmatch(name)
    if match is None:
        stem, _, kind = name.rpartition(".")
        whole = _WHOLE | _CAUSAL_WHOLE if causal else _WHOLE
        return f"{whole[stem]}.{kind}" if stem in whole else stored.replace("vision_encoder.", "model.vision_tower.", 1)
    tower, layer, part, kind = match.groups()
    if tower is None:
        expert = _EXPERT.fullmatch(part)
        hub_part = _PARTS.get(part, part) if expert is None else f"mlp.experts.{expert[1]}.{_EXPERTS[expert[2]]}"
        return f"model.language_model.layers.{layer}.{hub_part}.{_ENDS.get(kind, kind)}"
    if tower == "audio":
        parts = _PARTS | (_CAUSAL_PARTS if causal else _AUDIO_PARTS)
        return f"model.audio_tower.layers.{layer}.{parts.get(part, part)}.{kind}"
    inner = _PARTS.get(part, part).replace("self_attn.", "attention.").replace("mlp.", "feed_forward.")
    norm = part if part.endswith("_norm") else inner
    return f"model.vision_tower.transformer.layers.{layer}.{norm}.{kind}"
