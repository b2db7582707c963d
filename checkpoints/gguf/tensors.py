"""The config and the tensors of GGUF models, under the names of the Hub's layout.

Source: the conversion scripts of llama.cpp.
"""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...callers.errors import CheckpointError, ConfigError, SensoriumError, short_repr
from ...kernels.linear.blocks import BLOCKS
from ..files import map_regular
from .architectures import ARCHS, PROJECTORS
from .reader import Gguf, GgufTensor, find_encoder, find_gguf, read_gguf
from .vision import Load, Named, check_encoder, dequantized, encoder_config, encoder_tensors, in_halves, vocabulary_rows

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attention.scale": "attention_multiplier",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
}
"""Metadata after "<architecture>." -> key of config.json."""
_NEEDED = ("embedding_length", "block_count", "attention.head_count", "attention.layer_norm_rms_epsilon")
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Tokens that end an answer wherever a vocabulary has them, as in llama.cpp."""
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
_WHOLE = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
_LONG_ROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
_YARN = {
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "attention.temperature_scale": "llama_4_scaling_beta",
}
_SIGMOID = 2  # of expert_gating_func
_GROUPS = {160: (8, 3), 256: (8, 4)}  # DeepSeek's number of experts -> n_group, topk_group, which files before 2026 lack


def open_model(path: Path) -> Gguf | None:
    """Read the headers of the GGUF model that a path names; None for another checkpoint.

    Raises:
        ConfigError, CheckpointError: as `find_gguf` and `read_gguf`; an architecture or a quantisation is not supported.
    """
    file = find_gguf(path)
    if file is None:
        return None
    model, encoder = read_gguf(file), find_encoder(file)
    if model.architecture not in ARCHS:
        names = ", ".join(ARCHS)
        raise ConfigError(f"{file.name} has the architecture {short_repr(model.architecture)}; supported are {names}")
    if encoder is not None:
        model = replace(model, encoder=read_gguf(encoder))
        check_encoder(model, read_gguf(encoder))
    for part in (model, model.encoder):
        for name, tensor in part.tensors.items() if part is not None else ():
            if tensor.kind not in DTYPES and tensor.kind not in BLOCKS:
                kinds = ", ".join((*BLOCKS, *DTYPES))
                raise CheckpointError(f"{name} in {tensor.path.name} is quantised as {tensor.kind}; use a file with {kinds}")
    return model


def hub_config(model: Gguf) -> dict[str, Any]:
    """Return the config in the Hub's layout.

    Raises:
        ConfigError: metadata are missing, or ask for a feature that is not supported; the message names them.
    """
    try:
        return _config(model)
    except SensoriumError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"the metadata of {model.path.name} make no config ({error}); download it again") from None


def _config(model: Gguf) -> dict[str, Any]:
    arch, metadata = ARCHS[model.architecture], model.metadata
    missing = [key for key in _NEEDED if f"{model.architecture}.{key}" not in metadata]
    embeddings = model.tensors.get("token_embd.weight")
    if missing or embeddings is None or len(embeddings.shape) != 2:
        raise ConfigError(f"{model.path.name} lacks {missing[0] if missing else 'token_embd.weight'}; download it again")
    text = {new: value for old, new in _KEYS.items() if (value := _number(model, old)) is not None}
    text |= {"vocab_size": vocabulary_rows(model), **arch.config(_number(model, "expert_gating_func") == _SIGMOID)}
    text.setdefault("head_dim", _number(model, "embedding_length") // _number(model, "attention.head_count"))
    text.setdefault("num_key_value_heads", text["num_attention_heads"])
    if "kv_lora_rank" in text:
        text |= _latent(model, text)
    elif _number(model, "attention.value_length") not in (None, text["head_dim"]):
        raise ConfigError(f"{model.path.name} has values of another width than keys, which is not supported")
    text |= _rope(model, text) | _by_architecture(model, text)
    config: dict[str, Any] = {
        "dtype": _dtype(model),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(metadata),
        "tie_word_embeddings": "output.weight" not in model.tensors,
    }
    quantised = any(tensor.kind in BLOCKS for gguf in (model, model.encoder) if gguf for tensor in gguf.tensors.values())
    if model.encoder is None:
        config |= {"architectures": [f"{arch.name}ForCausalLM"], **text}
    else:
        section = PROJECTORS[model.encoder.metadata["clip.projector_type"]].section
        config |= {section: text, **encoder_config(model, model.encoder)}
    return config | ({"quantization_config": {"quant_method": "gguf"}} if quantised else {})


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the ids of the tokens that end an answer."""
    stated = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    from_vocabulary = [number for number, token in enumerate(tokens) if token in _END_TOKENS]
    return sorted({number for number in (*stated, *from_vocabulary) if isinstance(number, int)})


def _number(model: Gguf, key: str) -> Any:
    """Return a number of the metadata or None. Raise ConfigError if it is not a number or differs between layers."""
    value = model.metadata.get(f"{model.architecture}.{key}")
    if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
        value = value[0].item()
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ConfigError(f"{model.architecture}.{key} in {model.path.name} is {short_repr(value)}; a number is supported")
    return value


def _dtype(model: Gguf) -> str:
    """Return the dtype of most weights; bfloat16 for quantised ones."""
    sizes = Counter[str]()
    for tensor in model.tensors.values():
        sizes[tensor.kind] += tensor.nbytes
    kind = sizes.most_common(1)[0][0]
    return str(DTYPES.get(kind, torch.bfloat16)).removeprefix("torch.")


def _rope(model: Gguf, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope_parameters and, if a part of a head is rotated, partial_rotary_factor."""
    rotated = _number(model, "rope.dimension_count") or text["head_dim"]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _number(model, "rope.freq_base") or 10000.0}
    kind = model.metadata.get(f"{model.architecture}.rope.scaling.type", "none")
    if _LONG_ROPE["short_factor"] in model.tensors:
        rope |= {new: _rope_factors(model, name, rotated) for new, name in _LONG_ROPE.items()}
        rope |= {"rope_type": "longrope", "attention_factor": _number(model, "rope.scaling.attn_factor")}
        rope["original_max_position_embeddings"] = _number(model, "rope.scaling.original_context_length")
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": _number(model, "rope.scaling.factor")}
        rope |= {new: value for old, new in _YARN.items() if (value := _number(model, old)) is not None}
        if weight := _number(model, "rope.scaling.yarn_log_multiplier"):
            rope |= dict.fromkeys(("mscale", "mscale_all_dim"), weight / ARCHS[model.architecture].log_scale)
    elif kind != "none":
        raise ConfigError(f"rope.scaling.type {short_repr(kind)} in {model.path.name} is not supported; known are linear, yarn")
    sections = model.metadata.get(f"{model.architecture}.rope.dimension_sections")
    if sections is not None and model.encoder is not None:
        rope["mrope_section"] = [int(size) for size in sections[:3]]
    if _ROPE_FREQS in model.tensors:
        rope |= {"rope_type": "factors", "factor": 1.0, "factors": _rope_factors(model, _ROPE_FREQS, rotated)}
    return {"rope_parameters": rope, "partial_rotary_factor": rotated / text["head_dim"]}


def _rope_factors(model: Gguf, name: str, rotated: int) -> list[float]:
    tensor = model.tensors.get(name)
    if tensor is None or tensor.shape != (rotated // 2,) or tensor.kind != "F32":
        shape = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
        raise ConfigError(f"{name} in {model.path.name} {shape}; it must be [{rotated // 2}] in F32")
    factors: list[float] = mapped_loader()(tensor).tolist()
    return factors


def _latent(model: Gguf, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of DeepSeek's latent attention and of its router."""
    rope = _number(model, "rope.dimension_count")
    widths = [_number(model, f"attention.{part}_length_mla") for part in ("key", "value")]
    if None in widths:  # files of before April 2025
        widths = [_number(model, f"attention.{part}_length") for part in ("key", "value")]
    groups, used = _GROUPS.get(text.get("num_experts", 0), (1, 1))
    return {
        "q_lora_rank": text.get("q_lora_rank"),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": widths[0] - rope,
        "v_head_dim": widths[1],
        "head_dim": rope,
        "n_group": text.get("n_group", groups),
        "topk_group": text.get("topk_group", used),
        "norm_topk_prob": bool(model.metadata.get(f"{model.architecture}.expert_weights_norm", False)),
    }


def _by_architecture(model: Gguf, text: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of the config that llama.cpp's code decides by architecture, not the metadata."""
    arch, keys = ARCHS[model.architecture], dict[str, Any]()
    if arch.wide_layers:
        wide = text["num_hidden_layers"] == arch.wide_layers
        keys["query_pre_attn_scalar"] = text["hidden_size"] // text["num_attention_heads"] if wide else text["head_dim"]
    if arch.local_rope:
        local = {"rope_type": "default", "rope_theta": _number(model, "rope.freq_base_swa") or 10000.0}
        rope = _rope(model, text)["rope_parameters"]
        keys["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    keys["sliding_window"] = text.get("sliding_window") if arch.windows else None
    if text.get("num_experts"):
        layers = range(min(text["num_hidden_layers"], len(model.tensors)))
        routed = [f"blk.{layer}.ffn_gate_inp.weight" in model.tensors for layer in layers]
        keys |= {"mlp_layer_types": ["sparse" if is_routed else "dense" for is_routed in routed]}
        keys["norm_topk_prob"] = text.get("norm_topk_prob", True)
    return keys


def read_tensors(model: Gguf, load: Load) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors under the Hub's names. The name of a quantised one ends in its format instead of in "weight".

    Args:
        load: returns the tensor of an entry: `mapped_loader()` or `on_meta`.
    """
    for name, info in model.tensors.items():
        for hub_name, kind, tensor in _text_tensors(model, name, info, load) if not name.startswith("rope_f") else ():
            yield _with_kind(hub_name, kind), tensor
    for name, kind, tensor in encoder_tensors(model.encoder, load) if model.encoder is not None else ():
        yield _with_kind(name, kind), tensor


def _with_kind(name: str, kind: str) -> str:
    return name.removesuffix("weight") + kind if kind in BLOCKS else name


def _text_tensors(model: Gguf, name: str, info: GgufTensor, load: Load) -> Iterator[Named]:
    arch, match, tensor = ARCHS[model.architecture], _BLOCK.fullmatch(name), load(info)
    prefix = "model." if model.encoder is None else "model.language_model."
    if match is None:
        stem, _, end = name.rpartition(".")
        hub_name = _WHOLE.get(stem, stem)
        if stem in ("token_embd", "output") and tensor.ndim == 2:
            tensor = F.pad(tensor, (0, 0, 0, max(0, vocabulary_rows(model) - len(tensor))))
        whole = f"{hub_name}.{end}" if stem == "output" else f"{prefix}{hub_name}.{end}"
        yield whole, info.kind, _shifted(hub_name, tensor, arch.norm_offset)
        return
    layer, part, end = match.groups()
    norms = dict(zip(_NORMS, arch.norms, strict=True))
    hub_name = f"{prefix}layers.{layer}.{norms.get(part) or _part(part, arch.fused)}.{end}"
    if arch.paired and part in ("attn_q", "attn_k"):
        key = "head_count" if part == "attn_q" or _number(model, "attention.head_count_kv") is None else "head_count_kv"
        tensor = in_halves(name, tensor, _number(model, f"attention.{key}"))
    if part.endswith("_exps"):
        for expert, weight in enumerate(tensor):
            yield hub_name.format(expert), info.kind, weight
    elif part == "exp_probs_b":
        yield f"{prefix}layers.{layer}.mlp.gate.e_score_correction_bias", info.kind, tensor
    elif part in ("attn_k_b", "attn_v_b"):
        if part == "attn_k_b":
            yield f"{prefix}layers.{layer}.self_attn.kv_b_proj.{end}", "F32", _joined_up(model, name, load)
    else:
        yield hub_name, info.kind, _shifted(hub_name, tensor, arch.norm_offset)


def _joined_up(model: Gguf, name: str, load: Load) -> Tensor:
    """Return kv_b_proj, joined from two tensors: keys `[heads, latent, nope]` and values `[heads, value, latent]`."""
    infos = [model.tensors.get(part) for part in (name, name.replace("attn_k_b", "attn_v_b"))]
    keys, values = (None if info is None else dequantized(info, load) for info in infos)
    if keys is None or values is None or keys.ndim != 3 or values.ndim != 3:
        raise CheckpointError(f"{name} and attn_v_b in {model.path.name} are not tensors with three axes; download it again")
    if keys.shape[:2] != (values.shape[0], values.shape[2]):
        raise CheckpointError(f"{name} and attn_v_b in {model.path.name} differ in heads or width; download it again")
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


def _part(part: str, fused: bool) -> str:
    return "mlp.gate_up_proj" if fused and part == "ffn_up" else _PARTS.get(part, part)


def _shifted(name: str, tensor: Tensor, offset: float) -> Tensor:
    """Subtract the offset that the file adds to the weights of norms."""
    return tensor - offset if offset and tensor.ndim == 1 and "norm" in name else tensor


def on_meta(info: GgufTensor) -> Tensor:
    """Return a tensor on the meta device. Quantised rows have the shape of their bytes."""
    if info.kind in BLOCKS:
        numbers, size = BLOCKS[info.kind]
        return torch.empty(*info.shape[:-1], info.shape[-1] // numbers * size, dtype=torch.uint8, device="meta")
    return torch.empty(info.shape, dtype=DTYPES[info.kind], device="meta")


def mapped_loader() -> Load:
    """Return a function that loads tensors by mapping their file."""
    maps: dict[Path, mmap.mmap] = {}

    def load(info: GgufTensor) -> Tensor:
        if info.path not in maps:
            maps[info.path] = map_regular(info.path)
        end, size = info.offset + info.nbytes, min(len(maps[info.path]), maps[info.path].size())
        if end > size:
            raise CheckpointError(f"{info.path.name} was changed: it has {size} bytes, a tensor ends at {end}")
        shape = on_meta(info)
        data: Tensor = torch.frombuffer(maps[info.path], dtype=torch.uint8, count=info.nbytes, offset=info.offset)
        return data.view(dtype=shape.dtype).view(shape.shape)

    return load
