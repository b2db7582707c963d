"""Activations, plain and gated, as Triton kernels. Knows no weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tune


@triton.jit
def activate(x, NAME: tl.constexpr, KIND: tl.constexpr):
    """`activation.REFERENCES[NAME]` of float32 numbers that came as KIND, rounded to KIND wherever the reference rounds."""
    if NAME == "silu":
        made = x * tl.sigmoid(x)
    elif NAME == "gelu":
        made = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "quick_gelu":
        made = x * tl.sigmoid((1.702 * x).to(KIND).to(tl.float32)).to(KIND).to(tl.float32)
    else:
        tl.static_assert(NAME == "gelu_pytorch_tanh")  # (1 + tanh(u)) / 2 is sigmoid(2 u)
        made = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return made.to(KIND)


@triton.jit
def _activation_kernel(x_ptr, out_ptr, numbers, NAME: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numbers).to(tl.float32)
    tl.store(out_ptr + at, activate(x, NAME, out_ptr.dtype.element_ty), mask=at < numbers)


@triton.jit
def _gated_kernel(x_ptr, out_ptr, ROW: tl.constexpr, INNER: tl.constexpr, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """ROW numbers lie between rows; widths are known, so that a thread reads as many numbers at once as they allow."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < INNER
    kind = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * ROW + column, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * ROW + INNER + column, mask=mask).to(tl.float32)
    out = activate(gate, NAME, kind).to(tl.float32) * up
    tl.store(out_ptr + row * INNER + column, out.to(kind), mask=mask)


def activation(name: str, x: Tensor) -> Tensor:
    """As `activation.activation`; x contiguous."""
    out = torch.empty_like(x)
    config = tune.launch("activation")
    if x.numel():
        _activation_kernel[(triton.cdiv(x.numel(), config["BLOCK"]),)](x, out, x.numel(), NAME=name, **config)
    return out


def gated(name: str, x: Tensor) -> Tensor:
    """As `activation.gated`; the numbers of a row end to end."""
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    config = tune.launch("activation")
    if out.numel():
        _gated_kernel[(rows, triton.cdiv(inner, config["BLOCK"]))](x, out, ROW=x.stride(0), INNER=inner, NAME=name, **config)
    return out
