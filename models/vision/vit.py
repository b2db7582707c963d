"""The packed vision tower: items of many requests in one call; patches attend within their frame, window or item.

Sources: arXiv 2010.11929 (the transformer over patches), 2307.06304 (images of many sizes packed), 2103.17239 (layer scale).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from ...callers.errors import ConfigError
from ...checkpoints.config import check_activation
from ...kernels.activation import act_and_mul, activation
from ...kernels.rope import rotary_cos_sin, rotate_
from ...kernels.varlen import varlen_attention, varlen_attention_with_trailing
from ..interface import StepLimits
from ..layers.basic import AddResidual, TensorModule
from ..layers.builder import Builder
from ..layers.connectors import ProjectorSpec, projector_bytes
from ..memory_formulas import FLOAT32, OpBytes
from .positions import Grid, TowerLayout, add_positions_, frequencies, plan_layout
from .spec import TowerSpec


@dataclass(frozen=True)
class TowerMetadata:
    """Shared by all layers of one call: rotary cosines and sines, and the lengths of frames and of windows, in patches.

    `second_cos_sin`: those of the second number of each pair, if they differ from those of the first. `trailing`: see
    `VisionTower.forward`.
    """

    cos_sin: tuple[Tensor, Tensor] | None
    frames: list[int]
    windows: list[int]
    trailing: Sequence[int] = ()
    second_cos_sin: tuple[Tensor, Tensor] | None = None


class VisionAttention:
    def __init__(self, s: TowerSpec, build: Builder) -> None:
        self.heads, self.key_heads, self.dim, self.qk_norm = s.heads, s.key_heads, s.head_dim, s.qk_norm
        self.interleaved = s.rotary is not None and (s.rotary.interleaved or s.rotary.unequal_angles)
        names, inner, keys = s.names, s.heads * s.head_dim, s.key_heads * s.head_dim
        sizes = [inner, keys, keys] if len(names.qkv) > 1 else [inner + 2 * keys]
        self.qkv = build.linear(names.qkv, s.width, sizes, s.qkv_bias)
        self.out = build.linear([names.out], inner, [s.width], s.out_bias)
        widths = (s.head_dim, s.head_dim) if s.qk_norm == "head" else (inner, keys)
        self.norms = [build.norm(*norm, s.eps, False) for norm in zip(names.qk_norms, widths, strict=True)] if s.qk_norm else []
        for norm in self.norms:
            norm.takes_adapters = s.qk_norm != "head"

    def __call__(self, x: Tensor, meta: TowerMetadata, segments: list[int]) -> Tensor:
        heads = (self.heads, self.key_heads, self.key_heads)
        qkv = self.qkv(x).view(len(x), sum(heads), self.dim)  # [patches, q | k | v heads, dim]
        for part, norm in zip(qkv.split(heads, 1), self.norms, strict=False):
            if self.qk_norm == "head":
                norm.heads_(part)
            else:
                part.copy_(norm(part.flatten(1).contiguous()).view(part.shape))
        if meta.cos_sin is not None:
            rotated = qkv[:, : self.heads + self.key_heads]
            if self.interleaved:  # adjacent pairs become halves: scores do not depend on the order of a head's numbers
                rotated.copy_(rotated.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2))
            second = None if meta.second_cos_sin is None else rotated.clone()
            rotate_(rotated, *meta.cos_sin)
            if second is not None and meta.second_cos_sin is not None:
                rotate_(second, *meta.second_cos_sin)
                rotated[..., self.dim // 2 :] = second[..., self.dim // 2 :]
            del second
        q, k, v = qkv.split(heads, 1)
        if self.key_heads < self.heads:
            k, v = (part.repeat_interleave(self.heads // self.key_heads, 1) for part in (k, v))
        attend: Callable[..., Tensor] = varlen_attention
        if any(meta.trailing):
            attend = partial(varlen_attention_with_trailing, trailing=meta.trailing)
        return self.out(attend(q, k, v, segments, self.dim**-0.5).flatten(1))


class VisionMlp:
    """`out(act(in(x)))`, or `out(act(gate(x)) * up(x))` if gated."""

    def __init__(self, s: TowerSpec, build: Builder) -> None:
        self.act, self.gated = s.act, s.gated
        *first, last = s.names.mlp
        self.first = build.linear(first, s.width, [s.inner] * len(first), s.mlp_bias)
        self.last = build.linear([last], s.inner, [s.width], s.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        act = act_and_mul if self.gated else activation
        return self.last(act(self.act, self.first(x)))


class VisionLayer:
    """Attention and MLP, each after a norm, or before one."""

    def __init__(self, s: TowerSpec, build: Builder, windowed: bool) -> None:
        self.windowed = windowed
        norms = [build.norm(name, s.width, s.eps, not s.rms) for name in s.names.norms]
        self.before: Sequence[TensorModule] = [AddResidual(), AddResidual()] if s.norms_after else norms
        self.after = norms if s.norms_after else []
        self.attention, self.mlp = VisionAttention(s, build), VisionMlp(s, build)
        self.scales = [build.stored(name, s.width) for name in s.names.scales] if s.layer_scale else []

    def __call__(self, x: Tensor, add: Tensor | None, meta: TowerMetadata) -> Tensor:
        """Update the residual stream `x` in place, first by `add`. Return the MLP's output, which the next layer adds."""
        add = self.attention(self.before[0](x, add), meta, meta.windows if self.windowed else meta.frames)
        add = self.mlp(self.before[1](x, self._adjusted(0, add)))
        return self._adjusted(1, add)

    def _adjusted(self, part: int, out: Tensor) -> Tensor:
        """Norm or scale the output of attention (0) or MLP (1)."""
        if self.after:
            out = self.after[part](out)
        return out.mul_(self.scales[part].weight) if self.scales else out


class VisionTowerParts:
    """The layers of a tower. Not a module, so that they are registered under their checkpoint names only."""

    def __init__(self, s: TowerSpec, build: Builder) -> None:
        names = s.names
        norm = partial(build.norm, width=s.width, eps=s.eps, bias=not s.rms)
        self.patch: Callable[[Tensor], Tensor] = torch.clone
        if s.patch_dim:
            self.patch = build.linear([names.patch], s.patch_dim, [s.width], s.patch_bias)
        self.video_patch = self.patch
        if s.joined_frames > 1:
            self.video_patch = build.linear([names.video_patch], s.joined_frames * s.patch_dim, [s.width], s.patch_bias)
        self.table = None if s.table is None else build.stored(names.table, s.table.side**2 + s.class_token, s.width)
        shape = (s.registers, s.width) if s.registers else (s.width,)
        self.token = build.stored(names.class_token, *shape) if s.first_rows else None
        self.patch_norm = norm(names.patch_norm) if s.patch_norm else None
        self.pre_norm = norm(names.pre_norm) if s.pre_norm else None
        self.post_norm = norm(names.post_norm) if s.post_norm else None
        windowed = [s.window > 0 and i not in s.full_layers for i in range(s.states[-1])]
        self.layers = [VisionLayer(s, build.scope(f"{names.layers}.{i}"), flag) for i, flag in enumerate(windowed)]


class VisionTower(nn.Module):
    """Patches of items -> the hidden states that `spec.features` names.

    Raises:
        ConfigError: an unknown activation, or a width that heads and rotary positions do not divide.
    """

    __call__: Callable[..., list[Tensor]]

    def __init__(self, spec: TowerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        spec = replace(spec, act=check_activation("vision hidden_act", spec.act))
        if not spec.attention_dim and spec.width % (spec.heads * (1 if spec.rotary is None else 4)):
            size = "of equal size" if spec.rotary is None else "whose size is a multiple of 4"
            raise ConfigError(f"a tower of width {spec.width} (vision_config) cannot have {spec.heads} heads {size}")
        if spec.heads % spec.key_heads:
            raise ConfigError(
                f"num_attention_heads {spec.heads} of vision_config is not a multiple of num_key_value_heads {spec.key_heads}"
            )
        self.spec, self.dtype, self.device = spec, dtype, device
        self.parts = VisionTowerParts(spec, Builder(self, dtype, device))
        if spec.rotary is not None:
            self.inv_freq, self.axis_of_freq = (t.to(device) for t in frequencies(spec.rotary, spec.head_dim))

    def forward(
        self, patches: Tensor, grids: Sequence[Grid], trailing: Sequence[int] = (), times: Sequence[int] = ()
    ) -> list[Tensor]:
        """Return one `[rows, width]` per state in `spec.states`, rows in the order of the patches.

        Args:
            patches: `[patches, patch_dim]` (or rows) of all items, frame by frame, in squares of `spec.merge`. Those of videos
                with joined frames are `[patches, joined_frames * patch_dim]`, and a step of time counts as a frame.
            grids: `(t, h, w)` of each item, in patches; the tiles of an image count as frames.
            trailing: for each item (of one frame), the number of patches that follow those of its grid. They attend to the
                grid's patches, no patch attends to them, and they have the first position of the table. Empty: none. Not for
                towers with class tokens, windows or rotary positions.
            times: the time of each frame of all items, for rotary positions of order "frames"; empty: 0.
        """
        s = self.spec
        assert not trailing or (s.first_rows, s.window, s.rotary) == (0, 0, None), "this tower takes no trailing patches"
        layout = plan_layout(grids, s.merge, s.window)
        order = None if layout.order is None else layout.order.to(self.device)
        x = self._embed(patches.to(self.dtype), grids, trailing)
        if order is not None:
            x = x.view(-1, s.merge**2, s.width)[order].flatten(0, 1)
        patch_rows = _rows_of_patches(layout.frames, s.first_rows).to(self.device) if s.first_rows else None
        if patch_rows is not None:
            x = self._with_first_rows(x, patch_rows, layout.frames)
        if self.parts.pre_norm is not None:
            x = self.parts.pre_norm(x)
        meta = self._metadata(layout, grids, patch_rows, trailing, times)
        states = self._through_layers(x, meta)
        if patch_rows is not None and not s.keep_class:
            states = [rows[patch_rows] for rows in states]
        return states if order is None else [_natural_order(rows, order, s) for rows in states]

    def _embed(self, patches: Tensor, grids: Sequence[Grid], trailing: Sequence[int]) -> Tensor:
        parts, s = self.parts, self.spec
        is_joined = s.joined_frames > 1 and patches.shape[1] != s.patch_dim
        x = parts.video_patch(patches) if is_joined else parts.patch(patches)
        if parts.patch_norm is not None:
            x = parts.patch_norm(x)
        if parts.table is not None and s.table is not None:
            table = parts.table.weight[int(s.class_token) :]
            add_positions_(x, table, s.table, grids, s.merge, trailing)
        return x

    def _with_first_rows(self, x: Tensor, patch_rows: Tensor, frames: Sequence[int]) -> Tensor:
        """Return the rows with the learned rows before those of each frame."""
        parts = self.parts
        assert parts.token is not None
        token = parts.token.weight.to(x.dtype)
        if self.spec.registers:
            return torch.cat([part for rows in x.split(list(frames)) for part in (token, rows)])
        if parts.table is not None:
            token = parts.token.weight + parts.table.weight[0]
        out = token.to(x.dtype).repeat(len(x) + self.spec.first_rows * len(frames), 1)
        out[patch_rows] = x
        return out

    def _metadata(
        self,
        layout: TowerLayout,
        grids: Sequence[Grid],
        patch_rows: Tensor | None,
        trailing: Sequence[int],
        times: Sequence[int],
    ) -> TowerMetadata:
        s = self.spec
        frames = [t * h * w for t, h, w in grids] if s.temporal_attention else [rows + s.first_rows for rows in layout.frames]
        if s.rotary is None:
            return TowerMetadata(None, frames, layout.windows, trailing)
        axes = [layout.h, layout.w]
        if s.rotary.unequal_angles:
            each = zip(layout.frames, times or [0] * len(layout.frames), strict=True)
            axes.append(torch.cat([torch.full((count,), time) for count, time in each]))
        positions = torch.stack(axes).to(self.device) + s.rotary.first
        if patch_rows is not None:  # learned rows stay at 0
            count = positions.shape[1] + s.first_rows * len(layout.frames)
            positions = positions.new_zeros(len(axes), count).index_copy_(1, patch_rows, positions)
        half = s.head_dim // 2
        first, *second = (
            rotary_cos_sin(positions, *part)
            for part in zip(self.inv_freq.split(half), self.axis_of_freq.split(half), strict=True)
        )
        return TowerMetadata(first, frames, layout.windows, trailing, *second)

    def _through_layers(self, x: Tensor, meta: TowerMetadata) -> list[Tensor]:
        """Return the states of `spec.states`. All but the last are copies, since layers update `x` in place."""
        early = self.spec.states[:-1]
        states = [x.clone()] if 0 in early else []
        add = None
        for i, layer in enumerate(self.parts.layers, 1):
            add = layer(x, add, meta)
            if i in early:
                x += add
                add = None
                states.append(x.clone())
        if self.parts.post_norm is not None:
            return [*states, self.parts.post_norm(x, add)]
        if add is not None:
            x += add
        return [*states, x]


def _rows_of_patches(frames: Sequence[int], first: int) -> Tensor:
    """Return the row of each patch, int64 `[patches]`, if every frame starts with `first` learned rows.

    Frames of 2 and 1 patches, after one row each, give 1 2 4.
    """
    ends = accumulate(rows + first for rows in frames)
    return torch.cat([torch.arange(end - rows, end) for end, rows in zip(ends, frames, strict=True)])


def _natural_order(rows: Tensor, order: Tensor, s: TowerSpec) -> Tensor:
    """Put rows that are ordered by windows back into the input's order."""
    out = torch.empty_like(rows)
    out.view(-1, s.merge**2, s.width)[order] = rows.view(-1, s.merge**2, s.width)
    return out


def tower_bytes(c: TowerSpec, patches: int, out: ProjectorSpec | None, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in VisionTower and the projector after it, if any, for `patches` patches, pixels included."""
    ops = OpBytes(dtype, limits)
    row, states = c.width * dtype.itemsize, len(c.states)
    frame = c.min_frame or (0 if c.table is None else c.table.side**2)
    rows = patches + (patches // frame * c.first_rows if frame else 0)
    unequal = c.rotary is not None and c.rotary.unequal_angles
    rotation = c.head_dim * FLOAT32 * (1 + unequal) if c.rotary is not None else 0  # cosines and sines
    attention, mlp = _attention_bytes(c, rows, ops), vision_mlp_bytes(c, rows, ops)
    added = ops.linear_result(c.width, rows)
    if c.norms_after:  # the input is not copied, but the output is
        attention, mlp = (max(part - row, row + added) for part in (attention, mlp))
    layers = row + rotation + _held_bytes(c, row, added) + max(attention, added + mlp)  # x, and what is beside it
    reordered = 2 * states * row + 8 if c.first_rows or c.window else 0  # states in both orders, indices
    norm = row + ops.norm(c.width, c.rms) if c.post_norm else row
    end = max(states * row + rotation + norm, reordered)
    projector = 0 if out is None else projector_bytes(out, states, patches, dtype, limits)
    numbers = 3 + 2 * unequal + (c.first_rows > 0)  # positions, rows of patches
    base = patches * (c.patch_dim * dtype.itemsize + 8 * numbers)
    if not ops.fused("varlen_attention"):
        base += ops.torch_attention_tiles(patches, c.head_dim)
    start = _embedding_bytes(c, patches, ops)
    return base + max(patches * start, rows * layers, rows * end, patches * projector)


def _held_bytes(c: TowerSpec, row: int, added: int) -> int:
    """Return the most bytes per row that a layer is given beside x: copied states, and the previous output.

    The first layer has no previous output, and neither has the layer after a copy, which x is added to before.
    """
    *early, last = c.states
    per_layer = (sum(n < i for n in early) * row + added * (i > 1 and i - 1 not in early) for i in range(1, last + 1))
    return max(per_layer, default=0)


def _embedding_bytes(c: TowerSpec, patches: int, ops: OpBytes) -> int:
    """Return the bytes per patch before the first layer."""
    row, norm = c.width * ops.dtype.itemsize, ops.norm(c.width, c.rms)
    steps = [ops.linear(c.patch_dim, c.width, patches), row + norm]
    if c.table is not None:
        resampled = {"bilinear": 1, "bicubic": 1, "square": 3}.get(c.table.fit, 0)
        steps.append(3 * row + resampled * c.width * FLOAT32)  # x, the fitted table, the same in squares
    if c.first_rows or c.window:
        steps.append(2 * row + 8)
    return max(steps)


def _attention_bytes(c: TowerSpec, rows: int, ops: OpBytes) -> int:
    """Return the bytes per row in attention, with its normed input."""
    s, w, inner = ops.dtype.itemsize, c.heads * c.head_dim, c.heads * c.head_dim + 2 * c.key_heads * c.head_dim
    row, qkv = w * s, ops.linear_result(inner, rows)
    repeated = 2 * row * (c.key_heads < c.heads)
    steps = [ops.linear(c.width, inner, rows)]
    if c.qk_norm is not None:
        normed = ops.norm(w, True)
        steps.append(qkv + (row + normed if c.qk_norm == "all" else 0 if ops.fused("rms_norm") else normed))
    if c.rotary is not None:
        rotated = 0 if ops.fused("rotary") else ops.torch_rotary(w + c.key_heads * c.head_dim)
        swapped = c.rotary.interleaved or c.rotary.unequal_angles
        copied = (row + c.key_heads * c.head_dim * s) * c.rotary.unequal_angles
        steps.append(qkv + max(rotated + copied, 2 * row * swapped))
    steps.append(qkv + repeated + (row if ops.fused("varlen_attention") else 4 * row + ops.attention_copies(w)))
    steps.append(qkv + repeated + row + ops.linear(w, c.width, rows))
    return c.width * s + 2 * FLOAT32 + max(steps)


def vision_mlp_bytes(c: TowerSpec, rows: int, ops: OpBytes) -> int:
    """Return the bytes per row in VisionMlp, with its normed input."""
    return c.width * ops.dtype.itemsize + 2 * FLOAT32 + ops.mlp(c.width, (1 + c.gated) * c.inner, c.inner, rows)
