"""Activation functions in Triton, alone and multiplied with a second half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from . import reference


@triton.jit
def activate(x, NAME: tl.constexpr, KIND: tl.constexpr):
    """Apply `reference.REFERENCES[NAME]` to float32 values loaded as KIND, and round to KIND where the reference does."""
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
def gated(gate, up, NAME: tl.constexpr, KIND: tl.constexpr):
    """Compute `act_and_mul` of float32 values loaded as KIND, in float32."""
    if NAME == "swigluoai":
        made = activate(tl.minimum(gate, 7.0), "quick_gelu", KIND).to(tl.float32)
        made *= tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    else:  # code behind a return would be compiled, too
        made = activate(gate, NAME, KIND).to(tl.float32) * up
    return made


@triton.jit
def _activation_kernel(x_ptr, out_ptr, numbers, NAME: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < numbers).to(tl.float32)
    tl.store(out_ptr + at, activate(x, NAME, out_ptr.dtype.element_ty), mask=at < numbers)


@triton.jit
def _act_and_mul_kernel(x_ptr, out_ptr, ROW: tl.constexpr, INNER: tl.constexpr, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """x `[rows, 2 * INNER]` with row stride ROW, out `[rows, INNER]`; grid (rows, blocks of INNER).

    The widths are constants, so that loads are vectorised as far as they allow.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < INNER
    kind = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * ROW + column, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * ROW + INNER + column, mask=mask).to(tl.float32)
    tl.store(out_ptr + row * INNER + column, gated(gate, up, NAME, kind).to(kind), mask=mask)


def activation(name: str, x: Tensor) -> Tensor:
    """Compute `activation.activation`."""
    if not x.is_contiguous():
        return reference.activation(name, x)
    out = torch.empty_like(x)
    config = launch_config.get_config("activation")
    if x.numel():
        _activation_kernel[(triton.cdiv(x.numel(), config["BLOCK"]),)](x, out, x.numel(), NAME=name, **config)
    return out


def act_and_mul(name: str, x: Tensor) -> Tensor:
    """Compute `activation.act_and_mul`."""
    if x.stride(1) != 1:
        return reference.act_and_mul(name, x)
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    config = launch_config.get_config("activation")
    if out.numel():
        grid = (rows, triton.cdiv(inner, config["BLOCK"]))
        _act_and_mul_kernel[grid](x, out, ROW=x.stride(0), INNER=inner, NAME=name, **config)
    return out
