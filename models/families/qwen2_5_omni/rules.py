"""The positions of a Qwen2.5-Omni video."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....mm.positions import PlacedItem, needs_axes, run_positions, runs_of
from ....mm.rules import register


@register
@needs_axes
def joined_edges(start: int, items: Sequence[PlacedItem], axes: int, number: int) -> tuple[Tensor, int]:
    """Let the tokens before and after the rows, those of the audio, repeat the positions of the text outside the range.

    The rows are one run.
    """
    where, ((first, last),) = items[0][0], runs_of(items)
    rows = run_positions(start, first, last, items, axes)
    after = int(rows.max()) + 1
    before = torch.full((axes, first - where.offset), max(0, start - 1))
    return torch.cat([before, rows, torch.full((axes, where.end - last), after)], dim=1), after
