"""Norms, activations and the embedding table: layers with weights but no choice of slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.norm import layer_norm, norm_heads_, rms_norm

Form = Callable[[Tensor], Iterable[tuple[str, Tensor]]]
"""A stored tensor -> the canonical names of what it holds, and each part."""


class Weighted(nn.Module):
    """A layer that is filled from a checkpoint."""

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """Canonical names of its own tensors, and what they fill; `path`: of this module, from the root."""
        yield from ()

    def forms(self, path: str) -> Iterator[tuple[str, Form]]:
        """Names under which checkpoints store some of them in another way, and how to read it."""
        yield from ()

    def pack(self) -> None:
        """Once they are filled: lay them out for their device."""

    def filled(self) -> None:
        """Once all of the model is filled and packed."""


class Norm(Weighted):
    """RMSNorm, or LayerNorm when it has a bias. `[..., dim]`.

    `offset` is added to an RMSNorm's weight, where a checkpoint stores it around 0. `stored`: the name in the checkpoint in
    place of the module's own last name part.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        offset: float = 0.0,
        stored: str | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.offset, self.stored = eps, offset, stored
        self.weight = torch.empty(dim, dtype=dtype, device=device)
        self.bias = torch.empty(dim, dtype=dtype, device=device) if bias else None

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        if self.stored is not None:
            path = path[: path.rfind(".") + 1] + self.stored
        yield f"{path}.weight", self.weight
        if self.bias is not None:
            yield f"{path}.bias", self.bias

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """`add`: the output of the layer before, which is added to the residual stream `x` in place first."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, add, self.offset)
        return layer_norm(x, self.weight, self.bias, self.eps, add)

    def heads_(self, x: Tensor) -> None:
        """RMSNorm of every head of `x [rows, heads, dim]` in place; x may be a part of longer rows."""
        norm_heads_(x, self.weight, self.eps, self.offset)


class Scale(nn.Module):
    """`x` times a number, in place."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.factor)


class Embedding(Weighted):
    """Token id -> row times `scale`. `[rows] -> [rows, dim]`."""

    def __init__(self, vocab: int, dim: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = float(torch.tensor(scale, dtype=dtype))  # rounded as the published models do
        self.weight = torch.empty(vocab, dim, dtype=dtype, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.weight", self.weight

    def forward(self, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)
