"""Shapes of published models (from their config.json), and the operations and bytes of their steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

_QWEN2_5_TEXT = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
    "hidden_act": "silu",
    "out_hidden_size": 3584,
}
_QWEN3_TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_QWEN3_VISION = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "hidden_act": "gelu_pytorch_tanh",
    "out_hidden_size": 4096,
}
_SMALL_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
}
_SMALL_VISION = {"depth": 4, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2, "out_hidden_size": 64}
_IDS = {"image_token_id": 290, "video_token_id": 291, "vision_start_token_id": 292, "vision_end_token_id": 293}


def qwen2_5_vl(tiny: bool) -> dict[str, Any]:
    """Qwen2.5-VL-7B."""
    text, vision = dict(_QWEN2_5_TEXT), dict(_QWEN2_5_VISION)
    if tiny:
        text |= _SMALL_TEXT | {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
        vision |= _SMALL_VISION | {"fullatt_block_indexes": [1, 3]}
    return _config("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", text, vision)


def qwen3_vl(tiny: bool) -> dict[str, Any]:
    """Qwen3-VL-8B."""
    text, vision = dict(_QWEN3_TEXT), dict(_QWEN3_VISION)
    if tiny:
        scaling = _QWEN3_TEXT["rope_scaling"] | {"mrope_section": [2, 3, 3]}  # type: ignore[operator]
        text |= _SMALL_TEXT | {"rope_scaling": scaling}
        vision |= _SMALL_VISION | {"deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 64}
    return _config("Qwen3VLForConditionalGeneration", "qwen3_vl", text, vision)


def _config(name: str, kind: str, text: Config, vision: Config) -> dict[str, Any]:
    parts = {
        "text_config": {**text, "model_type": f"{kind}_text"},
        "vision_config": {**vision, "model_type": kind if kind == "qwen3_vl" else f"{kind}_vision"},
    }
    return {"architectures": [name], "model_type": kind, "tie_word_embeddings": False, **_IDS, **parts}


@dataclass(frozen=True)
class Sums:
    """Size of one decoder.

    Args:
        linear: weights of the layers' linear products. head: weights of the head.
        kv: values cached per token. heads: query heads x head size x layers.
    """

    linear: int
    head: int
    kv: int
    heads: int

    def prompt(self, rows: int) -> float:
        """Return the operations of a prompt of `rows` tokens: linear layers, causal attention, logits of the last token."""
        return 2.0 * rows * self.linear + 2.0 * self.heads * rows * (rows + 1) + 2.0 * self.head

    def step(self, batch: int, keys: int, width: int) -> float:
        """Return the bytes that a decode step reads: every weight once, keys and values of every sequence."""
        return float(width) * (self.linear + self.head + batch * keys * self.kv)


def decoder(config: Config) -> Sums:
    text = config["text_config"]
    dim, inner, layers, heads = (
        text[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    )
    size = text.get("head_dim") or dim // heads
    kv = text["num_key_value_heads"] * size
    layer = dim * (heads * size + 2 * kv) + heads * size * dim + 3 * dim * inner
    return Sums(layers * layer, dim * text["vocab_size"], layers * 2 * kv, layers * heads * size)


def tower(config: Config, side: int) -> float:
    """Return the operations of one image of `side` x `side` patches, connector included, padding excluded."""
    v, n = config["vision_config"], side * side
    dim, inner, merge = v["hidden_size"], v["intermediate_size"], v["spatial_merge_size"] ** 2
    gated = "fullatt_block_indexes" in v
    block = 4 * dim * dim + (3 if gated else 2) * dim * inner
    every = 3 * v["temporal_patch_size"] * v["patch_size"] ** 2 * dim + v["depth"] * block
    wide = dim * merge
    merged = (1 + len(v.get("deepstack_visual_indexes", ()))) * (wide * wide + wide * v["out_hidden_size"])
    full = len(v["fullatt_block_indexes"]) if gated else v["depth"]
    window = (v["window_size"] // v["patch_size"]) ** 2 if gated else n
    attention = 4.0 * n * dim * (full * n + (v["depth"] - full) * min(n, window))
    return 2.0 * n * every + 2.0 * n / merge * merged + attention
