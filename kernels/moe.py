"""Mixture of experts: routing, and the MLPs of the chosen experts; in torch, or in Triton with stacked weights.

A row's result does not depend on the other rows of the step: scores, choices and sums are computed per row, and each sum
adds the row's experts in the order of its choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .activation import UNGATED, act_and_mul_reference
from .dispatch import backend
from .fp8 import Fp8Weight, fp8_linear_reference
from .int8 import Int8Weight, int8_linear_reference

Expert = Callable[[int, Tensor], Tensor]
"""Function from an expert's number and its rows `[n, dim]` to their results."""


@dataclass(frozen=True)
class RoutingConfig:
    """Rule that turns router logits into `top_k` experts and their weights; see `models.text.spec.MoeSpec`."""

    top_k: int
    scoring: str = "softmax"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_group: int = 1
    topk_group: int = 1
    group_score: str = "top2"
    jitter: float = 0.0


@dataclass(frozen=True, eq=False)
class StackedWeight:
    """One linear layer of all experts.

    Args:
        weight: `[experts, out, in]`. bias: `[experts, out]`, or None.
        scale: float32 `[experts, out]` of a quantised weight (`int8.Int8Weight`, `fp8.Fp8Weight`), or None.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, eq=False)
class StackedExperts:
    """The gated MLPs of all experts, `down(act(gate(x)) * up(x))`; `gate_up` computes `[gate | up]`.

    `act` is a name that `activation.act_and_mul` takes, or one of `activation.UNGATED`: then the experts have no gate.
    """

    act: str
    gate_up: StackedWeight
    down: StackedWeight


def route(logits: Tensor, rule: RoutingConfig, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row from float32 `logits [rows, experts]`: returns float32 topk_weights and topk_ids.

    Both are `[rows, top_k]`, best first. Ids are int64, in Triton int32. `correction_bias`, float32 `[experts]`, is added
    to the scores for the choice only (DeepSeek-V3's `e_score_correction_bias`).
    """
    if rule.scoring == "sparsemixer":
        return _sparse_mixer(logits, rule)
    if backend("moe", logits.device, logits.dtype) == "triton":
        from .gpu import moe

        return moe.route(logits, rule, correction_bias)
    return route_reference(logits, rule, correction_bias)


def route_reference(logits: Tensor, rule: RoutingConfig, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `route` in torch."""
    scores = logits.softmax(-1) if rule.scoring == "softmax" else _sigmoid(logits)
    candidates = scores if correction_bias is None else scores + correction_bias
    if rule.num_expert_group > 1:
        candidates = _best_groups(candidates, rule)
    topk_ids = candidates.topk(rule.top_k, -1).indices
    topk_weights = scores.gather(1, topk_ids)
    if rule.renormalize:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True).clamp_(min=1e-20)
    return topk_weights * rule.routed_scaling_factor, topk_ids


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


def _sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid as a softmax against 0, which gives every element the same bits wherever it is in memory."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _best_groups(candidates: Tensor, rule: RoutingConfig) -> Tensor:
    """Set the scores of experts outside the best groups to -inf."""
    grouped = candidates.unflatten(1, (rule.num_expert_group, -1))
    counts = grouped.amax(-1) if rule.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    best = counts.topk(rule.topk_group, -1).indices
    outside = torch.ones_like(counts, dtype=torch.bool).scatter_(1, best, False)
    kept: Tensor = grouped.masked_fill(outside[..., None], -torch.inf)
    return kept.flatten(1)


def loop_experts_reference(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert: Expert) -> Tensor:
    """Compute `loop_experts` row by row."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row, (own, experts) in enumerate(zip(topk_weights, topk_ids.tolist(), strict=True)):
        for weight, number in zip(own, experts, strict=True):
            out[row] += expert(number, x[row : row + 1])[0].float() * weight
    return out.to(x.dtype)


def loop_experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: int, expert: Expert) -> Tensor:
    """Run `expert(number, rows)` once per expert on all its rows, and sum the weighted results: `[rows, dim]`."""
    order = topk_ids.flatten().argsort(stable=True)
    results = x.new_empty(len(order), x.shape[1])
    for number, start, end in _expert_runs(torch.bincount(topk_ids.flatten(), minlength=experts).tolist()):
        results[start:end] = expert(number, x.index_select(0, order[start:end] // topk_ids.shape[1]))
    where = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device)).view(topk_ids.shape)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for place, weight in zip(where.unbind(1), topk_weights.unbind(1), strict=True):
        out += results.index_select(0, place) * weight[:, None]
    return out.to(x.dtype)


def fused_experts(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: StackedExperts, out: Tensor | None = None
) -> Tensor:
    """Compute `loop_experts` with stacked weights, without reading topk_ids on the host.

    Args:
        topk_ids: int32 `[rows, top_k]`; rows whose first id is -1 are skipped.
        out: tensor `[rows, dim]` for the results of the other rows; None: a new tensor.
    """
    from .gpu import moe

    return moe.fused_experts(x, topk_weights, topk_ids, experts, out)


def expert_reference(experts: StackedExperts, number: int, x: Tensor) -> Tensor:
    """Run `x [rows, dim]` through one expert. Both products and the activation are rounded to x's dtype."""
    inner = _product(x, experts.gate_up, number)
    inner = UNGATED[experts.act](inner) if experts.act in UNGATED else act_and_mul_reference(experts.act, inner)
    return _product(inner, experts.down, number)


def _product(x: Tensor, layer: StackedWeight, number: int) -> Tensor:
    bias = None if layer.bias is None else layer.bias[number]
    if layer.scale is None:
        return F.linear(x, layer.weight[number], bias)
    if layer.weight.dtype == torch.int8:
        return int8_linear_reference(x, Int8Weight(layer.weight[number], layer.scale[number], bias))
    return fp8_linear_reference(x, Fp8Weight(layer.weight[number], layer.scale[number], bias))


def _expert_runs(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield `(expert, first, end)` of every expert that has rows: [2, 0, 3] gives (0, 0, 2), (2, 2, 5)."""
    start = 0
    for number, count in enumerate(counts):
        if count:
            yield number, start, start + count
        start += count
