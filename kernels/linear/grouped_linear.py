"""Linear layers with weights of published quantised checkpoints: codes with one scale per block.

A matmul dequantises a panel of outputs at a time, in float32, so a wide copy of the weight never exists. Activations are not
quantised. A row's result has the same bits in every batch on a CPU, for the reason given in mkl.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend
from .grouped import QuantizedWeight, ShardedWeight, panel_rows
from .int8 import quantize_rows
from .mkl import multiply_padded, pad_rows


def grouped_linear(x: Tensor, weights: ShardedWeight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]` in x's dtype. On a CPU sums are in float32 and rounded once.

    On a GPU with Triton, 4-bit integers are dequantised inside the matmul.
    """
    rows, start = len(x), 0
    out = x.new_empty(rows, sum(len(shard.codes) for shard in weights.shards))
    if weights.int8_rows:
        codes, scale = quantize_rows(x)
        x = codes.float().mul_(scale).to(x.dtype if x.is_cuda else torch.float32)
    unpadded, in_triton = x, backend("int4_linear", x.device, out.dtype) == "triton"
    if x.device.type == "cpu":
        x = pad_rows(x.float())
    for shard in weights.shards:
        outputs, each = len(shard.codes), panel_rows(shard.inputs)
        if in_triton and (fused := _triton_kernel(shard)) is not None:
            bias = None if weights.bias is None else weights.bias[start : start + outputs]
            fused(unpadded, shard, bias, out[:, start : start + outputs])
            start += outputs
            continue
        for first in range(0, outputs, each):
            last = min(first + each, outputs)
            part = slice(start + first, start + last)
            bias = None if weights.bias is None else weights.bias[part].to(x.dtype)
            out[:, part] = multiply_padded(x, shard.dequantize(first, last).to(x.dtype), bias)[:rows]
        start += outputs
    return out


def _triton_kernel(weight: QuantizedWeight) -> Callable[[Tensor, Any, Tensor | None, Tensor], None] | None:
    """Return the Triton kernel that multiplies with this weight, or None."""
    from .triton import int4

    return int4.int4_linear if int4.supports(weight) else None
