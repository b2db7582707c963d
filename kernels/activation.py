"""Activation functions, alone and multiplied with a second half (`act_and_mul`), in torch, C++ and Triton.

In torch, an element at the end of a tensor or of a thread's share takes another code path and may differ in its last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .dispatch import backend
from .native import call


def relu2(x: Tensor) -> Tensor:
    """`relu(x) ** 2` (arXiv 2109.08668)."""
    return F.relu(x).square_()


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)`, CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU's tanh approximation (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
}
"""Activation functions by their names in config.json."""
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "relu2": relu2}
"""Activation functions that `activation` takes too, computed in torch everywhere. `act_and_mul` does not take them."""
CLAMPED_SWIGLU = "swigluoai"
"""Activation of gpt-oss in `act_and_mul`: `gate * sigmoid(1.702 gate) * (up + 1)`, with gate at most 7 and up in -7..7."""
_KERNEL_IDS = {name: number for number, name in enumerate((*REFERENCES, CLAMPED_SWIGLU))}  # enum of the C++ kernel


def activation(name: str, x: Tensor) -> Tensor:
    """Apply one of REFERENCES or UNGATED to each element."""
    if name in UNGATED:
        return UNGATED[name](x)
    chosen = backend("activation", x.device, x.dtype)
    if chosen == "triton" and x.is_contiguous():
        from .gpu import activation

        return activation.activation(name, x)
    if chosen != "native" or not x.is_contiguous():
        return REFERENCES[name](x)
    out = torch.empty_like(x)
    call("activation", x.dtype, _KERNEL_IDS[name], x, out, x.numel())
    return out


def act_and_mul_reference(name: str, x: Tensor) -> Tensor:
    """Compute `activation(gate) * up` of `x [rows, gate | up]`, rounded to x's dtype in between, as published models do."""
    gate, up = x.chunk(2, -1)
    if name == CLAMPED_SWIGLU:
        gate = gate.clamp(max=7)
        gate = (gate * 1.702).sigmoid_().mul_(gate)
        return up.clamp(-7, 7).add_(1).mul_(gate)
    return REFERENCES[name](gate).mul_(up)


def act_and_mul(name: str, x: Tensor) -> Tensor:
    """Compute `activation(gate) * up` of `x [rows, gate | up]` -> `[rows, inner]`. `name`: in REFERENCES, or CLAMPED_SWIGLU."""
    chosen = backend("act_and_mul", x.device, x.dtype)
    if chosen == "triton" and x.stride(1) == 1:
        from .gpu import activation

        return activation.act_and_mul(name, x)
    if chosen != "native" or not x.is_contiguous():
        return act_and_mul_reference(name, x)
    out = torch.empty((x.shape[0], x.shape[1] // 2), dtype=x.dtype)
    call("gated", x.dtype, _KERNEL_IDS[name], x, out, x.shape[0], out.shape[1])
    return out
