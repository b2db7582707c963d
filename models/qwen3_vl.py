"""Qwen3-VL, plain and with experts: levels of the tower are added behind the decoder's first layers (arXiv 2406.04334)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ..mm.errors import ConfigError
from .config import Stack, count, decoder_spec, need
from .decoder_model import TEXT_PREFIXES
from .layers.connectors import ProjectorSpec
from .native_model import NativeModel, axial_theta, patch_numbers
from .text.spec import in_turns
from .vision.spec import RotarySpec, TableSpec, TowerNames, TowerSpec

STACK = Stack(
    {"head_dim": 128, "rope_theta": 5e5, "mrope_section": (24, 20, 20), "use_sliding_window": False},
    qk_norm="head",
    axes=in_turns,
    router={"normalise": True, "transposed": True},
)
NAMES = TowerNames(mlp=("mlp.linear_fc1", "mlp.linear_fc2"))


class Qwen3VL(NativeModel):
    """LayerNorm tower with a learned table and rotary places; a merger, and one for each level.

    `merging`: names of a merger's norm and of its layers; `stack`: its decoder's.
    """

    stack: ClassVar[Stack] = STACK
    merging: ClassVar[tuple[str, tuple[str, str]]] = ("norm", ("linear_fc1", "linear_fc2"))

    prefixes: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.visual.merger.", "merger."),
        ("visual.merger.", "merger."),
        ("model.visual.deepstack_merger_list.", "levels."),
        ("visual.deepstack_merger_list.", "levels."),
        ("model.visual.", "visual."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = need(config, "vision_config")
        tower, places = _tower(vision), vision.get("deepstack_visual_indexes", (8, 16, 24))
        norm, layers = self.merging
        out, square = count(vision, "out_hidden_size"), tower.merge**2
        merger = ProjectorSpec(tower.width, out, layers, square, norm=norm, eps=tower.eps)
        levels = [replace(merger, joined_norm=True) for _ in places]
        super().__init__(
            decoder_spec(config, self.stack, deepstack=tuple(range(len(places)))), tower, (merger, *levels), dtype, device
        )


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    act, side = vision.get("hidden_act", "gelu_pytorch_tanh"), math.isqrt(vision.get("num_position_embeddings", 2304))
    depth, places = count(vision, "depth"), tuple(vision.get("deepstack_visual_indexes", (8, 16, 24)))
    if list(places) != sorted(set(places)) or any(not 0 <= place < depth - 1 for place in places):
        raise ConfigError(f"deepstack_visual_indexes {list(places)} are not rising layers before the last of {depth}")
    return TowerSpec(
        depth=depth,
        width=count(vision, "hidden_size"),
        heads=count(vision, "num_heads"),
        inner=count(vision, "intermediate_size"),
        patch_dim=patch_numbers(vision),
        act=act,
        merge=vision.get("spatial_merge_size", 2),
        rotary=RotarySpec(axial_theta(vision)),
        table=TableSpec(side, "bilinear", align_corners=True),
        features=(*(place + 1 for place in places), depth),
        names=NAMES,
    )
