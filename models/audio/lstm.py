"""LSTMs over whole sequences, with the names and the layout of torch's class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.basic import WeightedLayer

_PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@dataclass(frozen=True, eq=False)
class Lstm:
    """Layers of an LSTM. Calls map `[batch, time, inner]` to `[batch, time, outer]` and the last hidden states.

    Args:
        weights: of each layer and direction: of the input, of the hidden state, and their biases.
        width: of a hidden state.
    """

    weights: tuple[Tensor, ...]
    layers: int
    is_bidirectional: bool
    width: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs and the hidden states `[layers * directions, batch, width]` after the last step."""
        zeros = x.new_zeros(self.layers * (1 + self.is_bidirectional), len(x), self.width)
        # with biases, no dropout, batch first
        outputs, hidden, _ = torch.lstm(
            x, (zeros, zeros), self.weights, True, self.layers, 0.0, False, self.is_bidirectional, True
        )
        return outputs, hidden


def lstm_from(tensors: Mapping[str, Tensor], prefix: str) -> Lstm:
    """Return the LSTM whose tensors have names with this prefix. Raise KeyError for a tensor that is missing."""
    is_bidirectional = f"{prefix}weight_ih_l0_reverse" in tensors
    layers = sum(name.startswith(f"{prefix}weight_ih_l") and not name.endswith("_reverse") for name in tensors)
    ends = ("", "_reverse") if is_bidirectional else ("",)
    names = [f"{prefix}{part}_l{layer}{end}" for layer in range(layers) for end in ends for part in _PARTS]
    width = tensors[f"{prefix}weight_hh_l0"].shape[1]
    return Lstm(tuple(tensors[name].contiguous() for name in names), layers, is_bidirectional, width)


class BidirectionalLstm(WeightedLayer):
    """One layer in both directions: `[time, inner] -> [time, outer]`, float32; `outer` is even."""

    def __init__(self, inner: int, outer: int, device: torch.device) -> None:
        super().__init__()
        self.width = outer // 2
        shapes = [(4 * self.width, inner), (4 * self.width, self.width), (4 * self.width,), (4 * self.width,)] * 2
        self.weights = [torch.empty(shape, device=device) for shape in shapes]

    def tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        names = (f"{path}.{part}_l0{end}" for end in ("", "_reverse") for part in _PARTS)
        yield from zip(names, self.weights, strict=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = Lstm(tuple(self.weights), 1, True, self.width)(x[None])
        return outputs[0]
