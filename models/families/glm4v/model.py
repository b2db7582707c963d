"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: a gated tower, a merger with a gated MLP, sandwich norms or experts.

Source: arXiv 2507.01006.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int, require
from ....kernels.activation import act_and_mul, activation
from ...decoder_model import TEXT_PREFIXES
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec
from ...native_model import NativeModel, axial_theta, patch_numbers
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stack import Stack
from ...text.stacks import STACKS
from ...vision.spec import GATED_BLOCKS, RotarySpec, TableSpec, TowerSpec

_TEXT: dict[str, Any] = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 13696, "num_hidden_layers": 40,
    "num_attention_heads": 32, "num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
    "mrope_section": (8, 12, 12),
}  # fmt: skip
_OCR_TEXT = _TEXT | {
    "vocab_size": 59392, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 131072, "num_nextn_predict_layers": 1,
}  # fmt: skip
_MOE_TEXT: dict[str, Any] = {
    "vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True, "mrope_section": (8, 12, 12),
    "num_nextn_predict_layers": 1,
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
_MOE_STACK = replace(STACKS["glm4_moe"], defaults={**STACKS["glm4_moe"].defaults, **_MOE_TEXT})
_OCR_STACK = replace(_STACK, defaults=_OCR_TEXT, bias=False, mtp="layers")
_PREFIXES = (
    ("model.visual.downsample.", "merger.downsample."),
    ("visual.downsample.", "merger.downsample."),
    ("model.visual.merger.", "merger."),
    ("visual.merger.", "merger."),
    ("model.visual.", "visual."),
    *TEXT_PREFIXES,
)


@dataclass(frozen=True)
class MergerSpec(ProjectorSpec):
    """A linear layer over squares of rows, then another linear layer, a norm and a gated MLP of width `mlp_inner`."""

    mlp_inner: int = 0


class Merger(Projector):
    """`[patches, width]` -> `[rows, out]`."""

    spec: MergerSpec

    def __init__(self, spec: MergerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.itemsize = dtype.itemsize
        build, out, inner = Builder(self, dtype, device), spec.out, spec.mlp_inner
        self.mlp = (  # in a tuple: their only names are the checkpoint's
            build.linear(["proj"], out, [out], False),
            build.norm("post_projection_norm", out, 1e-5, True),
            build.linear(["gate_proj", "up_proj"], out, [inner, inner], False),
            build.linear(["down_proj"], inner, [out], False),
        )

    def forward(self, x: Tensor) -> Tensor:
        layer, norm, first, last = self.mlp
        x = activation("gelu", norm(layer(super().forward(x))))
        return last(act_and_mul(self.spec.act, first(x)))

    def extra_bytes(self, rows: int) -> int:
        s = self.spec
        return rows * (s.group * s.width + s.out + 3 * s.mlp_inner) * self.itemsize


class Glm4V(NativeModel):
    """GLM-4.1V and the small GLM-4.6V: the tower has RMSNorm, a resampled position table and rotary positions."""

    prefixes = _PREFIXES
    merger_class = Merger

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*_specs(config, _STACK), dtype, device)


class Glm4VMoe(NativeModel):
    """GLM-4.5V and the large GLM-4.6V: a decoder with experts."""

    prefixes = _PREFIXES
    merger_class = Merger

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*_specs(config, _MOE_STACK), dtype, device)


class GlmOcr(NativeModel):
    """GLM-OCR: the tower has no position table; its queries and keys are normed per head."""

    prefixes = _PREFIXES
    merger_class = Merger

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_OCR_VISION, **require(config, "vision_config")}
        bias = bool(vision["attention_bias"])
        tower = _tower(vision, positive_int(vision, "intermediate_size"))
        tower = replace(tower, qk_norm="head", out_bias=bias, mlp_bias=bias)
        merger = _merger(vision, positive_int(vision, "out_hidden_size") * vision["in_channels"])
        super().__init__(decoder_spec(config, _OCR_STACK), tower, (merger,), dtype, device)


def _specs(config: Mapping[str, Any], stack: Stack) -> tuple[DecoderSpec, TowerSpec, tuple[MergerSpec]]:
    vision = {**_VISION, **require(config, "vision_config")}
    tower = _tower(vision, positive_int(vision, "out_hidden_size"))
    table = TableSpec(positive_int(vision, "image_size") // positive_int(vision, "patch_size"), "bicubic")
    names = replace(tower.names, table="embeddings.position_embedding.weight")
    tower = replace(tower, table=table, patch_norm=True, names=names)
    return decoder_spec(config, stack), tower, (_merger(vision, positive_int(vision, "intermediate_size")),)


def _tower(vision: Mapping[str, Any], inner: int) -> TowerSpec:
    return TowerSpec(
        depth=positive_int(vision, "depth"),
        width=positive_int(vision, "hidden_size"),
        heads=positive_int(vision, "num_heads"),
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


def _merger(vision: Mapping[str, Any], mlp_inner: int) -> MergerSpec:
    return MergerSpec(
        positive_int(vision, "hidden_size"),
        positive_int(vision, "out_hidden_size"),
        ("downsample",),
        vision["spatial_merge_size"] ** 2,
        act=vision["hidden_act"],
        channels_first=True,
        mlp_inner=mlp_inner,
    )
