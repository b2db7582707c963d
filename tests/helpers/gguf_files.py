"""Writes GGUF files from checkpoints in the Hub's layout, as llama.cpp's conversion does, with the published `gguf` package."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

ARCHS = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "granite": "granite", "glm4": "glm4", "ernie4_5": "ernie4_5",
    "phi3": "phi3", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "ministral3": "mistral3",
    "qwen2_vl_text": "qwen2vl", "qwen2_5_vl_text": "qwen2vl", "qwen3_vl_text": "qwen3vl", "qwen3_vl_moe_text": "qwen3vlmoe",
}  # fmt: skip
"""model_type of config.json -> general.architecture."""
KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim", "attention.value_length": "head_dim",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling", "attention.scale": "attention_multiplier",
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "attention.sliding_window": "sliding_window",
    "expert_shared_count": "n_shared_experts", "expert_weights_scale": "routed_scaling_factor", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank", "expert_weights_norm": "norm_topk_prob",
}  # fmt: skip
WINDOWED = ("gemma2", "gemma3", "phi3")
LATENT_KEYS = (
    "expert_shared_count",
    "expert_weights_scale",
    "expert_group_count",
    "expert_group_used_count",
    "expert_weights_norm",
)
Kind = Callable[[str, np.ndarray], gguf.GGMLQuantizationType]
"""Chooses the type of a tensor by its GGUF name and its values."""
Q = gguf.GGMLQuantizationType
ENCODER = (
    "visual.", "vision_tower.", "multi_modal_projector.", "image_newline", "model.vision_model.", "model.connector.",
    "model.visual.",
)  # fmt: skip
TEXT = re.compile(r"^(?:model\.language_model\.|model\.text_model\.|language_model\.(?:model\.)?)(?!lm_head)")
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def everything(kind: gguf.GGMLQuantizationType) -> Kind:
    """Return llama.cpp's rule: matrices have this type, all other tensors are F32."""
    return lambda name, value: kind if value.ndim > 1 and "ffn_gate_inp" not in name else Q.F32


def random_blocks(shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    """Return random blocks with values of about 1 / sqrt(inputs), for types that the `gguf` package cannot write."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // numbers, size), dtype=np.uint8)
    scale = shape[-1] ** -0.5
    halves = {  # place in a block -> number
        Q.Q2_K: {80: scale / 10, 82: scale / 7}, Q.Q3_K: {108: scale / 40}, Q.Q4_K: {0: scale / 200, 2: scale / 30},
        Q.Q5_K: {0: scale / 400, 2: scale / 30}, Q.Q6_K: {208: scale / 1000},
        Q.IQ4_NL: {0: scale / 60}, Q.IQ4_XS: {0: scale / 1200},
    }[kind]  # fmt: skip
    for place, value in halves.items():
        blocks[..., place : place + 2] = np.array([value], dtype=np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(source: Path, target: Path, kind: Kind, by_head: bool = False, **more: Any) -> tuple[Path, Path]:
    """Write `target/model.gguf` and, for a model with an encoder, `target/mmproj.gguf`.

    Args:
        by_head: store the up projections of latent attention as two tensors by head, as files since April 2025 do.
        more: metadata that replace those of the conversion; None removes a key.

    Returns:
        The file, and the checkpoint with the values of its tensors.
    """
    whole = json.loads((source / "config.json").read_text())
    config = whole.get("text_config", whole)
    arch = ARCHS[config["model_type"]]
    target.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(target / "model.gguf", arch)
    for key, value in (metadata(config, arch, by_head) | tokenizer_metadata(source) | more).items():
        add(writer, key.replace("ARCH", arch), value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config["num_hidden_layers"])
    wide, encoder, halves = {}, {}, {}
    for number, (name, tensor) in enumerate(sorted(join_experts(load_file(source / "model.safetensors")).items())):
        if name.startswith(ENCODER):
            encoder[name] = tensor
            continue
        stem = TEXT.sub("model.", name).replace("language_model.lm_head", "lm_head")
        own = names.get_name(stem.replace("correction_bias", "correction.bias"), (".weight", ".bias"))
        if by_head and own.endswith("attn_kv_b.weight"):
            for part, value in split_by_head(tensor, config).items():
                new = own.replace("attn_kv_b", part)
                chosen = kind(new, value.numpy())
                stored = pack(value.numpy(), chosen, number)
                writer.add_tensor(new, stored, raw_dtype=None if chosen in (Q.F32, Q.F16) else chosen)
                halves[part] = torch.from_numpy(gguf.dequantize(stored, chosen).reshape(value.shape).copy())
            wide[name] = torch.cat((halves["attn_k_b"].transpose(1, 2), halves["attn_v_b"]), 1).flatten(0, 1).contiguous()
            continue
        wide |= put(writer, own, name, tensor, config, kind, number)
    for name, tensor in extra_tensors(config).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    if encoder:
        wide |= write_encoder(source, target / "mmproj.gguf", whole, encoder, kind)
    shutil.copytree(source, target / "wide", ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(wide, target / "wide" / "model.safetensors")
    return target / "model.gguf", target / "wide"


def split_by_head(tensor: torch.Tensor, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    heads = tensor.float().view(config["num_attention_heads"], -1, config["kv_lora_rank"])
    keys, values = heads.split((config["qk_nope_head_dim"], config["v_head_dim"]), 1)
    return {"attn_k_b": keys.transpose(1, 2).contiguous(), "attn_v_b": values.contiguous()}


def latent_metadata(config: Mapping[str, Any], by_head: bool) -> dict[str, Any]:
    """Return the widths and the router's function of DeepSeek's decoders."""
    rope, key, value = config["qk_rope_head_dim"], config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    found = {"ARCH.rope.dimension_count": rope, "ARCH.expert_gating_func": 2 if config["model_type"] == "deepseek_v3" else 1}
    if not by_head:
        return found | {"ARCH.attention.key_length": key, "ARCH.attention.value_length": value}
    return found | {
        "ARCH.attention.head_count_kv": 1,
        "ARCH.attention.key_length": config["kv_lora_rank"] + rope,
        "ARCH.attention.value_length": config["kv_lora_rank"],
        "ARCH.attention.key_length_mla": key,
        "ARCH.attention.value_length_mla": value,
    }


def write_encoder(
    source: Path, target: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], kind: Kind
) -> dict[str, torch.Tensor]:
    """Write a mmproj file. Return the values of its tensors under the Hub's names."""
    writer = gguf.GGUFWriter(target, "clip")
    vision, images = config["vision_config"], json.loads((source / "preprocessor_config.json").read_text())
    for key, value in encoder_metadata(config, vision, images).items():
        add(writer, key, value)
    wide, depth = {}, vision.get("num_hidden_layers", 0)
    unused = range(depth + 1 + config["vision_feature_layer"], depth) if vision["model_type"] == "clip_vision_model" else ()
    left_out = (*(f".layers.{layer}." for layer in unused), "post_layernorm") if unused else ()
    for name, tensor in tensors.items():
        if "mask_token" in name or any(part in name for part in left_out):  # the first is for training
            continue
        values, frames = [], tensor.ndim == 5
        added = 1.0 if "soft_emb_norm" in name else 0.0
        heads = vision["num_attention_heads"] if vision["model_type"] == "pixtral" and re.search("[qk]_proj", name) else 0
        split = ".qkv." in name and config["model_type"] in ("qwen2_vl", "qwen2_5_vl")
        for number, part in enumerate(tensor.chunk(3 if split else 2 if frames else 1, 2 if frames else 0)):
            own = encoder_name(name.replace(".qkv.", f".{'qkv'[number]}.") if split else name, vision)
            value = (part.squeeze(2) if frames else part).float().contiguous() + added
            value = in_pairs(value, heads) if heads else value
            chosen = kind(own, value.numpy()) if "blk" in own else Q.F32
            stored = pack(value.numpy(), chosen, number)
            own = f"{own}.1" if frames and number else own
            writer.add_tensor(own, stored, raw_dtype=None if chosen in (Q.F32, Q.F16) else chosen)
            value = torch.from_numpy(gguf.dequantize(stored, chosen).reshape(value.shape).copy())
            values.append((in_halves(value, heads) if heads else value) - added)
        wide[name] = torch.stack(values, 2) if frames else torch.cat(values)
    finish(writer)
    return wide


def encoder_name(name: str, vision: Mapping[str, Any]) -> str:
    """Return the GGUF name of an encoder's tensor."""
    stem = name.replace("_weight", ".weight").replace("model.visual.", "visual.")
    if vision["model_type"] == "clip_vision_model":
        return clip_name(name)
    if vision["model_type"] == "internvl_vision":
        for place, hub in {0: "layer_norm", 1: "linear_1", 3: "linear_2"}.items():
            stem = stem.replace(f"multi_modal_projector.{hub}", f"mlp1.{place}")
        stem = f"model.{stem}" if stem.startswith("vision") else stem
        stem += ".weight" if "lambda_" in stem or "position_emb" in stem else ""
        return str(gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8).get_name(stem, (".weight", ".bias")))
    stem = re.sub(r"^vision_tower\.(encoder|embeddings|post_)", r"vision_tower.vision_model.\1", stem)
    found = re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", stem)
    if found:
        return f"v.deepstack.{vision['deepstack_visual_indexes'][int(found[1])]}.{found[2]}.{found[3]}"
    for hub, own in {"merger.linear_fc1": "mm.0", "merger.linear_fc2": "mm.2", "merger.norm": "v.post_ln"}.items():
        if stem.startswith(f"visual.{hub}."):
            return stem.replace(f"visual.{hub}", own)
    return str(gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8).get_name(stem, (".weight", ".bias")))


def clip_name(name: str) -> str:
    """Return the name that llama.cpp's script for LLaVA gives to a tensor of CLIP or of the projector."""
    for hub, own in CLIP.items():
        name = name.replace(hub, own)
    return name


def in_pairs(value: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from halves to adjacent pairs."""
    return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def in_halves(value: torch.Tensor, heads: int) -> torch.Tensor:
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


CLIP = {
    "multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2", "vision_tower.": "v.",
    "vision_model.": "", "encoder.layers": "blk", "embeddings.class_embedding": "class_embd",
    "embeddings.patch_embedding": "patch_embd", "embeddings.position_embedding": "position_embd", "pre_layrnorm": "pre_ln",
    "post_layernorm": "post_ln", "self_attn.out_proj": "attn_out", "self_attn.": "attn_", "_proj": "", "layer_norm": "ln",
    "mlp.fc1": "ffn_down", "mlp.fc2": "ffn_up", "model.": "", "image_newline": "model.image_newline",
}  # fmt: skip
"""Parts of CLIP's names -> those of GGUF, in this order; the two layers of its MLP are swapped."""
PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger", "qwen2_5_vl": "qwen2.5vl_merger", "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger", "gemma3": "gemma3", "idefics3": "idefics3", "smolvlm": "idefics3", "llava": "pixtral",
    "mistral3": "pixtral", "internvl": "internvl",
}  # fmt: skip
"""model_type of config.json -> clip.projector_type."""


def encoder_metadata(config: Mapping[str, Any], vision: Mapping[str, Any], images: Mapping[str, Any]) -> dict[str, Any]:
    kind = "mlp" if vision["model_type"] == "clip_vision_model" else PROJECTORS[config["model_type"]]
    size, patch = images["size"], vision["patch_size"]
    found = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": kind,
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.image_size": vision.get("image_size", 560),
        "clip.vision.patch_size": patch,
        "clip.vision.embedding_length": vision.get("embed_dim", vision["hidden_size"]),
        "clip.vision.feed_forward_length": vision.get("intermediate_size", vision["hidden_size"]),
        "clip.vision.block_count": vision.get("depth", vision.get("num_hidden_layers")),
        "clip.vision.attention.head_count": vision.get("num_heads", vision.get("num_attention_heads")),
        "clip.vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "clip.vision.image_mean": images["image_mean"],
        "clip.vision.image_std": images["image_std"],
    }
    if kind == "qwen3vl_merger":
        found["clip.vision.is_deepstack_layers"] = [i in vision["deepstack_visual_indexes"] for i in range(vision["depth"])]
    if kind == "internvl":
        found |= {"clip.vision.image_size": vision["image_size"][0], "clip.vision.patch_size": patch[0]}
        found |= {"clip.vision.projector.scale_factor": 2, "clip.vision.preproc_max_tiles": images["max_patches"]}
    elif kind == "idefics3":
        found["clip.vision.projector.scale_factor"] = config["scale_factor"]
        found["clip.vision.preproc_image_size"] = size["longest_edge"]
    elif kind == "mlp":
        found |= {"clip.vision.projection_dim": 768, "clip.use_gelu": False}  # the first is CLIP's own
        found["clip.vision.block_count"] += config["vision_feature_layer"] + 1
        pairs = [(wide, high) for high, wide in config.get("image_grid_pinpoints", ())]
        found["clip.vision.image_grid_pinpoints"] = [side for pair in pairs for side in pair] or None
    elif kind == "pixtral":
        found |= {
            "clip.vision.spatial_merge_size": config.get("spatial_merge_size"),
            "clip.use_silu": vision["hidden_act"] == "silu",
        }
    elif kind == "gemma3":
        side = int(config["mm_tokens_per_image"] ** 0.5)
        found["clip.vision.projector.scale_factor"] = vision["image_size"] // patch // side
    else:
        found |= {"clip.vision.image_min_pixels": size["shortest_edge"], "clip.vision.image_max_pixels": size["longest_edge"]}
    if "fullatt_block_indexes" in vision:
        found["clip.vision.n_wa_pattern"] = vision["fullatt_block_indexes"][0] + 1
        found["clip.vision.window_size"] = vision["window_size"]
    return found


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def metadata(config: Mapping[str, Any], arch: str, by_head: bool) -> dict[str, Any]:
    config = dict(config) | {
        "num_experts": config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts")
    }
    config |= {"head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]}
    keys = {f"ARCH.{new}": config[old] for new, old in KEYS.items() if config.get(old) is not None}
    if arch != "deepseek2":
        keys = {key: value for key, value in keys.items() if key.removeprefix("ARCH.") not in LATENT_KEYS}
    if arch not in WINDOWED:
        keys.pop("ARCH.attention.sliding_window", None)
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    rotated = config["head_dim"] * rope.get("partial_rotary_factor", 1.0)
    keys |= {"ARCH.rope.freq_base": float(rope["rope_theta"]), "ARCH.rope.dimension_count": int(rotated)}
    if "mrope_section" in rope:
        keys["ARCH.rope.dimension_sections"] = [*rope["mrope_section"], 0]
    if rope["rope_type"] in ("linear", "yarn"):
        keys |= {"ARCH.rope.scaling.type": rope["rope_type"], "ARCH.rope.scaling.factor": float(rope["factor"])}
        trained = rope.get("original_max_position_embeddings")
        keys |= {"ARCH.rope.scaling.original_context_length": trained} if trained else {}
        weight = rope.get("mscale_all_dim", 0.0) * (0.1 if arch == "deepseek2" else 1.0)
        keys |= {"ARCH.rope.scaling.yarn_log_multiplier": weight, "ARCH.rope.scaling.yarn_beta_fast": 32.0} if weight else {}
        if rope.get("llama_4_scaling_beta"):
            keys["ARCH.attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if "short_factor" in rope:
        longest, trained = config["max_position_embeddings"], config["original_max_position_embeddings"]
        keys["ARCH.rope.scaling.original_context_length"] = trained
        keys["ARCH.rope.scaling.attn_factor"] = (1 + np.log(longest / trained) / np.log(trained)).item() ** 0.5
    return keys | (latent_metadata(config, by_head) if config.get("kv_lora_rank") else {})


def extra_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return tensors with divisors of the frequencies: rope_freqs for llama3's scaled positions, two for longrope."""
    rope = config["rope_parameters"]
    if "short_factor" in rope:
        return {f"rope_factors_{end}.weight": np.array(rope[f"{end}_factor"], dtype=np.float32) for end in ("short", "long")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config["head_dim"]
    waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    trained, low, high = (rope[f"{n}"] for n in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    smooth = np.clip((trained / waves - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)}


def put(
    writer: gguf.GGUFWriter, own: str, name: str, tensor: torch.Tensor, config: Mapping[str, Any], kind: Kind, seed: int
) -> dict[str, torch.Tensor]:
    """Add a tensor in its type. Return its value, under the Hub's name."""
    paired = ARCHS[config["model_type"]] in ("llama", "granite", "mistral3") and ("q_proj" in name or "k_proj" in name)
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    added = 1.0 if "gemma" in config["model_type"] and name.endswith("norm.weight") else 0.0
    value = tensor.float() + added
    if paired:
        value = in_pairs(value, heads)
    array, chosen = value.numpy(), kind(own, value.numpy())
    stored = pack(array, chosen, seed)
    writer.add_tensor(own, stored, raw_dtype=None if chosen in (Q.F32, Q.F16) else chosen)
    value = torch.from_numpy(gguf.dequantize(stored, chosen).reshape(array.shape).copy())
    if paired:
        value = in_halves(value, heads)
    if ".experts." in name:
        return {name.replace(".experts.", f".experts.{i}."): own.contiguous() for i, own in enumerate(value)}
    return {name: (value - added).contiguous()}


def pack(array: np.ndarray, kind: gguf.GGMLQuantizationType, seed: int) -> np.ndarray:
    if kind in (Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K):
        return random_blocks(array.shape, kind, seed)
    return gguf.quantize(np.ascontiguousarray(array), kind)


def join_experts(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack the matrices of a layer's experts."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        whole = EXPERT.sub(".experts.", name)
        if whole != name:
            found.setdefault(whole, {})[int(EXPERT.search(name)[1])] = tensor
        else:
            found[name] = tensor
    stacked = {name: torch.stack([one[i] for i in range(len(one))]) for name, one in found.items() if isinstance(one, dict)}
    return found | stacked


def tokenizer_metadata(source: Path) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer.json that splits text as GPT-2 does."""
    content = json.loads((source / "tokenizer.json").read_text())
    config = json.loads((source / "tokenizer_config.json").read_text())
    template = source / "chat_template.jinja"
    vocab, added = content["model"]["vocab"], {token["id"]: token for token in content["added_tokens"]}
    tokens = {number: token for token, number in vocab.items()} | {number: one["content"] for number, one in added.items()}
    config_json = json.loads((source / "config.json").read_text())
    size = config_json.get("text_config", config_json)["vocab_size"]
    kinds = [
        gguf.TokenType.UNUSED if i not in tokens
        else gguf.TokenType.NORMAL if i not in added
        else gguf.TokenType.CONTROL if added[i]["special"]
        else gguf.TokenType.USER_DEFINED
        for i in range(size)
    ]  # fmt: skip
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": merges,
        "tokenizer.chat_template": template.read_text() if template.is_file() else None,
    }
    numbers = {token: number for number, token in tokens.items()}
    for key, name in (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token")):
        if config.get(name):
            found[f"tokenizer.ggml.{key}_token_id"] = numbers[config[name]]
    return found
