"""Compute the ops in float64, independently of the references beside the kernels, and measure the distance of a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .record import Figure

HALF_LIMIT, SINGLE_LIMIT = 4.0, 200.0
"""Largest allowed error in units in the last place of a row's largest number, by dtype."""


def distance(found: Tensor, exact: Tensor) -> float:
    """Return the largest difference relative to its row's largest number, in units of `found`'s dtype; infinite if NaN."""
    near, far = found.double().flatten(0, -2), exact.double().flatten(0, -2)
    scale = far.abs().amax(-1).clamp_(min=far.abs().mean().item() * 1e-3 + 1e-30)
    worst = ((near - far).abs().amax(-1) / scale).max().item()
    return worst / torch.finfo(found.dtype).eps if worst == worst else float("inf")


def checked(name: str, found: Tensor, exact: Tensor, note: str = "") -> Figure:
    """Return the distance as a figure with its limit."""
    limit = SINGLE_LIMIT if found.dtype == torch.float32 else HALF_LIMIT
    kind = str(found.dtype).removeprefix("torch.")
    return Figure(f"{name}, {kind}", distance(found, exact), "eps", most=limit, note=note)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, soft_cap: float | None = None) -> Tensor:
    """`q [rows, heads, dim]`, `k, v [keys, kv_heads, dim]`, `seen` bool `[rows, keys]` -> `[rows, heads, dim]`."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh() * soft_cap
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x.double(), (x.shape[-1],), weight.double(), bias.double(), eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the two halves of each head."""
    a, b = x.double().chunk(2, -1)
    c, s = cos.double()[:, None], sin.double()[:, None]
    return torch.cat((a * c - b * s, b * c + a * s), -1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
}


def gated(name: str, x: Tensor) -> Tensor:
    gate, up = x.double().chunk(2, -1)
    return ACTIVATIONS[name](gate) * up


def mixture(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """`gate_up [experts, 2 * inner, dim]`, `down [experts, dim, inner]`, silu; each expert on the rows that chose it."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for number in range(len(gate_up)):
        row, place = (chosen == number).nonzero(as_tuple=True)
        if len(row):
            made = gated("silu", x[row].double() @ gate_up[number].double().T) @ down[number].double().T
            out.index_add_(0, row, made * weights[row, place, None].double())
    return out


def log_mel_energies(windows: Tensor, window: Tensor, filters: Tensor, least: float) -> Tensor:
    """`windows [n, samples]`, `filters [samples // 2 + 1, bands]`."""
    power = torch.fft.rfft(windows.double() * window.double()).abs().square()
    return (power @ filters.double()).clamp(min=least).log10()


def segments(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return bool `[rows, rows]`: True where both rows belong to one segment."""
    own = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    return own[:, None] == own[None]
