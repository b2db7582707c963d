"""Divides media items among ranks, each of which has the whole encoder, and gathers the encoder rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...mm.types import MultiModalFeature
from ...models.layers.ranks import Ranks


def encoder_cost(item: MultiModalFeature) -> int:
    """Estimate the work of encoding an item: the bytes of its tensors, which grow with its patches or frames."""
    return sum(elem.data.nbytes for elem in item.kwargs.values() if isinstance(elem.data, Tensor))


def assign_ranks(costs: Sequence[int], size: int) -> list[int]:
    """Return the rank of each item. Each item, the costliest first, goes to the rank with the smallest sum of costs."""
    loads, owners = [0] * size, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda number: -costs[number]):
        owners[index] = min(range(size), key=lambda rank: loads[rank])
        loads[owners[index]] += costs[index]
    return owners


def any_rank(ranks: Ranks, flags: Sequence[bool]) -> list[bool]:
    """Return for each flag whether any rank has set it. All ranks call it, with equally many flags."""
    if not flags:
        return []
    gathered = ranks.gather(torch.tensor([flags], dtype=torch.uint8))
    return [bool(flag) for flag in gathered.view(ranks.size, -1).amax(0).tolist()]


def gather_rows(
    ranks: Ranks, owners: Sequence[int], counts: Sequence[int], own_rows: Sequence[Tensor], width: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return the rows of all items, each in memory of its own. All ranks call it.

    Args:
        owners: by item, the rank that has encoded it. counts: its number of rows.
        own_rows: rows `[count, width]` of the items of this rank, in order.
    """
    order = sorted(range(len(owners)), key=lambda index: owners[index])
    of_ranks = [sum(count for count, owner in zip(counts, owners, strict=True) if owner == rank) for rank in range(ranks.size)]
    bounds = [sum(of_ranks[:rank]) for rank in range(ranks.size + 1)]
    rows = torch.empty(bounds[-1], width, dtype=dtype)
    if own_rows:
        torch.cat(list(own_rows), out=rows[bounds[ranks.rank] : bounds[ranks.rank + 1]])
    ranks.share_rows_(rows, bounds)
    parts = dict(zip(order, rows.split([counts[index] for index in order]), strict=True))
    return [parts[index].clone() for index in range(len(owners))]
