"""The rule of BAGEL: the tokens of an image, its start and end token included, are at one position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....mm.positions import PlacedItem
from ....mm.rules import register


@register
def one_position(start: int, items: Sequence[PlacedItem], axes: int, number: int) -> tuple[Tensor, int]:
    """Put all tokens of the range at one position."""
    return torch.full((axes, items[0][0].length), start), start + 1
