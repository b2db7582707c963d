"""Qwen2-VL and Qwen2.5-VL: the tower's rows take the place of placeholder embeddings in an M-RoPE decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ..mm.errors import ConfigError
from .config import Stack, count, decoder_spec, need
from .decoder_model import TEXT_PREFIXES
from .layers.connectors import ProjectorSpec
from .native_model import NativeModel, axial_theta, patch_numbers
from .vision.spec import GATED_BLOCKS, RotarySpec, TowerNames, TowerSpec

STACK = Stack(
    {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "mrope_section": (16, 24, 24), "use_sliding_window": False},
    bias=True,
    out_bias=False,
)


class _QwenVL(NativeModel):
    """What both share."""

    prefixes: ClassVar[Sequence[tuple[str, str]]] = (  # new names first, since old ones are shorter
        ("model.visual.merger.", "merger."),
        ("visual.merger.", "merger."),
        ("model.visual.", "visual."),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )

    def __init__(
        self, config: Mapping[str, Any], tower: TowerSpec, out_width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers, square = ("mlp.0", "mlp.2"), tower.merge**2
        merger = ProjectorSpec(tower.width, out_width, layers, square, norm="ln_q", eps=tower.eps, rms=tower.rms)
        super().__init__(decoder_spec(config, STACK), tower, (merger,), dtype, device)


def _shared(vision: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "depth": count(vision, "depth"),
        "heads": count(vision, "num_heads"),
        "patch_dim": patch_numbers(vision),
        "merge": vision.get("spatial_merge_size", 2),
        "rotary": RotarySpec(axial_theta(vision)),
        "patch_bias": False,
    }


class Qwen2VL(_QwenVL):
    """LayerNorm tower, whole frames in every layer. Its config calls the tower's width `embed_dim`."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = need(config, "vision_config")
        width, act = count(vision, "embed_dim"), vision.get("hidden_act", "quick_gelu")
        inner = int(width * vision.get("mlp_ratio", 4))
        tower = TowerSpec(**_shared(vision), width=width, inner=inner, act=act)
        super().__init__(config, tower, count(vision, "hidden_size"), dtype, device)


class Qwen25VL(_QwenVL):
    """RMSNorm and SwiGLU tower, windows in all but a few layers. `names`: of the tower's layers."""

    names: ClassVar[TowerNames] = GATED_BLOCKS

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = need(config, "vision_config")
        if vision.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"vision hidden_act {vision['hidden_act']!r} is not supported; known is silu")
        shared = _shared(vision)
        size, side = vision.get("window_size", 112), shared["merge"] * vision["patch_size"]
        if size < side:
            raise ConfigError(f"vision window_size {size} holds no merged patch of {side} pixels")
        tower = TowerSpec(
            **shared,
            width=count(vision, "hidden_size"),
            inner=count(vision, "intermediate_size"),
            act="silu",
            rms=True,
            window=size // side,
            full_layers=frozenset(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
            names=self.names,
        )
        super().__init__(config, tower, count(vision, "out_hidden_size"), dtype, device)
