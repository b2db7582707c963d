"""Molmo (arXiv 2409.17146): CLIP over overlapping crops with padding, attention pooling of patches, Qwen2, OLMo or OLMoE.

Source: the publisher's modeling_molmo.py and modeling_molmoe.py, and vLLM's molmo.py. Only MolmoE's config.json has a section
for the tower, `vision_backbone`; without one its constants are those of the published code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...interface import StepLimits
from ...layers.builder import StoredTensor
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stack import Stack
from ...vision.spec import TowerSpec
from ..molmo2.model import ADDED_TOKENS, Molmo2

TEXT: Mapping[str, Any] = {
    "vocab_size": 50304, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
    "max_position_embeddings": 2048, "layer_norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip
_FIXED: Mapping[str, Any] = {
    "layer_norm_type": "rms", "image_padding_embed": "pad_and_partial_pad", "image_pooling_2d": "attention-meanq",
    "image_projector": "mlp", "rope_impl": "llama", "activation_type": "swiglu", "attention_layer_norm_with_affine": True,
    "clip_qkv": None, "moe_shared_expert": False, "moe_interleave": False, "include_bias": False, "weight_tying": False,
    "normalize_input_embeds": False, "use_cls_feature": False, "scale_logits": False, "alibi": False,
}  # fmt: skip
_OLMO_KEYS = {
    "d_model": "hidden_size", "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers", "mlp_hidden_size": "intermediate_size", "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
}  # fmt: skip
"""Names of keys in MolmoE's config.json, and those of the other models."""
_VISION: Mapping[str, Any] = {
    "image_default_input_size": (336, 336), "image_patch_size": 14, "image_emb_dim": 1024, "image_num_heads": 16,
    "image_num_key_value_heads": 16, "image_num_layers": 23, "image_head_dim": 64, "image_mlp_dim": 4096,
    "image_mlp_activations": "quick_gelu", "image_norm_eps": 1e-5,
}  # fmt: skip
_KEYS = {
    "image_default_input_size": "image_size", "image_patch_size": "patch_size", "image_emb_dim": "hidden_size",
    "image_num_heads": "num_attention_heads", "image_num_key_value_heads": "num_key_value_heads",
    "image_num_layers": "num_hidden_layers", "image_head_dim": "head_dim", "image_mlp_dim": "intermediate_size",
    "image_mlp_activations": "hidden_act", "image_norm_eps": "layer_norm_eps",
}  # fmt: skip
_VIT_LAYERS = (-2, -9)
_BLOCK = re.compile(r"(\.blocks\.\d+\.)(?:attn\.|mlp\.)?(att_proj|attn_out|q_norm|k_norm|ff_proj|ff_out|attn_norm|ff_norm)\.")


class Molmo(Molmo2):
    """A model of images."""

    prefixes = (
        ("model.transformer.ff_out.", "head.lm_head."),
        ("model.vision_backbone.pad_embed", "pad_embed"),
        *Molmo2.prefixes,
    )
    max_crops = 12

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(_sections(config), dtype, device)
        self.pad_embed = StoredTensor((2, self.patch_pooling.spec.width), dtype, device)

    def text_spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        text, added = config["text_config"], config.get("additional_vocab_size", ADDED_TOKENS)
        for key, value in _FIXED.items():
            if (text.get(key, value) or None) != (value or None):
                raise ConfigError(f"{key} in config.json is {text[key]!r}; only {value!r} is supported")
        stack = Stack(
            out_bias=False,
            qk_norm="all" if text.get("attention_layer_norm") else None,
            norms=(None, "attn_norm", None, "ff_norm") if text.get("norm_after") else ("attn_norm", None, "ff_norm", None),
            eps_key="layer_norm_eps",
        )
        rows = positive_int(text, "embedding_size" if text.get("embedding_size") else "vocab_size") + added
        text = {**text, "vocab_size": rows, "tie_word_embeddings": False}
        return decoder_spec({"text_config": text}, stack, adds_encoder_rows=True, unpredicted=added)

    def tower_spec(self, vision: Mapping[str, Any], layers: Any) -> tuple[TowerSpec, tuple[int, ...]]:
        spec, order = super().tower_spec(vision, layers)
        names = replace(spec.names, class_token="class_embedding", pre_norm="pre_ln")
        return replace(spec, class_token=True, pre_norm=True, patch_bias=False, names=names), order

    def add_to_patches_(self, patches: Tensor, tensors: Mapping[str, Any]) -> None:
        """Add a learned row to patches of padding, and another to those with some padding: `padding`, int64 `[patches]`."""
        rows = self.pad_embed.weight
        patches += torch.cat([rows.new_zeros(1, rows.shape[1]), rows]).index_select(0, tensors["padding"])

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename the parts of decoder layers to those of Molmo2, and convert these."""
        return super().convert_weights((_BLOCK.sub(_rename, name), tensor) for name, tensor in weights)

    def input_bytes(self, modality: str, rows: int) -> int:
        return super().input_bytes(modality, rows) + self.max_patches(modality, rows) * 8

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return super().encoder_bytes(modality, rows, limits) + self.max_patches(modality, rows) * 8


def _rename(match: re.Match[str]) -> str:
    names = {"attn_out": "o_proj", "ff_out": "down_proj"}
    part = match[2]
    module = "" if part in ("attn_norm", "ff_norm") else "mlp." if part.startswith("ff") else "self_attn."
    return f"{match[1]}{module}{names.get(part, part)}."


def _sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the sections of Molmo2.

    MolmoE's experts are as wide as its projector, and the weights of chosen experts do not add up to 1. Its scores are scaled
    by the head's size, whatever `query_pre_attn_scalar` says.
    """
    text = {**TEXT, **{_OLMO_KEYS.get(key, key): value for key, value in config.items() if value is not None}}
    if config.get("mlp_ratio") and not config.get("mlp_hidden_size"):
        text["intermediate_size"] = positive_int(text, "mlp_ratio") * positive_int(text, "hidden_size")
    text |= {"norm_topk_prob": False, "query_pre_attn_scalar": None}
    text["num_key_value_heads"] = text.get("num_key_value_heads") or text["num_attention_heads"]
    text["intermediate_size"] = inner = positive_int(text, "intermediate_size") // 2  # of gate and up together
    stored = {**_VISION, **(config.get("vision_backbone") or {})}
    vision = {_KEYS[key]: value for key, value in stored.items() if key in _KEYS}
    side = vision["image_size"][0] // positive_int(vision, "patch_size")
    if stored.get("image_num_pos", side**2 + 1) != side**2 + 1:
        raise ConfigError(f"image_num_pos in vision_backbone is {stored['image_num_pos']}; images have {side**2 + 1} positions")
    shared = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    adapter = {**{key: vision[key] for key in shared}, "intermediate_size": inner, "hidden_act": "silu"}
    adapter["vision_feature_layer"] = config.get("vit_layers") or _VIT_LAYERS
    return {**config, "text_config": text, "vision_config": vision, "adapter_config": adapter}
