"""Shared pieces of the closed-form memory formulas, which stand beside the layers and encoders they describe.

All formulas are upper bounds of the bytes alive at once, without weights and caches. Tensors that torch frees before the peak
are not counted; those that a Python frame still names are. In the formulas, `s` is the size of a number in the model's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels import bodies
from ..kernels.dispatch import backend, fused
from ..kernels.linear import keeps_float16
from ..kernels.linear.dense import computed_rows
from ..kernels.linear.grouped import PANEL_BYTES, panel_rows
from ..kernels.linear.int4 import Int4Options, int4_bytes
from ..kernels.linear.mkl import PIECE_ROWS, multiplied_rows, needs_pieces
from ..kernels.linear.panels import layout
from .interface import StepLimits

FLOAT32 = 4  # bytes
AMX_ROWS, AMX_SUMS = 16 << 20, 1 << 20  # bytes: PACKED_BYTES of kernels/cpu/amx.h; sums, weights and a row of a thread
SMALL = 2048  # lengths and bounds of a call, and what threads allocate in torch's norms


@dataclass(frozen=True)
class OpBytes:
    """Bytes per row that an operation allocates, for a model in `dtype` on the device of `limits`."""

    dtype: torch.dtype
    limits: StepLimits

    def fused(self, op: str) -> bool:
        return fused(op, self.limits.device, self.dtype)

    @property
    def float32_copy(self) -> int:
        """Bytes of the float32 copy of a number; a float32 is not copied."""
        return 0 if self.dtype == torch.float32 else FLOAT32

    def torch_rms_norm(self, width: int) -> int:
        """Return the bytes of RMSNorm in torch: the float32 copy, then its square or the scaled copy, then the result."""
        return width * (self.float32_copy + FLOAT32 + self.dtype.itemsize)

    def norm(self, width: int, rms: bool) -> int:
        """Return the bytes of RMSNorm (in C++ its result alone), or of torch's LayerNorm with mean and deviation."""
        if not rms:
            return width * self.dtype.itemsize + 2 * FLOAT32
        return width * self.dtype.itemsize if self.fused("rms_norm") else self.torch_rms_norm(width)

    def torch_rotary(self, width: int) -> int:
        """Return the bytes of rotation in torch: the float32 copy, one product of half of it, the result."""
        return width * (self.float32_copy + FLOAT32 // 2 + self.dtype.itemsize)

    def linear_result(self, outer: int, rows: int) -> int:
        """Return the bytes of a linear layer's result, which include rows that oneDNN and torch pad."""
        every = self.limits.int8 and not self.limits.dequantized
        padded = rows if every else computed_rows(rows, self.limits.device, self.dtype)
        return -(-padded * outer * self.dtype.itemsize // rows)

    def linear(self, inner: int, outer: int, rows: int) -> int:
        """Return the bytes of a running linear layer: result, a copy of the input if rows are padded, quantised input.

        If the weights of some layers are dequantised by panels, return the larger of both ways.
        """
        largest = self._int8_linear(inner, outer) if self.limits.int8 else 0
        if self.limits.dequantized or not self.limits.int8:
            largest = max(largest, self._linear(inner, outer, rows))
        return max(largest, self._dequantized_linear(inner, outer, rows)) if self.limits.dequantized else largest

    def _dequantized_linear(self, inner: int, outer: int, rows: int) -> int:
        """Return the bytes of `kernels.linear.grouped_linear`: result, input in float32 twice, a panel and its result."""
        each = min(outer, panel_rows(inner))
        multiplied = multiplied_rows(rows)
        panel = (
            multiplied * each * FLOAT32 + (PIECE_ROWS * each * FLOAT32 if needs_pieces() else 0) + each * inner * PANEL_BYTES
        )
        return outer * self.dtype.itemsize + inner * FLOAT32 - (-(multiplied * inner * FLOAT32 + panel) // rows)

    def _linear(self, inner: int, outer: int, rows: int) -> int:
        s, result = self.dtype.itemsize, self.linear_result(outer, rows)
        return result + self.linear_result(inner, rows) if result > outer * s else outer * s

    def _int8_linear(self, inner: int, outer: int) -> int:
        s = self.dtype.itemsize
        if backend("int8_linear", self.limits.device, self.dtype) == "native":
            return outer * s + (
                inner * scratch + 8 if (scratch := layout(torch.int8).scratch) else 0
            )  # 8-bit input and its scale
        # torch: scales and maxima; the scaled input and its 8-bit copy, or that copy and the int32 sums, twice
        return 64 + max(inner * (self.float32_copy + FLOAT32 + 1), inner + outer * 2 * FLOAT32)

    def mlp(self, width: int, wide: int, inner: int, rows: int, out: int | None = None) -> int:
        """Return the bytes of two linear layers around an activation that turns `wide` numbers into `inner`.

        `out`: width of the result; None: that of the input.
        """
        activated = inner * self.dtype.itemsize
        return max(
            self.linear(width, wide, rows),
            self.linear_result(wide, rows) + activated,
            activated + self.linear(inner, out or width, rows),
        )

    def torch_attention_tiles(self, rows: int, dim: int, keys: int = 512) -> int:
        """Return the bytes (in all, not per row) of torch's CPU attention: results and scores of a tile for each thread.

        `keys`: of the shortest item; a tile has at most 512.
        """
        queries = 32 if rows < 192 else 64 if rows < 768 else 256
        score = FLOAT32 + (0 if self.dtype == torch.float32 else self.dtype.itemsize)
        return torch.get_num_threads() * queries * (min(keys, 512) * score + (dim + 3) * FLOAT32)

    def attention_copies(self, width: int) -> int:
        """Return the bytes of the keys and values that torch's fp16/bf16 kernel copies; C++ converts tile by tile."""
        return 0 if self.fused("varlen_attention") or self.dtype == torch.float32 else 2 * width * self.dtype.itemsize


def amx_bytes(callers: int, int4: bool) -> int:
    """Return the bytes that linear layers with AMX tiles keep between calls; 0 if the CPU has none.

    A thread that calls them keeps the rows that it packed last, and each of their threads sums and a converted row. Layers with
    4-bit weights have buffers of their own.

    Args:
        callers: threads that run steps or encoder calls.
        int4: some layers have 4-bit weights.
    """
    if not bodies.uses_tiles():
        return 0
    return (1 + int4) * (callers * AMX_ROWS + torch.get_num_threads() * AMX_SUMS)


def panel_bytes(inner: int, outer: int, dtype: torch.dtype) -> int:
    """Return the bytes of a weight in panels, with a float32 bias."""
    width = layout(dtype).width
    return -(-outer // width) * width * (inner * dtype.itemsize + FLOAT32)


def packed_weight_bytes(
    inner: int,
    outer: int,
    bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str | Int4Options | None = None,
) -> int:
    """Return the bytes of a packed Linear. C++ pads panels and adds a float32 bias, with int8 also scale and shift."""
    if isinstance(quantization, Int4Options):
        return int4_bytes(inner, outer, dtype, device, quantization) + outer * bias * dtype.itemsize
    if quantization == "float16" and keeps_float16(device, dtype):
        return panel_bytes(inner, outer, torch.float16) + outer * bias * dtype.itemsize
    int8 = quantization == "int8"
    original, panels = outer * bias * dtype.itemsize, layout(torch.int8 if int8 else dtype)
    padded: int = -(-outer // panels.width) * panels.width
    if int8 and backend("int8_linear", device, dtype) == "native":
        return padded * (-(-inner // panels.inputs) * panels.inputs + (2 + panels.shifted) * FLOAT32) + original
    if quantization in ("int8", "fp8"):
        return outer * (inner + FLOAT32) + original
    if backend("linear", device, dtype) == "native" and inner % panels.inputs == 0:
        return panel_bytes(inner, outer, dtype) + original
    return outer * inner * dtype.itemsize + original
