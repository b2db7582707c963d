"""The packed vision tower: items of many requests in one call, each row sees its own frame, window or item. Knows no family.

Sources: arXiv 2010.11929 (the transformer over patches), 2307.06304 (pictures of many sizes packed), 2103.17239 (layer scale).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn

from ...kernels.activation import activation, gated
from ...kernels.rope import rotary_cos_sin, rotate_
from ...kernels.varlen import varlen_attention
from ...mm.errors import ConfigError
from ..config import known_act
from ..layers.tree import Maker
from .places import Grid, Layout, add_places_, frequencies, plan_layout
from .spec import TowerSpec


@dataclass(frozen=True)
class Run:
    """What all layers of one call share: angles of the patches (None without rotary), segments of whole frames and windows."""

    turn: tuple[Tensor, Tensor] | None
    frames: list[int]
    windows: list[int]


class Attention:
    def __init__(self, s: TowerSpec, make: Maker) -> None:
        self.heads, self.dim, self.qk_norm = s.heads, s.head_dim, s.qk_norm
        self.neighbours = s.rotary is not None and s.rotary.neighbours
        names = s.names
        self.qkv = make.linear(names.qkv, s.width, [3 * s.width // len(names.qkv)] * len(names.qkv), s.qkv_bias)
        self.out = make.linear([names.out], s.width, [s.width], s.out_bias)
        wide = s.head_dim if s.qk_norm == "head" else s.width
        self.norms = [make.norm(name, wide, s.eps, False) for name in names.qk_norms] if s.qk_norm else []

    def __call__(self, x: Tensor, run: Run, segments: list[int]) -> Tensor:
        qkv = self.qkv(x).view(len(x), 3 * self.heads, self.dim)  # [patches, q | k | v heads, dim]
        for i, norm in enumerate(self.norms):
            part = qkv[:, i * self.heads : (i + 1) * self.heads]
            if self.qk_norm == "head":
                norm.heads_(part)
            else:
                part.copy_(norm(part.flatten(1).contiguous()).view(part.shape))
        if run.turn is not None:
            turned = qkv[:, : 2 * self.heads]
            if self.neighbours:  # scores are the same in any order of a head's numbers that queries and keys share
                turned.copy_(turned.unflatten(2, (-1, 2)).transpose(2, 3).flatten(2))
            rotate_(turned, *run.turn)
        q, k, v = qkv.split(self.heads, 1)
        return self.out(varlen_attention(q, k, v, segments, self.dim**-0.5).flatten(1))  # type: ignore[no-any-return]


class Mlp:
    """Two layers around an activation, or `out(act(gate(x)) * up(x))`."""

    def __init__(self, s: TowerSpec, make: Maker) -> None:
        self.act, self.gated = s.act, s.gated
        *first, last = s.names.mlp
        self.first = make.linear(first, s.width, [s.inner] * len(first), s.mlp_bias)
        self.last = make.linear([last], s.inner, [s.width], s.mlp_bias)

    def __call__(self, x: Tensor) -> Tensor:
        act = gated if self.gated else activation
        return self.last(act(self.act, self.first(x)))  # type: ignore[no-any-return]


class Block:
    """Works on the residual stream `x` in place; what each part adds to it is added by the norm that comes next."""

    def __init__(self, s: TowerSpec, make: Maker, windowed: bool) -> None:
        self.windowed = windowed
        self.norms = [make.norm(name, s.width, s.eps, not s.rms) for name in s.names.norms]
        self.attention, self.mlp = Attention(s, make), Mlp(s, make)
        self.scales = [make.stored(name, s.width) for name in s.names.scales] if s.layer_scale else []

    def __call__(self, x: Tensor, add: Tensor | None, run: Run) -> Tensor:
        add = self.attention(self.norms[0](x, add), run, run.windows if self.windowed else run.frames)
        if self.scales:
            add *= self.scales[0].weight
        add = self.mlp(self.norms[1](x, add))
        if self.scales:
            add *= self.scales[1].weight
        return add


class Parts:
    """The layers of a tower. No module, so that their only names are the checkpoint's."""

    def __init__(self, s: TowerSpec, make: Maker) -> None:
        names = s.names
        norm = partial(make.norm, width=s.width, eps=s.eps, bias=not s.rms)
        self.patch = make.linear([names.patch], s.patch_dim, [s.width], s.patch_bias) if s.patch_dim else torch.clone
        self.table = None if s.table is None else make.stored(names.table, s.table.side**2 + s.class_token, s.width)
        self.token = make.stored(names.class_token, s.width) if s.class_token else None
        self.patch_norm = norm(names.patch_norm) if s.patch_norm else None
        self.pre_norm = norm(names.pre_norm) if s.pre_norm else None
        self.post_norm = norm(names.post_norm) if s.post_norm else None
        windowed = [s.window > 0 and i not in s.full_layers for i in range(s.states[-1])]
        self.blocks = [Block(s, make.below(f"{names.layers}.{i}"), cut) for i, cut in enumerate(windowed)]


class Tower(nn.Module):
    """Patches of items -> their rows after the layers that `spec.features` names. Submodules are named as the checkpoint's.

    ConfigError names an activation that is not there, and a width that heads and rotary places do not divide.
    """

    def __init__(self, spec: TowerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        known_act("vision hidden_act", spec.act)
        if spec.width % (spec.heads * (1 if spec.rotary is None else 4)):
            each = "of one size" if spec.rotary is None else "of multiples of 4 numbers"
            raise ConfigError(f"a tower {spec.width} wide, as vision_config says, has no {spec.heads} heads {each}")
        self.spec, self.dtype, self.device = spec, dtype, device
        self.parts = Parts(spec, Maker(self, dtype, device))
        if spec.rotary is not None:
            self.inv_freq, self.axis_of_freq = (t.to(device) for t in frequencies(spec.rotary, spec.head_dim))

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> list[Tensor]:
        """One `[rows, width]` per state in `spec.features`, rows in the order of the patches.

        Args:
            patches: `[patches, patch_dim]`, or rows, of all items, frame by frame, in the order that `spec.merge` says.
            grids: `(t, h, w)` of each item, in patches; tiles of one picture are its frames.
        """
        s = self.spec
        layout = plan_layout(grids, s.merge, s.window)
        order = None if layout.order is None else layout.order.to(self.device)
        x = self._embed(patches.to(self.dtype), grids)
        if order is not None:
            x = x.view(-1, s.merge**2, s.width)[order].flatten(0, 1)
        of_patches = _behind_first(layout.frames).to(self.device) if s.class_token else None
        if of_patches is not None:
            x = self._with_class(x, of_patches, len(layout.frames))
        if self.parts.pre_norm is not None:
            x = self.parts.pre_norm(x)
        states = self._through_layers(x, self._run(layout, grids))
        if of_patches is not None and not s.keep_class:
            states = [rows[of_patches] for rows in states]
        return states if order is None else [_put_back(rows, order, s) for rows in states]

    def _embed(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        parts, s = self.parts, self.spec
        x: Tensor = parts.patch(patches)
        if parts.patch_norm is not None:
            x = parts.patch_norm(x)
        if parts.table is not None and s.table is not None:
            add_places_(x, parts.table.weight[int(s.class_token) :], s.table, grids, s.merge)
        return x

    def _with_class(self, x: Tensor, of_patches: Tensor, frames: int) -> Tensor:
        parts = self.parts
        assert parts.token is not None
        token = parts.token.weight if parts.table is None else parts.token.weight + parts.table.weight[0]
        out = token.to(x.dtype).repeat(len(x) + frames, 1)
        out[of_patches] = x
        return out

    def _run(self, layout: Layout, grids: Sequence[Grid]) -> Run:
        s = self.spec
        frames = [t * h * w for t, h, w in grids] if s.across_time else [rows + s.class_token for rows in layout.frames]
        if s.rotary is None:
            return Run(None, frames, layout.windows)
        positions = torch.stack((layout.h, layout.w)).to(self.device)
        return Run(rotary_cos_sin(positions, self.inv_freq, self.axis_of_freq), frames, layout.windows)

    def _through_layers(self, x: Tensor, run: Run) -> list[Tensor]:
        """Every wanted state but the last is a copy: the layers behind it go on in place."""
        early = self.spec.states[:-1]
        kept = [x.clone()] if 0 in early else []
        add = None
        for i, block in enumerate(self.parts.blocks, 1):
            add = block(x, add, run)
            if i in early:
                x += add
                add = None
                kept.append(x.clone())
        if self.parts.post_norm is not None:
            return [*kept, self.parts.post_norm(x, add)]
        if add is not None:
            x += add
        return [*kept, x]


def _behind_first(frames: Sequence[int]) -> Tensor:
    """Int64 `[patches]`, their rows where each frame has one more before its own: [2, 1] gives 1 2 4."""
    ends = accumulate(rows + 1 for rows in frames)
    return torch.cat([torch.arange(end - rows, end) for end, rows in zip(ends, frames, strict=True)])


def _put_back(rows: Tensor, order: Tensor, s: TowerSpec) -> Tensor:
    """From the order of windows to that of the patches."""
    out = torch.empty_like(rows)
    out.view(-1, s.merge**2, s.width)[order] = rows.view(-1, s.merge**2, s.width)
    return out
