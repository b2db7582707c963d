"""The vision tower of Gemma 4: norms before and after each part, two kinds of positions, means over squares of patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import ConfigError
from ...checkpoints.config import check_activation, positive_int
from ...kernels.activation import act_and_mul
from ...kernels.rope import rotary_cos_sin, rotate_
from ...kernels.varlen import varlen_attention
from ..interface import StepLimits
from ..layers.basic import Norm, TensorModule
from ..layers.builder import Builder
from ..layers.clipped import ClippedLinear
from ..memory_formulas import FLOAT32, SMALL, OpBytes
from .positions import Grid, plan_layout


@dataclass(frozen=True)
class PooledTowerSpec:
    """Parameters of the tower.

    Args:
        merge: patches along each side of a square, which becomes one row.
        positions: entries of the table along each axis.
        theta: base of the rotary frequencies.
        kv_heads: heads of keys and values.
        clipped: linear layers store bounds of their inputs and outputs.
        standardized: rows are shifted and scaled by stored vectors.
    """

    width: int
    inner: int
    layers: int
    heads: int
    head_dim: int
    patch: int
    merge: int
    positions: int
    theta: float
    act: str
    eps: float
    clipped: bool
    standardized: bool
    kv_heads: int

    @property
    def patch_dim(self) -> int:
        return 3 * self.patch**2


def pooled_tower_spec(vision: Mapping[str, Any]) -> PooledTowerSpec:
    """Read the raw `vision_config`; ConfigError for a missing key, or an attention that is not supported."""
    heads, dim = positive_int(vision, "num_attention_heads"), positive_int(vision, "head_dim")
    rope = vision.get("rope_parameters") or {}
    kv_heads = positive_int({"num_key_value_heads": heads, **vision}, "num_key_value_heads")
    if heads % kv_heads or dim % 4:
        counts = f"{heads} heads of {dim} numbers, num_key_value_heads {kv_heads}"
        raise ConfigError(
            f"vision_config has {counts}; heads must be a multiple of heads of keys, and rotations take 4 * n numbers"
        )
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ConfigError(f"rope_type of vision_config is {rope['rope_type']!r}; only axial is defined for images")
    return PooledTowerSpec(
        width=positive_int(vision, "hidden_size"),
        inner=positive_int(vision, "intermediate_size"),
        layers=positive_int(vision, "num_hidden_layers"),
        heads=heads,
        head_dim=dim,
        patch=positive_int(vision, "patch_size"),
        merge=positive_int(vision, "pooling_kernel_size"),
        positions=positive_int(vision, "position_embedding_size"),
        theta=float(rope.get("rope_theta", 100.0)),
        act=check_activation("vision hidden_activation", vision["hidden_activation"]),
        eps=vision["rms_norm_eps"],
        clipped=bool(vision["use_clipped_linears"]),
        standardized=bool(vision["standardize"]),
        kv_heads=kv_heads,
    )


class PooledTowerLayer:
    """Attention and a gated MLP, with norms before and after each."""

    def __init__(self, s: PooledTowerSpec, build: Builder) -> None:
        self.spec, inner, attention, mlp = s, s.heads * s.head_dim, build.scope("self_attn"), build.scope("mlp")
        sizes = {"q_proj": inner, "k_proj": s.kv_heads * s.head_dim, "v_proj": s.kv_heads * s.head_dim}
        self.qkv = [ClippedLinear(name, s.width, size, attention, s.clipped) for name, size in sizes.items()]
        self.out = ClippedLinear("o_proj", inner, s.width, attention, s.clipped)
        self.qk_norms = [attention.norm(name, s.head_dim, s.eps, False) for name in ("q_norm", "k_norm")]
        for norm in self.qk_norms:
            norm.takes_adapters = False
        self.value_norm = Norm(s.head_dim, s.eps, False, build.dtype, build.device, learned=False)
        self.up = [ClippedLinear(name, s.width, s.inner, mlp, s.clipped) for name in ("gate_proj", "up_proj")]
        self.down = ClippedLinear("down_proj", s.inner, s.width, mlp, s.clipped)
        names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
        self.norms = [build.norm(name, s.width, s.eps, False) for name in names]

    def __call__(self, x: Tensor, cos_sin: Sequence[tuple[Tensor, Tensor]], frames: list[int]) -> Tensor:
        before, after, before_mlp, after_mlp = self.norms
        x = x.add_(after(self._attend(before(x), cos_sin, frames)))
        normed = before_mlp(x)
        inner = torch.cat([linear(normed) for linear in self.up], 1)
        del normed
        inner = act_and_mul(self.spec.act, inner)
        return x.add_(after_mlp(self.down(inner)))

    def _attend(self, x: Tensor, cos_sin: Sequence[tuple[Tensor, Tensor]], frames: list[int]) -> Tensor:
        s, half = self.spec, self.spec.head_dim // 2
        q, k, v = (linear(x).unflatten(1, (-1, s.head_dim)) for linear in self.qkv)
        for part, norm in zip((q, k), self.qk_norms, strict=True):
            norm.heads_(part)
            for axis, (cos, sin) in enumerate(cos_sin):  # the first half of a head by columns, the second by rows
                rotate_(part[..., axis * half : (axis + 1) * half], cos, sin)
        self.value_norm.heads_(v)
        if s.kv_heads < s.heads:  # the memory plan counts what is wider: the output
            k, v = (part.repeat_interleave(s.heads // s.kv_heads, 1) for part in (k, v))
        return self.out(varlen_attention(q, k, v, frames, 1.0).flatten(1))


class PooledTower(TensorModule):
    """`[patches, patch_dim]` of items, ordered by squares -> `[squares, width]`, the mean over each square."""

    def __init__(self, spec: PooledTowerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, self.device, build = spec, dtype, device, Builder(self, dtype, device)
        self.patch = (build.linear(["patch_embedder.input_proj"], spec.patch_dim, [spec.width], False),)
        self.table = (build.stored("patch_embedder.position_embedding_table", 2, spec.positions, spec.width),)
        self.layer_list = [PooledTowerLayer(spec, build.scope(f"encoder.layers.{i}")) for i in range(spec.layers)]
        self.standard = [build.stored(name, spec.width) for name in ("std_bias", "std_scale")] if spec.standardized else []
        half = spec.head_dim // 2
        self.frequencies = (spec.theta ** (-torch.arange(0, half, 2, dtype=torch.float32) / half)).to(device)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        s, layout, (table,) = self.spec, plan_layout(grids, self.spec.merge, 0), self.table
        columns, rows = layout.w.to(self.device), layout.h.to(self.device)
        x = self.patch[0](patches.to(self.dtype))
        x.add_(table.weight[0].index_select(0, columns).add_(table.weight[1].index_select(0, rows)))
        axis = torch.zeros(len(self.frequencies), dtype=torch.int64, device=self.device)
        cos_sin = [rotary_cos_sin(axis_positions[None], self.frequencies, axis) for axis_positions in (columns, rows)]
        for layer in self.layer_list:
            x = layer(x, cos_sin, layout.frames)
        pooled = x.view(-1, s.merge**2, s.width).float().mean(1).to(self.dtype).float().mul_(s.width**0.5)
        if self.standard:
            bias, scale = self.standard
            pooled.sub_(bias.weight.float()).mul_(scale.weight.float())
        return pooled.to(self.dtype)


def pooled_tower_bytes(c: PooledTowerSpec, patches: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in PooledTower for `patches` patches, pixels included."""
    ops, s, inner = OpBytes(dtype, limits), dtype.itemsize, c.heads * c.head_dim
    row, out = c.width * s, ops.linear(c.inner, c.width, patches)
    qkv, wide = 3 * ops.linear_result(inner, patches), ops.linear_result(c.inner, patches)
    clipped = inner * s * c.clipped
    attention = row + qkv + max(row * c.clipped, inner * s + clipped + ops.linear(inner, c.width, patches))
    mlp = max(row + 2 * wide + 2 * c.inner * s, 3 * c.inner * s, c.inner * s * (1 + c.clipped) + out)
    base = c.patch_dim * s + 8 * 4 + row + c.head_dim * FLOAT32  # pixels, positions, x, cosines and sines
    return SMALL + patches * (base + max(attention, mlp, 2 * row + c.width * FLOAT32))
