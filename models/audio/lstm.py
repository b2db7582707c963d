"""LSTMs over whole sequences, with the names and the layout of torch's class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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
    parts = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    names = [f"{prefix}{part}_l{layer}{end}" for layer in range(layers) for end in ends for part in parts]
    width = tensors[f"{prefix}weight_hh_l0"].shape[1]
    return Lstm(tuple(tensors[name].contiguous() for name in names), layers, is_bidirectional, width)
