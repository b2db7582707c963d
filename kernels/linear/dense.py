"""Linear layers in torch: weights as they are, or in oneDNN's blocked layout.

On a CPU a row's result has the same bits whatever other rows are in the batch, which needs rows of zeros as padding: oneDNN
sums in another order for a single row, so one row is padded to two (which takes as long); `mkl` says what dense float32
weights need.

oneDNN also compiles code for every number of rows, about 1 MB each, and frees it slowly: 600 different batch sizes through
four float32 layers left 1.6 GB behind. Rows are therefore padded to 8 sizes per power of two: 0.27 GB, at the same speed.

With AMX, the order of oneDNN's sums of bfloat16 depends on the number of rows, so torch gets pieces of 32 rows there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dispatch import backend
from .mkl import PIECE_ROWS, in_pieces, multiplied_rows, multiply_padded, needs_pieces

_MIN_ROWS_ONEDNN, _PIECE_AMX = 2, 32


@dataclass(frozen=True, eq=False)
class OneDnnWeight:
    """A weight in oneDNN's blocked layout (opaque), and its bias."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A weight `[out, in]` in its original layout, and its bias `[out]`."""

    weight: Tensor
    bias: Tensor | None


def pack_onednn(weight: Tensor, bias: Tensor | None) -> OneDnnWeight:
    """Pack `weight [out, in]` in oneDNN's layout."""
    return OneDnnWeight(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias)


def multiply_onednn(x: Tensor, weights: OneDnnWeight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]`."""
    return _linear_padded(x, _torch_rows(len(x), x.dtype, onednn=True), weights)


def multiply_dense(x: Tensor, weights: DenseWeight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]`."""
    if x.device.type == "cpu":
        return _linear_padded(x, _torch_rows(len(x), x.dtype, onednn=False), weights)
    return F.linear(x, weights.weight, weights.bias)


def computed_rows(rows: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the most rows of results that `linear` holds at once for `rows` rows: padded ones, and those of a piece."""
    chosen = backend("linear", device, dtype)
    if chosen == "native" or device.type != "cpu":
        return rows
    multiplied = _torch_rows(rows, dtype, onednn=chosen == "onednn")
    piece = _PIECE_AMX if _needs_pieces(dtype) else PIECE_ROWS if chosen == "torch" and needs_pieces() else multiplied
    return multiplied + piece if multiplied > piece else multiplied


def _needs_pieces(dtype: torch.dtype) -> bool:
    """Return whether torch multiplies this dtype with AMX tiles."""
    return dtype == torch.bfloat16 and bool(torch.cpu._is_amx_tile_supported())


def _torch_rows(rows: int, dtype: torch.dtype, onednn: bool) -> int:
    """Return the number of rows that torch multiplies on a CPU for a batch of `rows`."""
    if _needs_pieces(dtype):
        return max(-(-rows // _PIECE_AMX), 1) * _PIECE_AMX
    return padded_rows(rows) if onednn else multiplied_rows(rows)


def padded_rows(rows: int) -> int:
    """Return the number of rows that oneDNN gets for a batch of `rows`: 1 -> 2, 7 -> 7, 100 -> 104, 1000 -> 1024."""
    step = 1 << max(0, rows.bit_length() - 4)
    return max(-(-rows // step) * step, _MIN_ROWS_ONEDNN)


def _linear_padded(x: Tensor, rows: int, weights: OneDnnWeight | DenseWeight) -> Tensor:
    padded = F.pad(x, (0, 0, 0, rows - len(x))) if rows > len(x) else x
    if not _needs_pieces(x.dtype):
        return _multiply(padded, weights)[: len(x)]
    return in_pieces(padded, _PIECE_AMX, weights.weight.shape[0], lambda piece: _multiply(piece, weights))[: len(x)]


def _multiply(x: Tensor, weights: OneDnnWeight | DenseWeight) -> Tensor:
    if isinstance(weights, DenseWeight):
        return multiply_padded(x, weights.weight, weights.bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weights.weight, weights.bias, "none", [], "")
    return out
