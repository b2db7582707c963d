"""Qwen3-VL and Qwen3.5, dense and with experts.

Qwen3-VL adds earlier states of the tower after the decoder's first layers (deepstack). Qwen3.5 does not, and its decoder
consists of gated delta nets and gated attention.

Source: arXiv 2406.04334 (deepstack).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...native_model import NativeModel, axial_theta, patch_numbers
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec, interleaved_sections
from ...text.stack import Stack
from ...text.stacks import STACKS
from ...vision.spec import RotarySpec, TableSpec, TowerNames, TowerSpec

_TEXT: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000,
    "rope_theta": 5e5, "mrope_section": (24, 20, 20), "use_sliding_window": False,
}  # fmt: skip
_MOE_TEXT: dict[str, Any] = _TEXT | {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16, "out_hidden_size": 3584,
}  # fmt: skip
STACK = Stack(
    _TEXT,
    qk_norm="head",
    axes=interleaved_sections,
    router={"normalise": True, "transposed": True},
)
NAMES = TowerNames(mlp=("mlp.linear_fc1", "mlp.linear_fc2"))
PREFIXES = (
    ("model.visual.merger.", "merger."),
    ("visual.merger.", "merger."),
    ("model.visual.deepstack_merger_list.", "deepstack_mergers."),
    ("visual.deepstack_merger_list.", "deepstack_mergers."),
    ("model.visual.", "visual."),
    ("vision_tower.merger.", "merger."),  # as MLX's checkpoints call the tower
    ("vision_tower.deepstack_merger_list.", "deepstack_mergers."),
    ("vision_tower.", "visual."),
    *TEXT_PREFIXES,
)
_MERGER = ProjectorSpec(0, 0, ("linear_fc1", "linear_fc2"), norm="norm")  # names of its norm and layers


class Qwen3VL(NativeModel):
    """The tower has LayerNorm, a learned position table and rotary positions; one merger per deepstack level."""

    prefixes: Sequence[tuple[str, str]] = PREFIXES
    stack: ClassVar[Stack] = STACK

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*qwen3_specs(config, self.stack, _MERGER), dtype, device)
        self.level_mergers = level_mergers(config)


class Qwen3VLMoe(Qwen3VL):
    """The same with experts in the decoder."""

    stack = replace(STACK, defaults=_MOE_TEXT)


class Qwen35(NativeModel):
    """Qwen3.5."""

    prefixes = PREFIXES
    stack = STACKS["qwen3_5_text"]

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        # no layer is a deepstack level, whatever config.json says
        config = {**config, "vision_config": {**require(config, "vision_config"), "deepstack_visual_indexes": ()}}
        super().__init__(*qwen3_specs(config, self.stack, _MERGER), dtype, device)


class Qwen35Moe(Qwen35):
    """Qwen3.5 with experts in the decoder. The encoder of time series of Intern-S2-Preview is not built.

    Source: vLLM's interns2_preview.py.
    """

    ignored = ("model.time_series.", "time_series.")
    stack = STACKS["qwen3_5_moe_text"]


def qwen3_specs(
    config: Mapping[str, Any], stack: Stack, merger: ProjectorSpec
) -> tuple[DecoderSpec, TowerSpec, tuple[ProjectorSpec, ...]]:
    """Read decoder, tower and mergers. `merger` gives the names of a merger's norm and layers."""
    vision = {**_VISION, **require(config, "vision_config")}
    tower = _tower(vision)
    out = positive_int(vision, "out_hidden_size")
    first = replace(merger, width=tower.width, out=out, group=tower.merge**2, eps=tower.eps)
    decoder = decoder_spec(config, stack, deepstack=tuple(range(len(level_mergers(config)))))
    return decoder, tower, (first, *[replace(first, joined_norm=True)] * len(_deepstack_layers(vision)))


def level_mergers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of the merger of each deepstack level.

    Levels are in the order of the tower's layers; `deepstack_visual_indexes` has the order of the mergers.
    """
    layers = _deepstack_layers({**_VISION, **require(config, "vision_config")})
    return tuple(layers.index(layer) for layer in sorted(set(layers)))


def _deepstack_layers(vision: Mapping[str, Any]) -> tuple[int, ...]:
    depth, layers = positive_int(vision, "depth"), tuple(vision.get("deepstack_visual_indexes", (8, 16, 24)))
    if any(not 0 <= layer < depth for layer in layers):
        raise ConfigError(f"deepstack_visual_indexes {list(layers)} must be layers of the tower, from 0 to {depth - 1}")
    return layers


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    act, side = vision.get("hidden_act", "gelu_pytorch_tanh"), math.isqrt(vision.get("num_position_embeddings", 2304))
    depth = positive_int(vision, "depth")
    return TowerSpec(
        depth=depth,
        width=positive_int(vision, "hidden_size"),
        heads=positive_int(vision, "num_heads"),
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=patch_numbers(vision),
        act=act,
        merge=vision.get("spatial_merge_size", 2),
        rotary=RotarySpec(axial_theta(vision)),
        table=TableSpec(side, "bilinear", align_corners=True),
        features=tuple(sorted({depth, *(layer + 1 for layer in _deepstack_layers(vision))})),
        names=NAMES,
    )
