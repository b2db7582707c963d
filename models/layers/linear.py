"""The only way a model multiplies: a weight of named slices, packed after loading. Collectives would live here too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ...kernels.linear import Weights, linear, pack
from .adapter import LowRank
from .basic import Weighted


class Linear(Weighted):
    """`[rows, in] -> [rows, out]`, `out` being the sum of the slices.

    Args:
        in_features: width of the input.
        slices: name in the checkpoint -> output rows, in order: `{"q_proj": 512, "k_proj": 128, "v_proj": 128}`.
            The names stand in place of the module's own last name part.
        bias: whether the slices have biases; all or none.
        exact: never quantised, since it decides between near equals.

    `quantization`, None, "int8" or "fp8", says how `pack` stores the weight.
    """

    quantization: str | None = None

    def __init__(
        self,
        in_features: int,
        slices: Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.slices, self.exact = dict(slices), exact
        self.outputs = out = sum(self.slices.values())
        self.weight: Tensor | None = torch.empty(out, in_features, dtype=dtype, device=device)
        self.bias: Tensor | None = torch.empty(out, dtype=dtype, device=device) if bias else None
        self.packed: Weights | None = None
        self.added: list[tuple[slice, LowRank]] = []

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        assert self.weight is not None, "weights are packed already"
        parent, start = path[: path.rfind(".") + 1], 0
        for name, rows in self.slices.items():
            yield f"{parent}{name}.weight", self.weight[start : start + rows]
            if self.bias is not None:
                yield f"{parent}{name}.bias", self.bias[start : start + rows]
            start += rows

    def pack(self) -> None:
        """Lay the weight out for its device and drop the original."""
        assert self.weight is not None, "weights are packed already"
        self.packed, self.weight = pack(self.weight, self.bias, self.quantization), None

    def add(self, adapter: LowRank, start: int) -> None:
        """Have it added to the outputs from `start`."""
        self.added.append((slice(start, start + adapter.outer), adapter))
        self.add_module(f"adapter{len(self.added)}", adapter)

    def forward(self, x: Tensor) -> Tensor:
        assert self.packed is not None, "pack() was not called"
        out = linear(x, self.packed)
        for part, adapter in self.added:
            adapter.add_(out[:, part], x)
        return out


class Head(nn.Module):
    """Hidden states `[n, hidden]` -> float32 logits `[n, vocab]`. Never quantised.

    Args:
        table: the embedding weights `[vocab, hidden]` of a tied head. `pack` copies them into the layout of its device
            where there is one, which makes a step's logits 2 to 3 times faster. None for a head with weights of its own.
        scale: factor of the logits.
        cap: logits l become cap * tanh(l / cap); None: untouched.
    """

    def __init__(
        self,
        hidden: int,
        vocab: int,
        table: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
        *,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> None:
        super().__init__()
        self.table, self.scale, self.cap = table, scale, cap
        self.proj = Linear(hidden, {"lm_head": vocab}, False, dtype, device, exact=True) if table is None else None
        self.packed: Weights | None = None

    def pack(self) -> None:
        """Lay a tied table out once it is filled; a projection of its own is packed like any other layer."""
        if self.table is not None:
            self.packed = pack(self.table, None)

    def forward(self, hidden: Tensor) -> Tensor:
        packed = self.packed if self.proj is None else self.proj.packed
        assert packed is not None, "pack() was not called"
        logits = linear(hidden, packed).float()
        if self.scale != 1.0:
            logits *= self.scale
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)
