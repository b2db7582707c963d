"""The only way a model multiplies: a weight of named slices, packed after loading. Collectives would live here too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ...kernels.linear import Packed, Plain, linear, pack


class Linear(nn.Module):
    """`[rows, in] -> [rows, out]`, `out` being the sum of the slices.

    Args:
        in_features: width of the input.
        slices: name in the checkpoint -> output rows, in order: `{"q_proj": 512, "k_proj": 128, "v_proj": 128}`.
            The names stand in place of the module's own last name part.
        bias: whether the slices have biases; all or none.
    """

    def __init__(
        self, in_features: int, slices: Mapping[str, int], bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.slices = dict(slices)
        out = sum(self.slices.values())
        self.weight: Tensor | None = torch.empty(out, in_features, dtype=dtype, device=device)
        self.bias: Tensor | None = torch.empty(out, dtype=dtype, device=device) if bias else None
        self.packed: Packed | Plain | None = None

    def tensors(self, parent: str) -> Iterator[tuple[str, Tensor]]:
        """Checkpoint names below `parent` (ending in a dot, or empty) and the views they fill."""
        assert self.weight is not None, "weights are packed already"
        start = 0
        for name, rows in self.slices.items():
            yield f"{parent}{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{parent}{name}.bias", self.bias[start : start + rows]
            start += rows

    def pack(self) -> None:
        """Lay the weight out for its device and drop the original."""
        assert self.weight is not None, "weights are packed already"
        self.packed, self.weight = pack(self.weight, self.bias), None

    def forward(self, x: Tensor) -> Tensor:
        assert self.packed is not None, "pack() was not called"
        return linear(x, self.packed)


class Head(nn.Module):
    """Hidden states `[n, hidden]` -> float32 logits `[n, vocab]`.

    Args:
        table: the embedding weights `[vocab, hidden]` of a tied head, which multiplies with them as they are: packing
            would make a second copy. None for a head with weights of its own.
    """

    def __init__(self, hidden: int, vocab: int, table: Tensor | None, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.table = None if table is None else Plain(table, None)
        self.proj = Linear(hidden, {"lm_head": vocab}, False, dtype, device) if table is None else None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.table is not None:
            return linear(hidden, self.table).float()
        assert self.proj is not None
        return self.proj(hidden).float()  # type: ignore[no-any-return]
