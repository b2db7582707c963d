"""Launches of the activations at the shapes of decoders and towers."""

from __future__ import annotations

import torch
from sensorium.kernels.activation import triton as activation
from sensorium.kernels.activation.reference import CLAMPED_SWIGLU, REFERENCES

HOT = {"_activation_kernel", "_act_and_mul_kernel"}


def launches() -> None:
    for name in REFERENCES:
        for dtype in (torch.bfloat16, torch.float32) if name == "silu" else (torch.bfloat16,):
            activation.activation(name, torch.empty(1024, 4304, dtype=dtype))
            activation.act_and_mul(name, torch.empty(64, 2 * 18944, dtype=dtype))
    activation.act_and_mul(CLAMPED_SWIGLU, torch.empty(64, 2 * 2880, dtype=torch.bfloat16))
    activation.act_and_mul("silu", torch.empty(64, 2 * 3420, dtype=torch.float16))
