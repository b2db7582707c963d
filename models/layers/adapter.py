"""What an adapter adds to a product: a thin matrix and one back, for the rows it computes. Knows no checkpoint and no stack.

Source: arXiv 2106.09685 (LoRA).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ...kernels.linear import Weights, linear, pack
from .basic import Weighted


@dataclass(frozen=True)
class AdapterSpec:
    """An adapter of `rank`, what it makes times `scale`, for slices whose names end in one of `targets`.

    `name`: of its folder below the checkpoint's, "." for the checkpoint's own.
    """

    name: str
    rank: int
    scale: float
    targets: tuple[str, ...]


class Switch:
    """Which rows of a step each adapter leaves alone. One for all layers of a model, which turns it before they run."""

    def __init__(self) -> None:
        self.idle: list[Tensor] = []  # of each adapter bool `[rows, 1]`; empty: no row has one

    def turn(self, adapters: Tensor | None, count: int) -> None:
        """`adapters` as in ForwardBatch; `count`: how many there are."""
        self.idle = [] if adapters is None else [(adapters != number)[:, None] for number in range(1, count + 1)]


class LowRank(Weighted):
    """`up(down(x)) * scale`, added to one slice of a layer for the rows of one adapter; never quantised.

    Rows of others go through as zeros, so that a row has the same bits in any company.

    Args:
        stem: the slice's canonical name, which the names of its two tensors begin with.
        weight: of the layer, whose width, dtype and device it has.
        rows: of the slice.
        number: of the adapter among the model's, from 0.
    """

    def __init__(self, stem: str, weight: Tensor, rows: int, spec: AdapterSpec, number: int, switch: Switch) -> None:
        super().__init__()
        self.stem, self.spec, self.number, self.switch = stem, spec, number, switch
        self.inner, self.outer, self.whole = weight.shape[1], rows, rows == len(weight)
        self.weights: tuple[Tensor, Tensor] | None = (
            weight.new_empty(spec.rank, self.inner),
            weight.new_empty(rows, spec.rank),
        )
        self.down: Weights | None = None
        self.up: Weights | None = None

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        assert self.weights is not None, "weights are packed already"
        for letter, weight in zip("AB", self.weights, strict=True):
            yield tensor_name(self.stem, letter, self.spec.name), weight

    def pack(self) -> None:
        """The scale goes into the second matrix."""
        assert self.weights is not None, "weights are packed already"
        down, up = self.weights
        self.down, self.up, self.weights = pack(down, None), pack(up.mul_(self.spec.scale), None), None

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Inputs and outputs of each matrix that is laid out."""
        yield from ((self.inner, self.spec.rank), (self.spec.rank, self.outer))

    def add_(self, out: Tensor, x: Tensor) -> None:
        """To `out [rows, slice]`, in place, for `x [rows, in]`; nothing where no row of the step has an adapter."""
        if self.switch.idle:
            assert self.down is not None, "pack() was not called"
            assert self.up is not None, "pack() was not called"
            out += linear(linear(x, self.down).masked_fill_(self.switch.idle[self.number], 0.0), self.up)


def tensor_name(stem: str, letter: str, adapter: str) -> str:
    """The canonical name of an adapter's tensor "A" `[rank, in]` or "B" `[out, rank]` for a slice."""
    own = "" if adapter == "." else f"{adapter}."
    return f"{stem}.lora_{letter}.{own}weight"
