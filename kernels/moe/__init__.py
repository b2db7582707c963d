"""Mixture of experts: routing, and the MLPs of the chosen experts.

A row's result does not depend on the other rows of the step: scores, choices and sums are computed per row, and each sum
adds the row's experts in the order of its choices.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import Tensor

from ..dispatch import implementation
from . import reference
from .experts import Expert, RoutingConfig, Share, StackedExperts


def route(logits: Tensor, rule: RoutingConfig, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row from float32 `logits [rows, experts]`: returns float32 topk_weights and topk_ids.

    Both are `[rows, top_k]`, best first. Ids are int64, in Triton int32. `correction_bias`, float32 `[experts]`, is added
    to the scores for the choice only (DeepSeek-V3's `e_score_correction_bias`).
    """
    if rule.scoring == "sparsemixer":
        return _sparse_mixer(logits, rule)
    if rule.group_score == "each":  # the kernel has no choice of its own for every group
        topk_weights, topk_ids = reference.route(logits, rule, correction_bias)
        return topk_weights, topk_ids.int() if logits.is_cuda else topk_ids
    routed: tuple[Tensor, Tensor] = implementation("moe", logits.device, logits.dtype).route(logits, rule, correction_bias)
    return routed


def _sparse_mixer(logits: Tensor, rule: RoutingConfig) -> tuple[Tensor, Tensor]:
    """Choose experts one by one (arXiv 2409.12136). A weight is a softmax over the logits near the best one that is left."""
    left, weights, ids = logits, list[Tensor](), list[Tensor]()
    for _ in range(rule.top_k):
        best, chosen = left.max(-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * rule.jitter
        weights.append(left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, chosen))
        ids.append(chosen)
        left = left.scatter(-1, chosen, -torch.inf)
    topk_ids = torch.cat(ids, -1)
    return torch.cat(weights, -1), topk_ids.int() if logits.is_cuda else topk_ids


def loop_experts(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    experts: int,
    expert: Expert,
    others: tuple[Container[int], Share] | None = None,
) -> Tensor:
    """Run `expert(number, rows)` once per expert on all its rows, and sum the weighted results: `[rows, dim]`.

    Args:
        others: numbers of the experts that other processes run, and the function that fetches their results; None: no experts.
    """
    order = topk_ids.flatten().argsort(stable=True)
    results = x.new_empty(len(order), x.shape[1])
    counts = torch.bincount(topk_ids.flatten(), minlength=experts).tolist()
    for number, start, end in _expert_runs(counts):
        if others is None or number not in others[0]:
            results[start:end] = expert(number, x.index_select(0, order[start:end] // topk_ids.shape[1]))
    if others is not None:
        others[1](results, counts)
    where = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device)).view(topk_ids.shape)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for rows, weight in zip(where.unbind(1), topk_weights.unbind(1), strict=True):
        out += results.index_select(0, rows) * weight[:, None]
    return out.to(x.dtype)


def fused_experts(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: StackedExperts, out: Tensor | None = None
) -> Tensor:
    """Compute `loop_experts` with stacked weights, without reading topk_ids on the host.

    Args:
        topk_ids: int32 `[rows, top_k]`; rows whose first id is -1 are skipped.
        out: tensor `[rows, dim]` for the results of the other rows; None: a new tensor.
    """
    from . import triton

    return triton.fused_experts(x, topk_weights, topk_ids, experts, out)


def _expert_runs(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield `(expert, first, end)` of every expert that has rows: [2, 0, 3] gives (0, 0, 2), (2, 2, 5)."""
    start = 0
    for number, count in enumerate(counts):
        if count:
            yield number, start, start + count
        start += count
