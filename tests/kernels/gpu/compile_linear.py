"""Launches of 8-bit products at the shapes of a 7B decoder."""

from __future__ import annotations

import torch
from sensorium.kernels.gpu import linear, tune

HOT = {"_quantize_kernel", "_linear_kernel", "_sum_kernel"}


def launches() -> None:
    for inner, outer in ((3584, 4608), (18944, 3584)):
        scale, bias = torch.empty(outer), torch.empty(outer, dtype=torch.bfloat16)
        for rows in (1, 64, 4096):
            x = torch.empty(rows, inner, dtype=torch.bfloat16)
            eight, x_scale = linear.quantize_rows(x)
            linear.multiply(eight, x_scale, torch.empty(outer, inner, dtype=torch.int8), scale, bias, x.dtype)
            for kind in (torch.int8, torch.uint8):
                linear.multiply(x, None, torch.empty(outer, inner, dtype=kind), scale, None, x.dtype)
            if tune.card().arch not in ("sm_80", "gfx942"):  # which have no products of floats in 8 bits
                weight = torch.empty(outer, inner, dtype=torch.float8_e4m3fn)
                linear.multiply(eight.view(weight.dtype), x_scale, weight, scale, None, x.dtype)
