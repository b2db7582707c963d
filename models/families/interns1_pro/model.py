"""Intern-S1-Pro: Qwen3-VL's tower without deepstack, and a decoder of experts whose rotary positions have mixed frequencies.

The encoder of time series is not built. Sources: the publisher's code, vLLM's interns1_pro.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....checkpoints.config import get_text_config, positive_int
from ...text.rope import FOURIER
from ..qwen3_vl.model import STACK, Qwen35

_TEXT: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 5e6, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "use_sliding_window": False,
}  # fmt: skip
_MIXED = ("fope_init_factor", "fope_sep_head", "num_inv_freq")


class InternS1Pro(Qwen35):
    """A model of images and videos."""

    ignored = ("model.time_series.", "time_series.")
    stack = replace(STACK, defaults=_TEXT, axes=None, router={"group_score": "each", "transposed": True})

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({**config, "text_config": _text(config)}, dtype, device)


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the text config with the groups of experts and the mixed frequencies under the keys that the decoder reads."""
    text = {**_TEXT, **get_text_config(config)}
    rope = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    if any(rope.get(key) is not None for key in _MIXED):
        own = positive_int(text, "num_key_value_heads") if rope.get("fope_sep_head") else 1
        rope |= {"rope_type": FOURIER, "mixtures": own}
    return {**text, "rope_parameters": rope, "n_group": max(1, text.get("router_n_groups") or 1)}
