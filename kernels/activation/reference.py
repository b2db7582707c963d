"""Activation functions, alone and multiplied with a second half, in torch.

In torch, an element at the end of a tensor or of a thread's share takes another code path and may differ in its last bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


def relu2(x: Tensor) -> Tensor:
    """`relu(x) ** 2` (arXiv 2109.08668)."""
    return F.relu(x).square_()


def quick_gelu(x: Tensor) -> Tensor:
    """`x * sigmoid(1.702 x)`, CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: Tensor) -> Tensor:
    """GELU's tanh approximation (arXiv 1606.08415)."""
    return F.gelu(x, approximate="tanh")


def laplace(x: Tensor) -> Tensor:
    """The Laplace function of MEGA (arXiv 2209.10655)."""
    return ((x - 0.707107) / (0.282095 * math.sqrt(2.0))).erf().add_(1).mul_(0.5)


def _float64_numbers(device: torch.device) -> int:
    """Return how many numbers are computed at a time: in the cache of a core, or in few kernel launches on a GPU."""
    return 1 << 14 if device.type == "cpu" else 1 << 21


def _in_float64(curve: Callable[[Tensor], Tensor], shrinks: int = 1) -> Callable[[Tensor], Tensor]:
    """Return `curve`, computed in float64 and rounded, so that an element's bits do not depend on its place in the tensor.

    `shrinks`: the results of `curve` are narrower than its rows by this factor.
    """

    def computed(x: Tensor) -> Tensor:
        out = torch.empty((*x.shape[:-1], x.shape[-1] // shrinks), dtype=x.dtype, device=x.device)
        rows = max(1, _float64_numbers(x.device) // max(1, x.shape[-1]))
        for part, result in zip(x.split(rows), out.split(rows), strict=True):
            result.copy_(curve(part.double()))
        return out

    return computed


REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "quick_gelu": quick_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
}
"""Activation functions by their names in config.json."""
IN_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": relu2,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "linear": torch.clone,
    "gelu_10": _in_float64(lambda x: F.gelu(x).clamp_(-10, 10)),
    "hardswish": _in_float64(F.hardswish),
    "laplace": _in_float64(laplace),
    "mish": _in_float64(F.mish),
    "sigmoid": _in_float64(torch.sigmoid),
    "softplus": _in_float64(F.softplus),
    "sqrtsoftplus": _in_float64(lambda x: F.softplus(x).sqrt_()),
    "tanh": _in_float64(torch.tanh),
}
"""More activation functions of transformers, which are computed in torch on every device."""
CLAMPED_SWIGLU = "swigluoai"
"""Activation of gpt-oss in `act_and_mul`: `gate * sigmoid(1.702 gate) * (up + 1)`, with gate at most 7 and up in -7..7."""


def clamped_swiglu(alpha: float, limit: float) -> str:
    """Return the name in `act_and_mul` of CLAMPED_SWIGLU with these numbers in place of 1.702 and 7."""
    return CLAMPED_SWIGLU if (alpha, limit) == (1.702, 7.0) else f"{CLAMPED_SWIGLU} {alpha} {limit}"


_LIMITED_SILU = "limited_silu"


def limited_silu(limit: float) -> str:
    """Return the name in `act_and_mul` of `min(silu(gate), limit) * clamp(up, -limit, limit)`."""
    return f"{_LIMITED_SILU} {limit}"


def limit_of_silu(name: str) -> float | None:
    """Return the limit in a name of `limited_silu`; None for other activations."""
    return float(name.split()[1]) if name.startswith(_LIMITED_SILU) else None


@functools.cache
def largest_gate(limit: float, dtype: torch.dtype) -> float:
    """Return the largest number of a dtype whose silu, rounded to this dtype, is at most `limit`, which is positive.

    Clamping the gate to it gives `min(silu(gate), limit)`, because silu grows from -1.28 on, and is negative before.
    """
    gate = limit
    for _ in range(100):
        gate = limit * (1 + math.exp(-gate))  # silu(gate) is gate / (1 + exp(-gate))
    steps = torch.arange(-4, 5, dtype=torch.float64) * torch.finfo(dtype).eps
    near = (gate * (1 + steps)).to(dtype)
    return float(near[F.silu(near.double()).to(dtype).double() <= limit].max())


def clamps_up(name: str) -> bool:
    """Return True if `act_and_mul` clamps `up`, so that scaling `up` does not scale the result."""
    return name.startswith((CLAMPED_SWIGLU, _LIMITED_SILU))


def is_in_torch(name: str) -> bool:
    """Return True if an activation is computed in torch on every device: kernels have REFERENCES and CLAMPED_SWIGLU alone."""
    return name in IN_TORCH or name.startswith((f"{CLAMPED_SWIGLU} ", _LIMITED_SILU))


def activation(name: str, x: Tensor) -> Tensor:
    """Compute `activation.activation`."""
    return (REFERENCES.get(name) or IN_TORCH[name])(x)


def act_and_mul(name: str, x: Tensor) -> Tensor:
    """Compute `activation(gate) * up` of `x [rows, gate | up]`, rounded to x's dtype in between, as published models do."""
    gate, up = x.chunk(2, -1)
    name, *numbers = name.split()
    if numbers:
        alpha, limit = map(float, numbers)
        return _in_float64(partial(_clamped_swiglu, alpha, limit), shrinks=2)(x)
    if name == CLAMPED_SWIGLU:
        gate = gate.clamp(max=7)
        gate = (gate * 1.702).sigmoid_().mul_(gate)
        return up.clamp(-7, 7).add_(1).mul_(gate)
    return (REFERENCES.get(name) or IN_TORCH[name])(gate).mul_(up)


def _clamped_swiglu(alpha: float, limit: float, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return up.clamp(-limit, limit).add_(1).mul_((gate * alpha).sigmoid_().mul_(gate))
