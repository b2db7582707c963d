"""Rotary embedding in C++; heads that are not contiguous are rotated in torch."""

from __future__ import annotations

from torch import Tensor

from ..native import call
from . import reference


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
    """Compute `rope.rotate_`."""
    n, heads, dim = x.shape
    if x.stride(2) != 1:
        reference.rotate_(x, cos, sin, interleaved)
        return
    strides = (x.stride(0), x.stride(1))
    call("rotate", x.dtype, x, *strides, cos.contiguous(), sin.contiguous(), n, heads, dim // 2, int(interleaved))
