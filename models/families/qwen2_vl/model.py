"""Qwen2-VL (arXiv 2409.12191) and Qwen2.5-VL (2502.13923): native size, M-RoPE; windows in the tower of 2.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...native_model import NativeModel, axial_theta, patch_numbers
from ...text.decoder_config import decoder_spec
from ...text.stack import Stack
from ...vision.spec import GATED_BLOCKS, RotarySpec, TowerNames, TowerSpec

_TEXT: dict[str, Any] = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "mrope_section": (16, 24, 24), "use_sliding_window": False,
}  # fmt: skip
STACK = Stack(_TEXT, bias=True, out_bias=False)
_VISION: dict[str, Any] = {
    "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14,
}  # fmt: skip
_VISION_25: dict[str, Any] = {
    "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14, "out_hidden_size": 3584,
}  # fmt: skip
PREFIXES = (  # those of transformers 5 first, since older ones are shorter
    ("model.visual.merger.", "merger."),
    ("visual.merger.", "merger."),
    ("model.visual.", "visual."),
    ("vision_tower.merger.", "merger."),  # as MLX's checkpoints call the tower
    ("vision_tower.", "visual."),
    *TEXT_PREFIXES,
    ("model.", "language_model."),
)


class Qwen2VL(NativeModel):
    """The tower has LayerNorm and attends to whole frames. Its config calls the tower's width `embed_dim`."""

    prefixes: Sequence[tuple[str, str]] = PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **require(config, "vision_config")}
        width, act = positive_int(vision, "embed_dim"), vision.get("hidden_act", "quick_gelu")
        inner = int(width * vision["mlp_ratio"])
        tower = TowerSpec(**_shared_fields(vision), width=width, inner=inner, act=act)
        merger = _merger(tower, positive_int(vision, "hidden_size"))
        super().__init__(decoder_spec(config, STACK), tower, (merger,), dtype, device)


class Qwen25VL(NativeModel):
    """The tower has RMSNorm and SwiGLU; all but a few layers attend within windows."""

    prefixes = PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        tower, merger = qwen25_tower(require(config, "vision_config"), GATED_BLOCKS)
        super().__init__(decoder_spec(config, STACK), tower, (merger,), dtype, device)


def qwen25_tower(vision: Mapping[str, Any], names: TowerNames) -> tuple[TowerSpec, ProjectorSpec]:
    """Read tower and merger of Qwen2.5."""
    vision = {**_VISION_25, **vision}
    shared = _shared_fields(vision)
    size, side = vision.get("window_size", 112), shared["merge"] * vision["patch_size"]
    if size < side:
        raise ConfigError(f"vision window_size {size} is smaller than a merged patch of {side} pixels")
    tower = TowerSpec(
        **shared,
        width=positive_int(vision, "hidden_size"),
        inner=positive_int(vision, "intermediate_size"),
        act=vision.get("hidden_act", "silu"),
        rms=True,
        window=size // side,
        full_layers=frozenset(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
        names=names,
    )
    return tower, _merger(tower, positive_int(vision, "out_hidden_size"))


def _shared_fields(vision: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "depth": positive_int(vision, "depth"),
        "heads": positive_int(vision, "num_heads"),
        "patch_dim": patch_numbers(vision),
        "merge": vision.get("spatial_merge_size", 2),
        "rotary": RotarySpec(axial_theta(vision)),
        "patch_bias": False,
    }


def _merger(tower: TowerSpec, out: int) -> ProjectorSpec:
    return ProjectorSpec(tower.width, out, ("mlp.0", "mlp.2"), tower.merge**2, norm="ln_q", eps=tower.eps, rms=tower.rms)
