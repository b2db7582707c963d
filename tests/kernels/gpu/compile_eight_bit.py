"""Launches of 8-bit products at the shapes of a 7B decoder."""

from __future__ import annotations

import torch
from sensorium.kernels.linear.eight_bit import Fp8Weight, Int8Weight
from sensorium.kernels.linear.triton import eight_bit as linear

HOT = {"_quantize_kernel", "_linear_kernel", "_sum_kernel"}


def launches() -> None:
    for inner, outer in ((3584, 4608), (18944, 3584)):
        scale, bias = torch.empty(outer), torch.empty(outer, dtype=torch.bfloat16)
        whole = torch.empty(outer, inner, dtype=torch.int8)
        floats = whole.view(torch.float8_e4m3fn)
        for rows in (1, 64, 4096):
            x = torch.empty(rows, inner, dtype=torch.bfloat16)
            linear.int8_linear(x, Int8Weight(whole, scale, bias))
            linear.fp8_linear(x, Fp8Weight(floats, scale, None))  # GPUs without fp8 products quantise the weights only
            linear.scaled_mm(x, None, whole, scale, bias, x.dtype)
            linear.scaled_mm(x, None, floats.view(torch.uint8), scale, None, x.dtype)
