"""Activation functions, alone and multiplied with a second half (`act_and_mul`)."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import implementation
from . import reference
from .reference import IN_TORCH, is_in_torch, largest_gate, limit_of_silu


def activation(name: str, x: Tensor) -> Tensor:
    """Apply one of `reference.REFERENCES` or `reference.IN_TORCH` to each element."""
    if name in IN_TORCH:
        return IN_TORCH[name](x)
    result: Tensor = implementation("activation", x.device, x.dtype).activation(name, x)
    return result


def act_and_mul(name: str, x: Tensor) -> Tensor:
    """Compute `activation(gate) * up` of `x [rows, gate | up]` -> `[rows, inner]`.

    `name`: in REFERENCES or IN_TORCH, or CLAMPED_SWIGLU, of `reference`, or a result of its `clamped_swiglu` or `limited_silu`.
    With `limited_silu`, x is overwritten.
    """
    limit = limit_of_silu(name)
    if limit is not None:
        gate, up = x.chunk(2, -1)
        gate.clamp_(max=largest_gate(limit, x.dtype))
        up.clamp_(-limit, limit)
        name = "silu"
    if is_in_torch(name):
        return reference.act_and_mul(name, x)
    result: Tensor = implementation("act_and_mul", x.device, x.dtype).act_and_mul(name, x)
    return result
