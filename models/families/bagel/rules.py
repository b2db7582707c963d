"""Rules of BAGEL: the tokens of an image, its start and end token included, see each other at one position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....mm.embeddings import PROMPT_EMBEDS
from ....mm.positions import PlacedItem
from ....mm.rules import register
from ....mm.types import MultiModalFeature


@register
def item_ranges(prompt_length: int, features: Sequence[MultiModalFeature]) -> list[tuple[int, int]]:
    """Return the range of each item as a span of prompt attention."""
    ranges = (feature.range for feature in features if feature.modality != PROMPT_EMBEDS)
    return list(dict.fromkeys((where.offset, where.end) for where in ranges))


@register
def one_position(start: int, items: Sequence[PlacedItem], axes: int, number: int) -> tuple[Tensor, int]:
    """Put all tokens of the range at one position."""
    return torch.full((axes, items[0][0].length), start), start + 1
