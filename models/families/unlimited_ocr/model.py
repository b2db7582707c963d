"""Unlimited-OCR: DeepSeek-OCR's encoders, and a decoder of experts whose answers read the prompt and their own last tokens.

Source: the modelling file of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....checkpoints.config import positive_int
from ...text.stack import Stack
from ...vision.spec import ENCODER, TowerSpec
from ..deepseek_ocr2.model import STACK as DEEPSEEK
from ..deepseek_ocr2.model import DeepseekOcr

STACK = replace(
    DEEPSEEK,
    defaults={
        **DEEPSEEK.defaults,
        "vocab_size": 129280, "hidden_size": 1280, "intermediate_size": 6848, "num_hidden_layers": 12,
        "num_attention_heads": 10, "num_key_value_heads": 10, "max_position_embeddings": 32768, "moe_intermediate_size": 896,
        "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
)  # fmt: skip
_WINDOW = 128
_JOINED, _SPLIT = "model.vision_model.transformer.layers.", "model.vision_model.encoder.layers."


class UnlimitedOcr(DeepseekOcr):
    """DeepSeek-OCR with another decoder. The Hub's layout has CLIP's layers under the names of transformers."""

    stack: ClassVar[Stack] = STACK
    prefixes = (("model.vision_tower.vision_encoder.", "clip."), *DeepseekOcr.prefixes)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text = dict(config.get("text_config") or config.get("language_config") or {})
        text.setdefault("sliding_window", config.get("sliding_window"))
        text["sliding_window"] = text["sliding_window"] or _WINDOW
        layers = positive_int({**STACK.defaults, **text}, "num_hidden_layers")
        text["layer_types"] = text.get("layer_types") or ["reference_sliding_attention"] * layers
        super().__init__({"vision_config": {}, **config, "text_config": text}, dtype, device)

    def clip_spec(self, vision: Mapping[str, Any]) -> TowerSpec:
        if "width" not in vision:
            vision = {"clip_config": {**(vision.get("encoder_config") or {}), "model_type": "clip_vision_model"}}
        return replace(super().clip_spec(vision), names=ENCODER)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename CLIP's layers and split their queries, keys and values, which the publisher's layout joins."""
        for name, tensor in super().convert_weights(weights):
            stem, joined, last = name.partition(".self_attn.qkv_proj.")
            stem = stem.replace(_JOINED, _SPLIT)
            if joined and stem.startswith(_SPLIT):
                yield from (
                    (f"{stem}.self_attn.{part}_proj.{last}", rows) for part, rows in zip("qkv", tensor.chunk(3), strict=True)
                )
            else:
                yield stem + joined + last, tensor
