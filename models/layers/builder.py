"""Creates layers under the dotted names they have in a checkpoint, independent of the attribute names in code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .basic import Norm, WeightedLayer
from .linear import Linear
from .ranks import Rows


class StoredTensor(WeightedLayer):
    """A bare tensor of a checkpoint: a class token, a table, a factor. Its name is the module's path, without `.weight`.

    `rows`: those of the stored tensor that this rank holds, `shape[0]` of them; None: all.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, rows: Rows | None = None) -> None:
        super().__init__()
        self.rows = rows
        self.weight = torch.empty(tuple(shape), dtype=dtype, device=device)

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield path, self.weight

    def held_part(self, name: str, stored: Tensor) -> Tensor:
        return stored if self.rows is None else self.rows.of(stored)


@dataclass(frozen=True)
class Builder:
    """Creates layers and registers each in `root` under `prefix` + name.

    Callers keep the returned layers in plain containers (tuples, lists, objects that are not modules), so that each layer is
    registered under its checkpoint name only.
    """

    root: nn.Module
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""

    def scope(self, prefix: str) -> Builder:
        """Return a builder for names below `prefix.`."""
        return replace(self, prefix=f"{self.prefix}{prefix}.")

    def linear(self, names: Sequence[str], inner: int, outers: Sequence[int], bias: bool) -> Linear:
        """Build one Linear with a shard per name (q, k and v, or gate and up), which are siblings in the checkpoint."""
        shards = {name.rpartition(".")[2]: outer for name, outer in zip(names, outers, strict=True)}
        layer = Linear(inner, shards, bias, self.dtype, self.device)
        self._register(names[0], layer)
        return layer

    def norm(self, name: str, width: int, eps: float, bias: bool, offset: float = 0.0) -> Norm:
        """Build an RMSNorm, or a LayerNorm if it has a bias."""
        layer = Norm(width, eps, bias, self.dtype, self.device, offset=offset)
        self._register(name, layer)
        return layer

    def stored(self, name: str, *shape: int) -> StoredTensor:
        tensor = StoredTensor(shape, self.dtype, self.device)
        self._register(name, tensor)
        return tensor

    def _register(self, name: str, layer: nn.Module) -> None:
        *parents, last = f"{self.prefix}{name}".split(".")
        module = self.root
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        assert last not in module._modules, f"{self.prefix}{name} is registered already"
        module.add_module(last, layer)
