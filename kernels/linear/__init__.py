"""Linear layers. Weights are packed once for the CPU and left as they are on other devices.

The C++ kernels read packed weights as one stream. On a Zen 4 core one row of float32 takes 0.4 times the time of oneDNN's
packed products, 16 rows take 0.8 times, and 1,024 rows take as long. On CPUs with AVX2 only, where torch has no bfloat16
products, C++ widens weights to float32 in registers.

On a CPU a row's result has the same bits whatever other rows are in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch import backend
from .dense import DenseWeight, OneDnnWeight, multiply_dense, multiply_onednn, pack_onednn
from .eight_bit import Fp8Weight, Int8Weight
from .fp8 import fp8_linear, pack_fp8
from .grouped import ShardedWeight
from .grouped_linear import grouped_linear
from .groups import GroupPanelWeight, group_linear, pack_groups
from .int4 import Int4Options, quantize_int4
from .int8 import int8_linear, pack_int8
from .panels import Panels, layout, multiply_panels, pack_panels

LinearWeight = Panels | OneDnnWeight | DenseWeight | Int8Weight | Fp8Weight | GroupPanelWeight | ShardedWeight
_PRODUCTS: Mapping[type[LinearWeight], Callable[[Tensor, Any], Tensor]] = {
    Panels: multiply_panels,
    OneDnnWeight: multiply_onednn,
    DenseWeight: multiply_dense,
    Int8Weight: int8_linear,
    Fp8Weight: fp8_linear,
    GroupPanelWeight: group_linear,
    ShardedWeight: grouped_linear,
}
"""Packed weight -> function that multiplies with it."""


def pack(weight: Tensor, bias: Tensor | None, quantization: str | Int4Options | None = None) -> LinearWeight:
    """Pack `weight [out, in]` for its device, unquantised, in "int8" or "fp8", or in 4 bits. The caller drops the original.

    "float16" stores the weight of a float32 layer in float16 if that changes no value; otherwise it stays in float32.
    """
    if isinstance(quantization, Int4Options):
        return pack_groups([quantize_int4(weight, quantization)], bias, weight.dtype, quantization.int8_rows)
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
    return pack_onednn(weight, bias)


def keeps_float16(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether layers that compute in `dtype` can hold float16 weights, which the C++ kernels widen to float32."""
    usual = dtype == torch.float32 and backend("linear", device, dtype) != "torch"
    return usual and device.type == "cpu" and bool(layout(torch.float16).kernel)


def shares_table(inputs: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether token embeddings and a tied head can share panels, from which rows can be read."""
    return inputs % 2 == 0 and backend("linear", device, dtype) == "native"


def without_bias(weights: LinearWeight) -> LinearWeight:
    """Return the same packed weight without a bias; the memory of the weight is shared."""
    if isinstance(weights, Panels):
        return replace(weights, bias=torch.zeros_like(weights.bias))
    if isinstance(weights, GroupPanelWeight):
        panels = [replace(panel, bias=torch.zeros_like(panel.bias)) for panel in weights.panels]
        return replace(weights, panels=panels)
    return replace(weights, bias=None)


def linear(x: Tensor, weights: LinearWeight) -> Tensor:
    """Compute `x [rows, in]` -> `[rows, out]`."""
    return _PRODUCTS[type(weights)](x, weights)
