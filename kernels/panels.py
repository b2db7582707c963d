"""How the C++ kernel of cpu/linear.cpp wants a weight to lie. Knows neither what the numbers mean nor who multiplies."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

WIDTH = 64  # outputs of a panel
_WORD = 4  # bytes


def to_panels(weight: Tensor) -> Tensor:
    """`[out, in]` -> `[panels, words, WIDTH, inputs of a word]`, `out` and `in` padded with zeros to whole panels and words."""
    each = _WORD // weight.itemsize
    padded = F.pad(weight, (0, -weight.shape[1] % each, 0, -weight.shape[0] % WIDTH))
    return padded.view(-1, WIDTH, padded.shape[1] // each, each).transpose(1, 2).contiguous()


def pad_outputs(values: Tensor) -> Tensor:
    """`[out]` -> `[out of all panels]`, zeros for the padding."""
    return F.pad(values, (0, -values.shape[0] % WIDTH))
