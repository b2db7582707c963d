"""GLM-4.1V, GLM-4.5V, GLM-4.6V, GLM-OCR: a gated tower, squares of rows joined, a sandwich of norms or a mixture.

Source: arXiv 2507.01006.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..kernels.activation import activation, gated
from .config import Stack, count, decoder_spec, need, text_of
from .decoder_model import TEXT_PREFIXES
from .interface import Work
from .layers.connectors import Projector, ProjectorSpec
from .layers.tree import Maker
from .native_model import NativeModel, axial_theta, patch_numbers
from .text.stacks import STACKS
from .vision.spec import GATED_BLOCKS, RotarySpec, TableSpec, TowerSpec

_TEXT: dict[str, Any] = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "mrope_section": (8, 12, 12),
}  # fmt: skip
_OCR_TEXT = _TEXT | {
    "vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 131072,
}  # fmt: skip
_MOE_TEXT: dict[str, Any] = {
    "vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True, "mrope_section": (8, 12, 12),
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 24, "hidden_size": 1536, "hidden_act": "silu", "attention_bias": False, "num_heads": 12, "in_channels": 3,
    "image_size": 336, "patch_size": 14, "rms_norm_eps": 1e-5, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "out_hidden_size": 4096, "intermediate_size": 13696,
}  # fmt: skip
_OCR_VISION = _VISION | {
    "hidden_size": 1024, "attention_bias": True, "num_heads": 16, "out_hidden_size": 1536, "intermediate_size": 4096,
}  # fmt: skip
_STACK = replace(STACKS["glm4"], defaults=_TEXT, bias=True)


@dataclass(frozen=True)
class MergerSpec(ProjectorSpec):
    """One layer over squares of rows; then a layer, a norm, and a gated MLP of width `behind`."""

    behind: int = 0


class Merger(Projector):
    """`[patches, width]` -> `[rows, out]`."""

    def __init__(self, spec: MergerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        make, out, inner = Maker(self, dtype, device), spec.out, spec.behind
        self.behind = (  # no attributes of a module: each layer has one name
            make.linear(["proj"], out, [out], False),
            make.norm("post_projection_norm", out, 1e-5, True),
            make.linear(["gate_proj", "up_proj"], out, [inner, inner], False),
            make.linear(["down_proj"], inner, [out], False),
        )

    def forward(self, x: Tensor) -> Tensor:
        layer, norm, first, last = self.behind
        x = activation("gelu", norm(layer(super().forward(x))))
        return last(gated(self.spec.act, first(x)))  # type: ignore[no-any-return]


class Glm4V(NativeModel):
    """GLM-4.1V and the small GLM-4.6V: RMSNorm tower with a resampled table and rotary places."""

    prefixes = (
        ("model.visual.downsample.", "merger.downsample."),
        ("visual.downsample.", "merger.downsample."),
        ("model.visual.merger.", "merger."),
        ("visual.merger.", "merger."),
        ("model.visual.", "visual."),
        *TEXT_PREFIXES,
    )
    projector = Merger
    vision: ClassVar[Mapping[str, Any]] = _VISION
    stack: ClassVar[Stack] = _STACK
    further: ClassVar[int] = 0  # layers behind the last that predict further tokens, where config.json does not say

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        tower, merger = self.parts({**self.vision, **need(config, "vision_config")})
        super().__init__(decoder_spec(config, self.stack), tower, [merger], dtype, device)
        text = {"num_nextn_predict_layers": self.further, **text_of(config)}
        first, more = len(self.spec.layers), count(text, "num_nextn_predict_layers") if text["num_nextn_predict_layers"] else 0
        self.kept = tuple(f"language_model.layers.{first + i}." for i in range(more))

    def parts(self, vision: Mapping[str, Any]) -> tuple[TowerSpec, MergerSpec]:
        """Tower and connector of a whole vision config."""
        tower = _tower(vision, count(vision, "out_hidden_size"))
        table = TableSpec(count(vision, "image_size") // count(vision, "patch_size"), "bicubic")
        names = replace(tower.names, table="embeddings.position_embedding.weight")
        tower = replace(tower, table=table, patch_norm=True, names=names)
        return tower, _merger(vision, count(vision, "intermediate_size"))

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        spec, size = self.merger.spec, self.dtype.itemsize
        assert isinstance(spec, MergerSpec)
        merging = rows * (spec.group * spec.width + spec.out + 3 * spec.behind) * size
        return max(super().encoder_bytes(modality, rows, work), merging)


class Glm4VMoe(Glm4V):
    """GLM-4.5V and the large GLM-4.6V."""

    stack = replace(STACKS["glm4_moe"], defaults={**STACKS["glm4_moe"].defaults, **_MOE_TEXT})
    further = 1


class GlmOcr(Glm4V):
    """GLM-OCR: no table; heads of queries and keys are normed."""

    vision = _OCR_VISION
    stack = replace(_STACK, defaults=_OCR_TEXT, bias=False)
    further = 1

    def parts(self, vision: Mapping[str, Any]) -> tuple[TowerSpec, MergerSpec]:
        bias = bool(vision["attention_bias"])
        tower = replace(_tower(vision, count(vision, "intermediate_size")), qk_norm="head", out_bias=bias, mlp_bias=bias)
        return tower, _merger(vision, count(vision, "out_hidden_size") * vision["in_channels"])


def _tower(vision: Mapping[str, Any], inner: int) -> TowerSpec:
    return TowerSpec(
        depth=count(vision, "depth"),
        width=count(vision, "hidden_size"),
        heads=count(vision, "num_heads"),
        inner=inner,
        patch_dim=patch_numbers(vision),
        act=vision["hidden_act"],
        merge=vision["spatial_merge_size"],
        eps=vision["rms_norm_eps"],
        rms=True,
        qkv_bias=bool(vision["attention_bias"]),
        out_bias=False,
        mlp_bias=False,
        rotary=RotarySpec(axial_theta(vision)),
        post_norm=True,
        names=GATED_BLOCKS,
    )


def _merger(vision: Mapping[str, Any], behind: int) -> MergerSpec:
    return MergerSpec(
        count(vision, "hidden_size"),
        count(vision, "out_hidden_size"),
        ("downsample",),
        vision["spatial_merge_size"] ** 2,
        act=vision["hidden_act"],
        channels_first=True,
        behind=behind,
    )
