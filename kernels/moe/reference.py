"""Mixture of experts in torch: routing, and the MLPs of the chosen experts one by one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..activation.reference import IN_TORCH, act_and_mul
from ..linear.eight_bit import Fp8Weight, Int8Weight
from ..linear.fp8 import fp8_linear_reference
from ..linear.int8 import int8_linear_reference
from .experts import Expert, RoutingConfig, StackedExperts, StackedWeight


def route(logits: Tensor, rule: RoutingConfig, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `moe.route` with softmax or sigmoid scores."""
    scores = logits.softmax(-1) if rule.scoring == "softmax" else _sigmoid(logits)
    candidates = scores if correction_bias is None else scores + correction_bias
    if rule.num_expert_group > 1:
        candidates = _best_groups(candidates, rule)
    topk_ids = candidates.topk(rule.top_k, -1).indices
    topk_weights = scores.gather(1, topk_ids)
    if rule.renormalize:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True).clamp_(min=1e-20)
    return topk_weights * rule.routed_scaling_factor, topk_ids


def _sigmoid(x: Tensor) -> Tensor:
    """Compute the sigmoid as a softmax against 0, which gives every element the same bits wherever it is in memory."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _best_groups(candidates: Tensor, rule: RoutingConfig) -> Tensor:
    """Set the scores of experts outside the best groups to -inf, or those of all but the best of each group."""
    grouped = candidates.unflatten(1, (rule.num_expert_group, -1))
    if rule.group_score == "each":
        best = grouped.topk(rule.top_k // rule.num_expert_group, -1)
        return torch.full_like(grouped, -torch.inf).scatter_(2, best.indices, best.values).flatten(1)
    counts = grouped.amax(-1) if rule.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    best = counts.topk(rule.topk_group, -1).indices
    outside = torch.ones_like(counts, dtype=torch.bool).scatter_(1, best, False)
    kept: Tensor = grouped.masked_fill(outside[..., None], -torch.inf)
    return kept.flatten(1)


def loop_experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, expert: Expert) -> Tensor:
    """Compute `moe.loop_experts` row by row."""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row, (weights, experts) in enumerate(zip(topk_weights, topk_ids.tolist(), strict=True)):
        for weight, number in zip(weights, experts, strict=True):
            out[row] += expert(number, x[row : row + 1])[0].float() * weight
    return out.to(x.dtype)


def run_expert(experts: StackedExperts, number: int, x: Tensor) -> Tensor:
    """Run `x [rows, dim]` through one expert. Both products and the activation are rounded to x's dtype."""
    inner = _product(x, experts.gate_up, number)
    inner = IN_TORCH[experts.act](inner) if experts.act in IN_TORCH else act_and_mul(experts.act, inner)
    return _product(inner, experts.down, number)


def _product(x: Tensor, layer: StackedWeight, number: int) -> Tensor:
    bias = None if layer.bias is None else layer.bias[number]
    if layer.scale is None:
        return F.linear(x, layer.weight[number], bias)
    if layer.weight.dtype == torch.int8:
        return int8_linear_reference(x, Int8Weight(layer.weight[number], layer.scale[number], bias))
    return fp8_linear_reference(x, Fp8Weight(layer.weight[number], layer.scale[number], bias))
