"""The resampler of MiniCPM-V: learned queries read the patches of an image by one cross-attention and become its rows.

Sources: arXiv 2308.12966 (one cross-attention with learned queries), 2509.18154 (times of frames).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..interface import StepLimits
from ..memory_formulas import OpBytes
from .basic import Converter, Convertible, Norm, TensorModule
from .builder import StoredTensor
from .linear import Linear

_HEAD = 128  # numbers per head
_EPS = 1e-6


@dataclass(frozen=True)
class ResamplerSpec:
    """`queries`: rows of a result. `inner`: numbers per input row. `width`: numbers per result row, a multiple of 128."""

    queries: int
    inner: int
    width: int


class Resampler(TensorModule, Convertible):
    """`[patches, inner]` of one image, or of several frames together -> `[queries, width]`."""

    def __init__(self, spec: ResamplerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, width = spec, spec.width
        self.query = StoredTensor((spec.queries, width), dtype, device)
        self.input = None if spec.inner == width else Linear(spec.inner, {"kv_proj": width}, False, dtype, device)
        self.ln_q, self.ln_kv, self.ln_post = (Norm(width, _EPS, True, dtype, device) for _ in range(3))
        self.q, self.k, self.v, self.out = (
            Linear(width, {name: width}, True, dtype, device) for name in ("q_proj", "k_proj", "v_proj", "out_proj")
        )
        self.last = Linear(width, {"proj": width}, False, dtype, device)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Split the stored matrix of q, k and v; transpose `proj`, which is stored as `[inputs, outputs]`."""

        def split(kind: str) -> Converter:
            def convert(tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
                names = (f"{path}.{name}_proj.{kind}" for name in "qkv")
                return list(zip(names, tensor.chunk(3), strict=True))

            return convert

        yield f"{path}.attn.in_proj_weight", split("weight")
        yield f"{path}.attn.in_proj_bias", split("bias")
        yield f"{path}.proj", lambda tensor: [(f"{path}.proj.weight", tensor.T)]

    def forward(self, rows: Tensor, grids: Sequence[tuple[int, int, int]], times: Sequence[int]) -> Tensor:
        """Return the result rows for patches of images with these `(1, h, w)` grids. `times`: of frames; -1: no time."""
        rows = self.ln_kv(rows if self.input is None else self.input(rows))
        keys = torch.cat([self._positions(grid, time, rows) for grid, time in zip(grids, times, strict=True)])
        k, v, q = self.k(keys.add_(rows)), self.v(rows), self.q(self.ln_q(self.query.weight))
        q, k, v = (part.view(len(part), -1, _HEAD).transpose(0, 1)[None] for part in (q, k, v))
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.last(self.ln_post(self.out(heads[0].transpose(0, 1).reshape(self.spec.queries, -1))))

    def _positions(self, grid: tuple[int, int, int], time: int, like: Tensor) -> Tensor:
        """Return the position embeddings `[h * w, width]` of a grid: columns in one half, rows in the other, plus the time."""
        _, h, w = grid
        half = self.spec.width // 2
        columns, lines = (sinusoids(range(side), half).to(like.dtype).to(like.device) for side in (w, h))
        table = torch.cat((columns.expand(h, w, half), lines[:, None].expand(h, w, half)), -1).flatten(0, 1)
        return table if time < 0 else table.add_(sinusoids([time], 2 * half).to(like.dtype).to(like.device))


def sinusoids(positions: Sequence[int], width: int) -> Tensor:
    """Return float32 `[positions, width]`: sines, then cosines (arXiv 1706.03762, 3.5), rounded like numpy's."""
    freq = 1.0 / 10000 ** (np.arange(width // 2, dtype=np.float32) / np.float32(width / 2))
    angles = np.asarray(positions, np.float32)[:, None] * freq.astype(np.float32)
    return torch.from_numpy(np.concatenate((np.sin(angles), np.cos(angles)), 1))


def resampler_bytes(s: ResamplerSpec, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in Resampler for one result from `rows` input rows, which are not counted."""
    ops = OpBytes(dtype, replace(limits, rows=s.queries))
    row = s.width * dtype.itemsize
    start = ops.linear(s.inner, s.width, rows) + ops.norm(s.width, False)
    key = 2 * row + ops.linear(s.width, s.width, rows)
    value = row + ops.linear_result(s.width, rows) + ops.linear(s.width, s.width, rows)
    attend = row + 2 * ops.linear_result(s.width, rows) + ops.attention_copies(s.width)
    queries = 3 * row + max(ops.linear(s.width, s.width, s.queries), ops.norm(s.width, False))
    tiles = ops.torch_attention_tiles(s.queries, _HEAD)
    return rows * max(start, 3 * row, key, value + row, attend + row) + s.queries * queries + tiles
