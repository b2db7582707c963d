"""Linear layers. Weights are packed once for the CPU and left as they are on other devices.

The C++ kernels read packed weights as one stream. On a Zen 4 core one row of float32 takes 0.4 times the time of oneDNN's
packed products, 16 rows take 0.8 times, and 1,024 rows take as long. On CPUs with AVX2 only, where torch has no bfloat16
products, C++ widens weights to float32 in registers.

On a CPU a row's result has the same bits whatever other rows are in the batch. Without the C++ kernels this needs rows of zeros
as padding: oneDNN sums in another order for a single row, so one row is padded to two (which takes as long); mkl.py says what
dense float32 weights need.

oneDNN also compiles code for every number of rows, about 1 MB each, and frees it slowly: 600 different batch sizes through
four float32 layers left 1.6 GB behind. Rows are therefore padded to 8 sizes per power of two: 0.27 GB, at the same speed.

With AMX, the order of oneDNN's sums of bfloat16 depends on the number of rows, so torch gets pieces of 32 rows there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend
from .fp8 import Fp8Weight, fp8_linear, pack_fp8
from .grouped import ShardedWeight, grouped_linear
from .int4 import Int4Options, Int4PanelWeight, int4_linear, pack_int4, quantize_int4
from .int8 import Int8Weight, int8_linear, pack_int8
from .mkl import PIECE_ROWS, in_pieces, multiplied_rows, multiply_padded, needs_pieces
from .panels import Panels, layout, multiply_panels, pack_panels

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


LinearWeight = Panels | OneDnnWeight | DenseWeight | Int8Weight | Fp8Weight | Int4PanelWeight | ShardedWeight


def pack(weight: Tensor, bias: Tensor | None, quantization: str | Int4Options | None = None) -> LinearWeight:
    """Pack `weight [out, in]` for its device, unquantised, in "int8" or "fp8", or in 4 bits. The caller drops the original.

    "float16" stores the weight of a float32 layer in float16 if that changes no value; otherwise it stays in float32.
    """
    if isinstance(quantization, Int4Options):
        return pack_int4([quantize_int4(weight, quantization)], bias, weight.dtype, quantization.int8_rows)
    if quantization == "int8":
        return pack_int8(weight, bias)
    if quantization == "fp8":
        return pack_fp8(weight, bias)
    if quantization == "float16" and keeps_float16(weight.device, weight.dtype):
        half = weight.half()
        if torch.equal(half.float(), weight):
            return pack_panels(half, bias)
    chosen = backend("linear", weight.device, weight.dtype)
    if chosen == "native" and weight.shape[1] % layout(weight.dtype).inputs == 0:
        return pack_panels(weight, bias)
    if chosen == "torch":
        return DenseWeight(weight, bias)
    return OneDnnWeight(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None), bias)


def keeps_float16(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether layers that compute in `dtype` can hold float16 weights, which the C++ kernels widen to float32."""
    usual = dtype == torch.float32 and backend("linear", device, dtype) != "torch"
    return usual and device.type == "cpu" and bool(layout(torch.float16).kernel)


def shares_table(inputs: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether token embeddings and a tied head can share panels, from which rows can be read."""
    return inputs % 2 == 0 and backend("linear", device, dtype) == "native"


def linear(x: Tensor, weights: LinearWeight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]`."""
    if isinstance(weights, Panels):
        return multiply_panels(x, weights)
    if isinstance(weights, Int8Weight):
        return int8_linear(x, weights)
    if isinstance(weights, Fp8Weight):
        return fp8_linear(x, weights)
    if isinstance(weights, Int4PanelWeight):
        return int4_linear(x, weights)
    if isinstance(weights, ShardedWeight):
        return grouped_linear(x, weights)
    if isinstance(weights, OneDnnWeight):
        return _linear_padded(x, _torch_rows(len(x), x.dtype, onednn=True), weights)
    if x.device.type == "cpu":
        return _linear_padded(x, _torch_rows(len(x), x.dtype, onednn=False), weights)
    return F.linear(x, weights.weight, weights.bias)


def computed_rows(rows: int, device: torch.device, dtype: torch.dtype) -> int:
    """Return the number of rows of results that `linear` holds for an input of `rows` rows, with padding and a piece."""
    chosen = backend("linear", device, dtype)
    if chosen == "native" or device.type != "cpu":
        return rows
    found = _torch_rows(rows, dtype, onednn=chosen == "onednn")
    piece = _PIECE_AMX if _needs_pieces(dtype) else PIECE_ROWS if chosen == "torch" and needs_pieces() else found
    return found + piece if found > piece else found


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
