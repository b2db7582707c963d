"""Which experts a row goes to, and rows in the order of their experts. Knows no weights.

Nothing here, nor the sum of a row's experts, depends on which other rows are in the step: scores, choices and sums are made
row by row, each sum in the order of the row's own choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """How a router's logits become weights of `top_k` experts; see `models.text.spec.MoeSpec`."""

    top_k: int
    scoring: str = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"


def route(logits: Tensor, rule: Routing, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Float32 `logits [rows, experts]` -> float32 weights and int64 experts, `[rows, top_k]` each.

    `correction`: float32 `[experts]`, added to the scores for the choice alone.
    """
    scores = logits.softmax(-1) if rule.scoring == "softmax" else _sigmoid(logits)
    offered = scores if correction is None else scores + correction
    if rule.groups > 1:
        offered = _best_groups(offered, rule)
    chosen = offered.topk(rule.top_k, -1).indices
    weights = scores.gather(1, chosen)
    if rule.normalise:
        weights = weights / weights.sum(-1, keepdim=True).clamp_(min=1e-20)
    return weights * rule.scale, chosen


def _sigmoid(x: Tensor) -> Tensor:
    """As a softmax against 0, which is computed alike for every element, wherever it lies."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _best_groups(offered: Tensor, rule: Routing) -> Tensor:
    """Scores of experts outside the best groups become -inf."""
    grouped = offered.unflatten(1, (rule.groups, -1))
    counts = grouped.amax(-1) if rule.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    best = counts.topk(rule.top_groups, -1).indices
    outside = torch.ones_like(counts, dtype=torch.bool).scatter_(1, best, False)
    kept: Tensor = grouped.masked_fill(outside[..., None], -torch.inf)
    return kept.flatten(1)


def mix_reference(x: Tensor, weights: Tensor, chosen: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Row by row: what `mix` computes."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row, (own, experts) in enumerate(zip(weights, chosen.tolist(), strict=True)):
        for weight, number in zip(own, experts, strict=True):
            out[row] += expert(number, x[row : row + 1])[0].float() * weight
    return out.to(x.dtype)


def mix(x: Tensor, weights: Tensor, chosen: Tensor, experts: int, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """`x [rows, dim]` through `expert(number, rows)`, one call for all rows of an expert, and the weighted sums."""
    order = chosen.flatten().argsort(stable=True)
    made = x.new_empty(len(order), x.shape[1])
    for number, start, end in _runs(torch.bincount(chosen.flatten(), minlength=experts).tolist()):
        made[start:end] = expert(number, x.index_select(0, order[start:end] // chosen.shape[1]))
    where = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device)).view(chosen.shape)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place, weight in zip(where.unbind(1), weights.unbind(1), strict=True):
        out += made.index_select(0, place) * weight[:, None]
    return out.to(x.dtype)


def _runs(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """`(expert, first, end)` of every expert that has rows: [2, 0, 3] gives (0, 0, 2), (2, 2, 5)."""
    start = 0
    for number, count in enumerate(counts):
        if count:
            yield number, start, start + count
        start += count
