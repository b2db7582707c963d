"""Activation functions in C++, alone and multiplied with a second half; strided tensors are computed in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import call
from . import reference
from .reference import CLAMPED_SWIGLU, REFERENCES

_KERNEL_IDS = {name: number for number, name in enumerate((*REFERENCES, CLAMPED_SWIGLU))}  # enum of the C++ kernel


def activation(name: str, x: Tensor) -> Tensor:
    """Compute `activation.activation` of one of REFERENCES."""
    if not x.is_contiguous():
        return reference.activation(name, x)
    out = torch.empty_like(x)
    call("activation", x.dtype, _KERNEL_IDS[name], x, out, x.numel())
    return out


def act_and_mul(name: str, x: Tensor) -> Tensor:
    """Compute `activation.act_and_mul` with one of REFERENCES or CLAMPED_SWIGLU."""
    if not x.is_contiguous():
        return reference.act_and_mul(name, x)
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
    call("gated", x.dtype, _KERNEL_IDS[name], x, out, x.shape[0], out.shape[1])
    return out
