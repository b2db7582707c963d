"""Base classes of layers, norms and the embedding table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...kernels.linear import keeps_float16, shares_table
from ...kernels.linear.panels import Panels, pack_panels, read_panel_rows
from ...kernels.norm import layer_norm, norm_heads_, rms_norm

if TYPE_CHECKING:
    from .row_adapter import AdapterSlot

Converter = Callable[[Tensor], Iterable[tuple[str, Tensor]]]
"""Splits a stored tensor into (canonical name, tensor) pairs."""


@dataclass(frozen=True)
class Renamed:
    """A converter that only renames."""

    name: str

    def __call__(self, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        return [(self.name, tensor)]


class TensorModule(nn.Module):
    """A module whose call returns one tensor, declared so that callers are type-checked."""

    __call__: Callable[..., Tensor]


class Convertible:
    """A module with tensors that some checkpoints store in another layout or under other names."""

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Yield the name of each such tensor (after prefixes are replaced) and the function that converts it."""
        yield from ()


class WeightedLayer(TensorModule, Convertible):
    """A layer that is filled from a checkpoint. The loader is `models.weights.fill`."""

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the canonical name and the memory of each tensor of this module; `path` is the module's path from the root."""
        yield from ()

    def held_part(self, name: str, stored: Tensor) -> Tensor:
        """Return the part of a stored tensor that this layer holds. `name`: its canonical name."""
        return stored

    def packed_bytes(self, device: torch.device) -> int:
        """Return the bytes of this module's tensors after `pack` on `device`."""
        return sum(tensor.nbytes for _, tensor in self.tensors(""))

    def pack(self) -> None:
        """Lay the weights out for their device. Called once, when all tensors of this layer are filled."""

    def after_load(self) -> None:
        """Finish the layer once all layers of the model are filled and packed."""


class Norm(WeightedLayer):
    """RMSNorm, or LayerNorm if it has a bias. `[..., dim] -> [..., dim]`.

    Args:
        centered: LayerNorm, though it has no bias.
        learned: False if the weight is 1, and not in the checkpoint.
        offset: added to the weight, for checkpoints that store it around 0.
        stored: last part of the name in the checkpoint, if it differs from the module's own.

    Attributes:
        slot: as in Linear.
        takes_adapters: False if the weight is read without a call of the norm, as attention does with norms of heads.
    """

    slot: AdapterSlot | None = None
    takes_adapters = True

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
        centered: bool = False,
        learned: bool = True,
    ) -> None:
        super().__init__()
        self.eps, self.offset, self.stored, self.has_bias, self.learned = eps, offset, stored, bias, learned
        self.weight = torch.ones(dim, dtype=dtype, device=device)
        self.bias = torch.zeros(dim, dtype=dtype, device=device) if bias or centered else None

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        if self.stored is not None:
            path = path[: path.rfind(".") + 1] + self.stored
        if self.learned:
            yield f"{path}.weight", self.weight
        if self.bias is not None and self.has_bias:
            yield f"{path}.bias", self.bias

    def packed_bytes(self, device: torch.device) -> int:
        """Return the bytes of weight and bias, stored or not."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def pack(self) -> None:
        if self.bias is not None and self.offset:  # RMSNorm adds it in float32
            self.weight += self.offset

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        """Normalise `x`. If `add` is given, it is first added in place to the residual stream `x`."""
        if self.bias is None:
            out = rms_norm(x, self.weight, self.eps, add, self.offset)
        else:
            out = layer_norm(x, self.weight, self.bias, self.eps, add)
        if self.slot is not None:
            self.slot.apply_(out, x)
        return out

    def heads_(self, x: Tensor) -> None:
        """Apply RMSNorm to each head of `x [rows, heads, dim]` in place; x may be a view into wider rows."""
        norm_heads_(x, self.weight, self.eps, self.offset)


class ScaledNorm(Norm):
    """A norm whose result is multiplied by `factor`."""

    def __init__(self, factor: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return super().forward(x, add).mul_(self.factor)


class AddResidual(TensorModule):
    """Adds an output to the residual stream in place, where a layer has no norm."""

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return x if add is None else x.add_(add)


class Scale(TensorModule):
    """Multiplies by a constant, in place."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.factor)


class EmbeddingTable(WeightedLayer):
    """Token ids `[rows]` -> embeddings `[rows, dim]`, multiplied by `scale`.

    Attributes:
        packed: the table that this layer shares with a tied head (`share`), in the head's layout; replaces `weight`.
        float16: the checkpoint stores float16, so a shared float32 table stays in float16.
        stored_dtypes: dtypes of the table in the checkpoint, if the headers of the files name them.
        num_embeddings, dim: shape of the table.
        slot, takes_adapters: as in Linear.
    """

    takes_adapters = True
    packed: Panels | None = None
    float16 = False
    slot: AdapterSlot | None = None

    def __init__(self, vocab: int, dim: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = float(torch.tensor(scale, dtype=dtype))  # rounded to the model's dtype, as the published models do
        self.weight = torch.empty(vocab, dim, dtype=dtype, device=device)
        self.dtype, self.stored_dtypes = dtype, set[torch.dtype]()
        self.num_embeddings, self.dim, self.device = vocab, dim, device

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{path}.weight", self.weight

    def shared_dtype(self, device: torch.device) -> torch.dtype | None:
        """Return the dtype in which a tied head and this layer share the table on `device`; None: they cannot."""
        dim = self.weight.shape[1]
        if self.float16 and dim % 2 == 0 and keeps_float16(device, self.dtype):
            return torch.float16
        return self.dtype if shares_table(dim, device, self.dtype) else None

    def share(self) -> Panels:
        """Pack the table for a head as well, and drop the original. A float32 table that float16 cannot hold stays as it is."""
        half = self.weight.half() if self.shared_dtype(self.weight.device) == torch.float16 else self.weight
        self.packed = pack_panels(half if torch.equal(half.to(self.dtype), self.weight) else self.weight, None)
        del self.weight
        return self.packed

    def read_rows(self, ids: Tensor) -> Tensor:
        """Return rows of the table, not multiplied by `scale`."""
        return F.embedding(ids, self.weight) if self.packed is None else read_panel_rows(self.packed.weight, ids).to(self.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.read_rows(ids)
        rows = rows if self.scale == 1.0 else rows.mul_(self.scale)
        if self.slot is not None:
            self.slot.apply_(rows, ids)
        return rows
