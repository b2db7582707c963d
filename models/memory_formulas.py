"""Shared pieces of the closed-form memory formulas, which stand beside the layers and encoders they describe.

All formulas are upper bounds of the bytes alive at once, without weights and caches. Tensors that torch frees before the peak
are not counted; tensors that a frame still names are. `s` is the size of a number in the model's dtype.
"""

from __future__ import annotations

import torch

from ..kernels.dispatch import backend, fused
from ..kernels.linear import computed_rows
from ..kernels.panels import PANEL_WIDTH
from .interface import StepLimits

FLOAT32 = 4  # bytes
SMALL = 2048  # lengths and bounds of a call, and what threads allocate in torch's norms


def float32_copy(s: int) -> int:
    """Bytes of the float32 copy of a number; a float32 is not copied."""
    return 0 if s == FLOAT32 else FLOAT32


def torch_rms_norm(width: int, s: int) -> int:
    """RMSNorm in torch: the float32 copy, then its square or the scaled copy, then the result."""
    return width * (float32_copy(s) + FLOAT32 + s)


def norm_bytes(width: int, rms: bool, dtype: torch.dtype, limits: StepLimits) -> int:
    """A row of an RMSNorm (in C++ its result alone), or of torch's LayerNorm, with mean and deviation."""
    if not rms:
        return width * dtype.itemsize + 2 * FLOAT32
    native = fused("rms_norm", limits.device, dtype)
    return width * dtype.itemsize if native else torch_rms_norm(width, dtype.itemsize)


def torch_rotary(width: int, s: int) -> int:
    """Rotation in torch: the float32 copy, one product of half of it, the result."""
    return width * (float32_copy(s) + FLOAT32 // 2 + s)


def linear_result(outer: int, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """A row of a linear layer's result. oneDNN and torch pad the number of rows, and padding lives as long as the result."""
    padded = rows if limits.int8 else computed_rows(rows, limits.device, dtype)
    return -(-padded * outer * dtype.itemsize // rows)


def linear_bytes(inner: int, outer: int, rows: int, dtype: torch.dtype, limits: StepLimits) -> int:
    """A row of a linear layer while it runs: its result, a copy of its input if rows are padded, and quantised input."""
    s, result = dtype.itemsize, linear_result(outer, rows, dtype, limits)
    if result > outer * s:
        return result + linear_result(inner, rows, dtype, limits)
    if not limits.int8:
        return outer * s
    if backend("int8_linear", limits.device, dtype) == "native":
        return outer * s + inner + 8  # 8-bit input and its scale
    # torch: scales and maxima; the scaled input and its 8-bit copy, or that copy and the int32 sums, twice
    return 64 + max(inner * (float32_copy(s) + FLOAT32 + 1), inner + outer * 2 * FLOAT32)


def torch_attention_tiles(rows: int, dim: int, dtype: torch.dtype) -> int:
    """What torch's CPU attention allocates per thread: scores of a tile of queries and 512 keys, and results."""
    queries = 32 if rows < 192 else 64 if rows < 768 else 256
    score = FLOAT32 + (0 if dtype == torch.float32 else dtype.itemsize)
    return torch.get_num_threads() * queries * (512 * score + (dim + 3) * FLOAT32)


def attention_copies(width: int, dtype: torch.dtype, device: torch.device) -> int:
    """A row of keys and values in the layout of torch's fp16/bf16 kernel; C++ converts a tile at a time."""
    native = fused("varlen_attention", device, dtype)
    return 0 if native or dtype == torch.float32 else 2 * width * dtype.itemsize


def packed_weight_bytes(inner: int, outer: int, bias: bool, dtype: torch.dtype, device: torch.device, int8: bool) -> int:
    """Bytes of a packed Linear. C++ pads the panels and adds a float32 bias; in 8 bits also a shift and a scale."""
    original = outer * bias * dtype.itemsize
    padded: int = -(-outer // PANEL_WIDTH) * PANEL_WIDTH
    if int8 and backend("int8_linear", device, dtype) == "native":
        return padded * (-(-inner // 4) * 4 + 3 * FLOAT32) + original
    if int8:
        return outer * (inner + FLOAT32) + original
    if backend("linear", device, dtype) == "native" and inner % 2 == 0:
        return padded * (inner * dtype.itemsize + FLOAT32) + original
    return outer * inner * dtype.itemsize + original
