"""Layers under the dotted names a checkpoint keeps them by, whatever the code calls them. Knows no family."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .basic import Embedding, Norm
from .linear import Linear


class Stored(Embedding):
    """A tensor that is no layer's weight: a class token, a table, a factor. Its path is its whole name."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.weight = torch.empty(*shape, dtype=dtype, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield path, self.weight


@dataclass(frozen=True)
class Maker:
    """Makes layers and hangs each into `root` under its name, with `prefix` before it.

    The code keeps what is returned in places that are no modules (a tuple, a plain object), so that it has one name only.
    """

    root: nn.Module
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""

    def below(self, prefix: str) -> Maker:
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def linear(self, names: Sequence[str], inner: int, outers: Sequence[int], bias: bool) -> Linear:
        """One product for slices that lie side by side in the checkpoint, as many as names: q, k and v, or gate and up."""
        slices = {name.rpartition(".")[2]: outer for name, outer in zip(names, outers, strict=True)}
        layer = Linear(inner, slices, bias, self.dtype, self.device)
        self._hang(names[0], layer)
        return layer

    def norm(self, name: str, width: int, eps: float, bias: bool, offset: float = 0.0) -> Norm:
        """RMSNorm, or LayerNorm when it has a bias."""
        layer = Norm(width, eps, bias, self.dtype, self.device, offset=offset)
        self._hang(name, layer)
        return layer

    def stored(self, name: str, *shape: int) -> Stored:
        tensor = Stored(shape, self.dtype, self.device)
        self._hang(name, tensor)
        return tensor

    def _hang(self, name: str, layer: nn.Module) -> None:
        *parents, last = f"{self.prefix}{name}".split(".")
        at = self.root
        for parent in parents:
            if parent not in at._modules:
                at.add_module(parent, nn.Module())
            at = at.get_submodule(parent)
        assert last not in at._modules, f"{self.prefix}{name} is there already"
        at.add_module(last, layer)
