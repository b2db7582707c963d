"""SAM's tower: one picture at a time through square windows, places told by learned differences, made small by convolutions.

Knows no family. Sources: arXiv 2304.02643 (the tower), 2203.16527 (windows in a plain transformer), 2112.01526 (differences).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.varlen import varlen_attention
from ..layers.relative import toward_places
from ..layers.tree import Maker
from .places import add_places_
from .spec import TowerNames, TowerSpec
from .vit import Mlp

SAM = TowerNames(table="pos_embed", mlp=("mlp.lin1", "mlp.lin2"))
"""`blocks.<i>.attn.qkv` and so on."""

TAPS = 9  # of a convolution of 3 x 3
_EPS = 1e-6  # of the norms between convolutions


@dataclass(frozen=True)
class SamSpec:
    """A transformer over the patches of a picture, and convolutions behind it.

    Args:
        tower: its layers. A window reaches over the picture's edge where it has to: rows there are empty, but seen. `table` has
            a row for every place of the largest picture.
        neck: channels behind the layers.
        down: channels of each further convolution, which halves both sides.
        relative: scores are moved by learned rows for how far key and query lie apart, up and down and across.
    """

    tower: TowerSpec
    neck: int
    down: tuple[int, ...]
    relative: bool = True

    @property
    def shrinks(self) -> int:
        """Patches along a side of what becomes one row."""
        return int(2 ** len(self.down))

    @property
    def width(self) -> int:
        """Of the result's rows."""
        return (self.neck, *self.down)[-1]


class Attention:
    """Rows of one square see each other.

    What their places add to a score is a product, too: of what the query makes of every line and column, and of a key that
    is 1 at its own line and column. So both are laid beside the heads' numbers, and no table of scores is made.
    """

    def __init__(self, s: SamSpec, make: Maker, side: int) -> None:
        t = s.tower
        self.heads, self.dim, self.scale = t.heads, t.head_dim, t.head_dim**-0.5
        self.qkv = make.linear(t.names.qkv, t.width, [3 * t.width], t.qkv_bias)
        self.out = make.linear([t.names.out], t.width, [t.width], t.out_bias)
        names = ("attn.rel_pos_h", "attn.rel_pos_w") if s.relative else ()
        self.tables = [make.stored(name, 2 * side - 1, t.head_dim) for name in names]

    def __call__(self, x: Tensor, side: int) -> Tensor:
        """`[squares * side^2, width]`, square by square, row by row."""
        q, k, v = self._widened(x, side)
        out = varlen_attention(q, k, v, [side * side] * (len(x) // side**2), 1.0)
        return self.out(out[..., : self.dim].flatten(1))  # type: ignore[no-any-return]

    def _widened(self, x: Tensor, side: int) -> Tensor:
        """`[3, rows, heads, dim + 2 * side]`: scaled queries, keys and values, with places beside them."""
        qkv = self.qkv(x).view(-1, side, side, 3, self.heads, self.dim)
        wide = x.new_zeros(3, *qkv.shape[:3], self.heads, self.dim + 2 * side * bool(self.tables))
        wide[..., : self.dim] = qkv.permute(3, 0, 1, 2, 4, 5)
        wide[0, ..., : self.dim] *= self.scale
        if self.tables:
            q, one = qkv[..., 0, :, :], torch.eye(side, dtype=x.dtype, device=x.device)
            beside = wide[..., self.dim :].split(side, -1)
            beside[0][0] = toward_places(q, self.tables[0].weight, 1)
            beside[1][0] = toward_places(q, self.tables[1].weight, 2)
            beside[0][1], beside[1][1] = one[None, :, None, None], one[None, None, :, None]
        return wide.flatten(1, 3)


class Block:
    """Works on the residual stream `x` in place; what each part adds to it is added by the norm that comes next."""

    def __init__(self, s: SamSpec, make: Maker, window: int, side: int) -> None:
        self.window = window
        self.norms = [make.norm(name, s.tower.width, s.tower.eps, True) for name in s.tower.names.norms]
        self.attention, self.mlp = Attention(s, make, window or side), Mlp(s.tower, make)

    def __call__(self, x: Tensor, add: Tensor | None, side: int) -> Tensor:
        seen = self.norms[0](x, add)
        if not self.window:
            add = self.attention(seen, side)
        else:
            add = _put_together(self.attention(_cut(seen, side, self.window), self.window), side, self.window)
        return self.mlp(self.norms[1](x, add))


class Tower(nn.Module):
    """Patches of a picture -> fewer rows. Submodules are named as the checkpoint's."""

    def __init__(self, spec: SamSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, make = spec, Maker(self, dtype, device)
        self.parts = Parts(spec, make)

    def forward(self, patches: Tensor, side: int) -> Tensor:
        """`[side^2, patch_dim]` of one square picture, row by row -> `[(side / shrinks)^2, width]`, likewise."""
        parts, table = self.parts, self.spec.tower.table
        x: Tensor = parts.patch(patches)
        assert table is not None
        add_places_(x, parts.table.weight, table, [(1, side, side)], 1)
        add = None
        for block in parts.blocks:
            add = block(x, add, side)
        x = parts.norms[0](parts.neck(x if add is None else x.add_(add)))
        x = parts.norms[1](parts.mix(_taps(x, side)))
        for layer in parts.down:
            x = layer(_taps(x, side, 2))
            side = -(-side // 2)
        return x


class Parts:
    """The layers of a tower. No module, so that their only names are the checkpoint's."""

    def __init__(self, s: SamSpec, make: Maker) -> None:
        t = s.tower
        assert t.table is not None, "its side is that of the largest picture"
        side = t.table.side
        self.patch = make.linear([t.names.patch], t.patch_dim, [t.width], t.patch_bias)
        self.table = make.stored(t.names.table, side**2, t.width)
        windows = [0 if i in t.full_layers else t.window for i in range(t.depth)]
        self.blocks = [Block(s, make.below(f"{t.names.layers}.{i}"), window, side) for i, window in enumerate(windows)]
        plain = partial(make.linear, bias=False)
        self.neck = plain(["neck.0"], t.width, [s.neck])
        self.mix = plain(["neck.2"], TAPS * s.neck, [s.neck])
        self.norms = [make.norm(name, s.neck, _EPS, True) for name in ("neck.1", "neck.3")]
        widths = (s.neck, *s.down)
        self.down = [plain([f"net_{i + 2}"], TAPS * widths[i], [wide]) for i, wide in enumerate(s.down)]


def convolved_names(prefix: str) -> Sequence[tuple[str, str]]:
    """(as stored, canonical) beginnings of names of a tower whose convolutions are called by what they are."""
    neck = ("conv1", "layer_norm1", "conv2", "layer_norm2")
    renamed = [(f"neck.{name}.", f"neck.{i}.") for i, name in enumerate(neck)]
    renamed += [("proj.conv1.", "net_2."), ("proj.conv2.", "net_3."), ("patch_embed.projection.", "patch_embed.proj.")]
    return [(prefix + old, new) for old, new in renamed]


def _cut(x: Tensor, side: int, window: int) -> Tensor:
    """`[side^2, width]` row by row -> `[windows * window^2, width]`, filled with empty rows on the right and below."""
    count = -(-side // window)
    fill = count * window - side
    plane = F.pad(x.view(side, side, -1), (0, 0, 0, fill, 0, fill)).view(count, window, count, window, -1)
    return plane.transpose(1, 2).reshape(-1, x.shape[1])


def _put_together(x: Tensor, side: int, window: int) -> Tensor:
    """What `_cut` cut, without what it filled in."""
    count = -(-side // window)
    plane = x.view(count, count, window, window, -1).transpose(1, 2).reshape(count * window, count * window, -1)
    return plane[:side, :side].reshape(side * side, -1)


def _taps(x: Tensor, side: int, stride: int = 1) -> Tensor:
    """What a convolution of 3 x 3 sees of `[side^2, width]`: `[places, width * 9]`, with zeros around, as its weight has it."""
    plane = x.view(1, side, side, -1).permute(0, 3, 1, 2)
    return F.unfold(plane, 3, padding=1, stride=stride)[0].T.contiguous()
