"""Launches of published mixtures of experts: one row, a decode batch, a chunk of a prompt."""

from __future__ import annotations

import torch
from sensorium.kernels.moe import triton as moe
from sensorium.kernels.moe.experts import RoutingConfig, StackedExperts, StackedWeight

HOT = {"_route_kernel", "_count_kernel", "_sort_pairs_kernel", "_expert_kernel", "_combine_kernel"}
RULES = (  # rule, experts, hidden size, inner size
    (RoutingConfig(8), 128, 2048, 768),
    (RoutingConfig(8, "sigmoid", num_expert_group=8, topk_group=4, routed_scaling_factor=2.5), 256, 2048, 512),
)


def launches() -> None:
    for rule, number, dim, inner in RULES:
        correction_bias = torch.empty(number) if rule.num_expert_group > 1 else None
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn):
            eight, wide = dtype.itemsize == 1, torch.bfloat16 if dtype.itemsize == 1 else dtype
            shapes = (number, 2 * inner, dim), (number, dim, inner)
            scales = [torch.empty(shape[:2]) if eight else None for shape in shapes]
            layers = (StackedWeight(torch.empty(shape, dtype=dtype), None, s) for shape, s in zip(shapes, scales, strict=True))
            experts = StackedExperts("silu", *layers)
            for rows in (1, 512, 1024, 4096):  # tiles of every size
                topk_weights, topk_ids = moe.route(torch.empty(rows, number), rule, correction_bias)
                moe.fused_experts(torch.empty(rows, dim, dtype=wide), topk_weights, topk_ids, experts)
