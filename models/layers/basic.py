"""Norms, activations and the embedding table: layers with weights but no choice of slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.activation import REFERENCES, activation
from ...kernels.norm import layer_norm, rms_norm

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {name: partial(activation, name) for name in REFERENCES}


class Norm(nn.Module):
    """RMSNorm, or LayerNorm when it has a bias. `[..., dim]`."""

    def __init__(self, dim: int, eps: float, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.empty(dim, dtype=dtype, device=device)
        self.bias = torch.empty(dim, dtype=dtype, device=device) if bias else None

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.weight", self.weight
        if self.bias is not None:
            yield f"{path}.bias", self.bias

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`add`: the output of the layer before, which is added to the residual stream `x` in place first."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, add)
        if add is not None:
            x += add
        return layer_norm(x, self.weight, self.bias, self.eps)


class Embedding(nn.Module):
    """Token id -> row. `[rows] -> [rows, dim]`."""

    def __init__(self, vocab: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.empty(vocab, dim, dtype=dtype, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.weight", self.weight

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)
