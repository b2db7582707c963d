"""Launches of 4-bit products at the shapes of a 7B decoder."""

from __future__ import annotations

import torch
from sensorium.kernels.linear.grouped import GroupedWeight
from sensorium.kernels.linear.triton import int4

HOT = {"_int4_kernel"}


def launches() -> None:
    for inner, outer in ((3584, 4608), (18944, 3584)):
        for group, symmetric in ((128, True), (64, False), (32, True)):
            codes = torch.empty(outer, inner // 2, dtype=torch.uint8)
            scale = torch.empty(outer, inner // group, dtype=torch.bfloat16)
            zero = None if symmetric else torch.empty(scale.shape, dtype=torch.uint8)
            weight = GroupedWeight(codes, scale, group, inner, packed=True, offset=8 * symmetric, zero=zero)
            for rows in (1, 64, 4096):
                x = torch.empty(rows, inner, dtype=torch.bfloat16)
                int4.int4_linear(x, weight, None, torch.empty(rows, outer, dtype=torch.bfloat16))
