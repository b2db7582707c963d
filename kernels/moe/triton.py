"""Mixture of experts in Triton: routing, sorting by expert, grouped matmuls, weighted sums. Nothing is read on the host.

A pair is a row with one of its experts: pair `p` is choice `p % top_k` of row `p // top_k`. Pairs are sorted into tiles of one
expert each. The largest possible number of tiles follows from shapes, so every launch can be captured in a CUDA graph. Pairs
of expert -1 are skipped. No sum depends on the order in which programs run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import activation
from ..activation.reference import IN_TORCH
from ..activation.triton import gated
from ..gpu import launch_config
from ..linear.triton.eight_bit import dot_tiles, quantize_rows
from .experts import RoutingConfig, StackedExperts, StackedWeight

_ONE_HOT = 1 << 14  # size of the (pairs, experts) one-hot matrix of a sorting program


@triton.jit
def _best_groups(offered, column, each, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TWO: tl.constexpr, SLOTS: tl.constexpr):
    """Set the scores of experts outside the best groups to -inf."""
    slot = tl.arange(0, SLOTS)
    counts = tl.full((offered.shape[0], SLOTS), float("-inf"), tl.float32)
    group = column // each
    for i in tl.static_range(GROUPS):
        in_group = tl.where((group == i)[None, :], offered, float("-inf"))
        score = tl.max(in_group, 1)
        if TWO:
            score += tl.max(tl.where(column[None, :] == tl.argmax(in_group, 1)[:, None], float("-inf"), in_group), 1)
        counts = tl.where(slot[None, :] == i, score[:, None], counts)
    kept = tl.zeros(offered.shape, dtype=tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.argmax(counts, 1)
        counts = tl.where(slot[None, :] == best[:, None], float("-inf"), counts)
        kept += (group[None, :] == best[:, None]).to(tl.int32)
    return tl.where(kept > 0, offered, float("-inf"))


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits_ptr, correction_bias_ptr, topk_weights_ptr, topk_ids_ptr, rows, experts, scale, each,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    TWO: tl.constexpr, CORRECTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHOICES: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, choice = tl.arange(0, COLUMNS), tl.arange(0, CHOICES)
    inside, there = row < rows, column < experts
    places = row.to(tl.int64)[:, None] * experts + column[None, :]
    logits = tl.load(logits_ptr + places, mask=inside[:, None] & there[None, :], other=0.0)
    logits = tl.where(there[None, :], logits, float("-inf"))
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores /= tl.sum(scores, 1)[:, None]
    offered = scores
    if CORRECTED:
        offered += tl.load(correction_bias_ptr + column, mask=there, other=0.0)[None, :]
    offered = tl.where(there[None, :], offered, float("-inf"))
    if GROUPS > 1:
        offered = _best_groups(offered, column, each, GROUPS, TOP_GROUPS, TWO, SLOTS)
    topk_weights = tl.zeros((ROWS, CHOICES), dtype=tl.float32)
    topk_ids = tl.zeros((ROWS, CHOICES), dtype=tl.int32)
    for i in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(offered, 1), experts - 1)  # NaN has no argmax
        taken = column[None, :] == best[:, None]
        weight = tl.sum(tl.where(taken, scores, 0.0), 1)
        topk_weights = tl.where(choice[None, :] == i, weight[:, None], topk_weights)
        topk_ids = tl.where(choice[None, :] == i, best[:, None], topk_ids)
        offered = tl.where(taken, float("-inf"), offered)
    if NORMALISE:
        topk_weights /= tl.maximum(tl.sum(topk_weights, 1), 1e-20)[:, None]
    places = row.to(tl.int64)[:, None] * TOP_K + choice[None, :]
    wanted = inside[:, None] & (choice < TOP_K)[None, :]
    tl.store(topk_weights_ptr + places, topk_weights * scale, mask=wanted)
    tl.store(topk_ids_ptr + places, topk_ids, mask=wanted)


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(topk_ids_ptr, counts_ptr, pairs, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """topk_ids `[pairs]`, counts `[chunks, COLUMNS]`; grid (chunks,): count the pairs of each expert in a chunk."""
    chunk = tl.program_id(0)
    pair, column = chunk * CHUNK + tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    expert = tl.load(topk_ids_ptr + pair, mask=pair < pairs, other=-1)
    hot = (expert[:, None] == column[None, :]).to(tl.int32)
    tl.store(counts_ptr + chunk * COLUMNS + column, tl.sum(hot, 0))


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _sort_pairs_kernel(
    topk_ids_ptr, counts_ptr, slots_ptr, owners_ptr, pairs, chunks, TILE: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (chunks,): store each pair of a chunk at its place among the pairs of its expert; store the expert of each tile.

    counts `[chunks, COLUMNS]`, slots `[tiles * TILE]`: sorted pairs, owners `[tiles]`: experts.
    """
    chunk = tl.program_id(0)
    number, column = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    pair = chunk * CHUNK + number
    expert = tl.load(topk_ids_ptr + pair, mask=pair < pairs, other=-1)
    hot = (expert[:, None] == column[None, :]).to(tl.int32)
    before = tl.zeros((COLUMNS,), dtype=tl.int32)
    totals = tl.zeros((COLUMNS,), dtype=tl.int32)
    for first in range(0, chunks, STEP):
        other = first + tl.arange(0, STEP)
        counts = tl.load(counts_ptr + other[:, None] * COLUMNS + column[None, :], mask=(other < chunks)[:, None], other=0)
        totals += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), 0)
    padded = (totals + TILE - 1) // TILE * TILE
    first = tl.cumsum(padded, 0) - padded + before
    rank = tl.sum(((expert[:, None] == expert[None, :]) & (number[None, :] < number[:, None])).to(tl.int32), 1)
    slot = tl.sum(hot * first[None, :], 1) + rank
    tl.store(slots_ptr + slot, pair, mask=expert >= 0)
    tl.store(owners_ptr + slot // TILE, expert, mask=(expert >= 0) & (slot % TILE == 0))


@triton.jit(do_not_specialize=["tiles"])
def _expert_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, out_ptr, slots_ptr, owners_ptr, tiles, width, depth, divisor,
    ACT: tl.constexpr, GATED: tl.constexpr, SCALED: tl.constexpr, ROWS_SCALED: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * blocks of width,): multiply a tile of pairs with a block of their expert's outputs.

    x `[rows, depth]`, w `[experts, width, depth]`, out `[pairs, width]`, or `[pairs, width / 2]` if GATED. If so, the
    first half of an expert's outputs are gates; each gate is computed next to its partner and multiplied with it here.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(width, BLOCK_N)
    band = program // (GROUP * blocks)  # grouped order of tiles, for the L2 cache
    high = tl.minimum(tiles - band * GROUP, GROUP)
    tile = band * GROUP + program % (GROUP * blocks) % high
    block = program % (GROUP * blocks) // high
    owner = tl.load(owners_ptr + tile)
    if owner < 0:
        return
    pair = tl.load(slots_ptr + tile * TILE + tl.arange(0, TILE))
    inside = pair >= 0
    row = (tl.maximum(pair, 0) // divisor).to(tl.int64)
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    output = column
    if GATED:
        output = column % 2 * (width // 2) + column // 2
    there = column < width
    weight = owner.to(tl.int64) * width + tl.where(there, output, 0)
    total = dot_tiles(x_ptr + row * depth, w_ptr + weight * depth, inside, there, depth, BLOCK_K, EVEN).to(tl.float32)
    if ROWS_SCALED:
        total *= tl.load(x_scale_ptr + row, mask=inside, other=0.0)[:, None]
    if SCALED:
        total *= tl.load(w_scale_ptr + weight, mask=there, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias_ptr + weight, mask=there, other=0.0).to(tl.float32)[None, :]
    kind = out_ptr.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.reshape(total, (TILE, BLOCK_N // 2, 2)))
        made = gated(gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32), ACT, kind)
        at = block * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        half = width // 2
        places = tl.maximum(pair, 0).to(tl.int64)[:, None] * half + at[None, :]
        tl.store(out_ptr + places, made.to(kind), mask=inside[:, None] & (at < half)[None, :])
    else:
        places = tl.maximum(pair, 0).to(tl.int64)[:, None] * width + column[None, :]
        tl.store(out_ptr + places, total.to(kind), mask=inside[:, None] & there[None, :])


@triton.jit
def _combine_kernel(made_ptr, topk_weights_ptr, topk_ids_ptr, out_ptr, dim, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """made `[rows * TOP_K, dim]`, out `[rows, dim]`; grid (rows, blocks of dim): weighted sum of a row's experts, in order.

    Rows whose first expert is -1 are not written.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < dim) & (tl.load(topk_ids_ptr + row * TOP_K) >= 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        made = tl.load(made_ptr + (row * TOP_K + i) * dim + column, mask=inside, other=0.0).to(tl.float32)
        total += made * tl.load(topk_weights_ptr + row * TOP_K + i)
    tl.store(out_ptr + row * dim + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def route(logits: Tensor, rule: RoutingConfig, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `moe.route`. Ids are int32; among equal scores the first expert wins."""
    rows, experts = logits.shape
    topk_weights = logits.new_empty(rows, rule.top_k)
    topk_ids = torch.empty((rows, rule.top_k), dtype=torch.int32, device=logits.device)
    columns = triton.next_power_of_2(experts)
    each = max(1, min(8, 1024 // columns))
    _route_kernel[(triton.cdiv(rows, each),)](
        logits.contiguous(), correction_bias, topk_weights, topk_ids, rows, experts, rule.routed_scaling_factor,
        experts // rule.num_expert_group,
        TOP_K=rule.top_k, SIGMOID=rule.scoring == "sigmoid", NORMALISE=rule.renormalize, GROUPS=rule.num_expert_group,
        TOP_GROUPS=rule.topk_group, TWO=rule.group_score != "max", CORRECTED=correction_bias is not None, ROWS=each,
        COLUMNS=columns, CHOICES=triton.next_power_of_2(rule.top_k), SLOTS=triton.next_power_of_2(rule.num_expert_group),
        **launch_config.get_config("route"),
    )  # fmt: skip
    return topk_weights, topk_ids


def fused_experts(
    x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: StackedExperts, out: Tensor | None = None
) -> Tensor:
    """Compute `moe.fused_experts`."""
    rows, top_k = topk_ids.shape
    out = torch.empty_like(x) if out is None else out
    if not rows:
        return out
    number, wide, _ = experts.gate_up.weight.shape
    dim, has_gate = experts.down.weight.shape[1], experts.act not in IN_TORCH
    pairs = rows * top_k
    tile = max(16, min(128, triton.next_power_of_2(-(-pairs // number))))
    order = _sort_pairs(topk_ids, number, tile)
    inner = x.new_empty(pairs, wide // 2 if has_gate else wide)
    _grouped_mm(x, experts.gate_up, inner, order, tile, top_k, experts.act if has_gate else None)
    inner = inner if has_gate else activation(experts.act, inner)
    made = x.new_empty(pairs, dim)
    _grouped_mm(inner, experts.down, made, order, tile, 1, None)
    block = min(1024, triton.next_power_of_2(dim))
    _combine_kernel[(rows, triton.cdiv(dim, block))](
        made, topk_weights, topk_ids, out, dim, TOP_K=top_k, BLOCK=block, **launch_config.get_config("combine")
    )
    return out


def _sort_pairs(topk_ids: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor]:
    """Return the sorted pairs of all tiles, int32 `[tiles * tile]`, and the expert of each tile, int32 `[tiles]`; -1: none."""
    pairs = topk_ids.numel()
    tiles = pairs if pairs <= experts else experts + (pairs - experts) // tile  # upper bound
    table = torch.full((tiles * (tile + 1),), -1, dtype=torch.int32, device=topk_ids.device)
    slots, owners = table.split((tiles * tile, tiles))
    columns = triton.next_power_of_2(experts)
    chunk = max(16, min(128, _ONE_HOT // columns))
    chunks = triton.cdiv(pairs, chunk)
    counts = torch.empty((chunks, columns), dtype=torch.int32, device=topk_ids.device)
    _count_kernel[(chunks,)](topk_ids, counts, pairs, CHUNK=chunk, COLUMNS=columns, **launch_config.get_config("order"))
    _sort_pairs_kernel[(chunks,)](
        topk_ids, counts, slots, owners, pairs, chunks, TILE=tile, CHUNK=chunk, COLUMNS=columns, STEP=16,
        **launch_config.get_config("order"),
    )  # fmt: skip
    return slots, owners


def _grouped_mm(
    x: Tensor, layer: StackedWeight, out: Tensor, order: tuple[Tensor, Tensor], tile: int, divisor: int, act: str | None
) -> None:
    """Multiply row `p // divisor` of `x [rows, depth]` for each pair p -> `out [pairs, ...]`; with `act`, gated."""
    slots, owners = order
    _, width, depth = layer.weight.shape
    row_scale = None
    weight = layer.weight
    if weight.dtype == torch.int8:
        x, row_scale = quantize_rows(x)
    elif layer.scale is not None:
        weight = weight.view(torch.uint8)  # activations are not quantised
    sizes = launch_config.get_config("experts", "wide" if x.dtype == torch.float32 else str(tile))
    _expert_kernel[(len(owners) * triton.cdiv(width, sizes["BLOCK_N"]),)](
        x, row_scale, weight, layer.scale, layer.bias, out, slots, owners, len(owners), width, depth, divisor, ACT=act,
        GATED=act is not None, SCALED=layer.scale is not None, ROWS_SCALED=row_scale is not None,
        BIASED=layer.bias is not None, EVEN=depth % sizes["BLOCK_K"] == 0, TILE=tile, **sizes,
    )  # fmt: skip
