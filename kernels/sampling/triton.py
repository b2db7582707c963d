"""Sampling in Triton without sorting the vocabulary: gather candidates, then search the threshold among them.

The candidates of a row are all tokens that may be kept: those above a bound that follows from the sampling parameters and the
largest logit in each lane of the row's blocks. There are usually some hundreds, in the order of their ids. The exact threshold
is found by bisection over the bits of their logits. No sum depends on the order in which programs run.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..gpu import launch_config
from .reference import NO_TOKEN_ALLOWED, NOT_FINITE

_NOTHING, _ODD = tl.constexpr(NO_TOKEN_ALLOWED), tl.constexpr(NOT_FINITE)
_FAR = tl.constexpr(100.0)  # a token this far below the likeliest has probability 0 in float32


@triton.jit
def _scaled(logits_ptr, bitmask_ptr, column, vocab, temperature, MASKED: tl.constexpr):
    """Load a block of a row, divided by the temperature; -inf beyond the vocabulary and for tokens that are not allowed."""
    inside = column < vocab
    x = tl.load(logits_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if MASKED:
        word = tl.load(bitmask_ptr + column // 32, mask=inside, other=0)
        inside &= ((word >> (column % 32)) & 1) != 0
    return tl.where(inside, tl.div_rn(x, temperature), float("-inf"))


@triton.jit(do_not_specialize=["words"])
def _gather_kernel(
    logits_ptr, params_ptr, bitmask_ptr, values_ptr, tokens_ptr, heads_ptr, sizes_ptr, vocab, words, log_vocab,
    MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): gather the candidates of a row with their ids, its largest logit, the sum above min_p, and their number.

    logits, values, tokens `[rows, vocab]`, params float64 `[rows, 5]`, bitmask `[rows, words]`, heads and sizes `[rows, 2]`.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    if MASKED:
        bitmask_ptr += row * words
    values_ptr += row * vocab
    tokens_ptr += row * vocab
    lane = tl.arange(0, BLOCK)
    temperature = tl.load(params_ptr + row * 5).to(tl.float32)
    top_k = tl.load(params_ptr + row * 5 + 1).to(tl.int32)
    top_p = tl.load(params_ptr + row * 5 + 2).to(tl.float32)
    log_min_p = tl.load(params_ptr + row * 5 + 3).to(tl.float32)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    first = tl.zeros((BLOCK,), dtype=tl.int32)
    odd = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        column = start + lane
        x = _scaled(logits_ptr, bitmask_ptr, column, vocab, temperature, MASKED)
        first = tl.where(x > largest, column, first)
        largest = tl.maximum(largest, x)
        odd |= ((x != x) | (x == float("inf"))).to(tl.int32)
    top = tl.max(largest, 0)
    best = tl.min(tl.where(largest == top, first, vocab - 1), 0)
    wrong = tl.where(tl.max(odd, 0) > 0, _ODD, tl.where(top == float("-inf"), _NOTHING, 0))
    floor = top + log_min_p
    bound = tl.maximum(floor, top - _FAR)
    if (top_k > 0) & (top_k < vocab):  # at least top_k lanes have a token above this bound
        width = top * 0.0 + 0.25
        while (tl.sum((largest >= top - width).to(tl.int32), 0) < top_k) & (width < _FAR):
            width *= 1.25
        bound = tl.maximum(bound, top - width)
    elif top_p < 1.0:  # all tokens below this bound together have less probability than top_p cuts off
        bound = tl.maximum(bound, top + tl.log(1.0 - top_p) - log_vocab)
    count = best * 0
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if (wrong == 0) & (not greedy):
        for start in range(0, vocab, BLOCK):
            column = start + lane
            x = _scaled(logits_ptr, bitmask_ptr, column, vocab, temperature, MASKED)
            kept = x >= bound
            total += tl.where(x >= floor, tl.exp(x - top), 0.0)
            slot = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(values_ptr + slot, x, mask=kept)
            tl.store(tokens_ptr + slot, column, mask=kept)
            count += tl.sum(kept.to(tl.int32), 0)
    if count == 0:  # argmax of a greedy row, or a placeholder of a row with an error
        tl.store(values_ptr, 0.0)
        tl.store(tokens_ptr, best)
    tl.store(heads_ptr + row * 2, tl.where(count == 0, 0.0, top))
    tl.store(heads_ptr + row * 2 + 1, tl.sum(total, 0))
    tl.store(sizes_ptr + row * 2, tl.maximum(count, 1))
    tl.store(sizes_ptr + row * 2 + 1, wrong)


@triton.jit
def _key(x):
    """Map float32 to int64 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _above(values_ptr, size, key, top, BLOCK: tl.constexpr):
    """Count the candidates with a key of at least `key`, and sum their exponentials in float64."""
    lane = tl.arange(0, BLOCK)
    count = (key * 0).to(tl.int32)
    mass = count.to(tl.float64)
    for start in range(0, size, BLOCK):
        x = tl.load(values_ptr + start + lane, mask=start + lane < size, other=float("-inf"))
        kept = (start + lane < size) & (_key(x) >= key)
        count += tl.sum(kept.to(tl.int32), 0)
        mass += tl.sum(tl.where(kept, tl.exp(x - top), 0.0).to(tl.float64), 0)
    return count, mass


@triton.jit
def _sample_kernel(params_ptr, values_ptr, tokens_ptr, heads_ptr, sizes_ptr, out_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    values_ptr += row * vocab
    tokens_ptr += row * vocab
    top_k = tl.load(params_ptr + row * 5 + 1).to(tl.int32)
    top_p = tl.load(params_ptr + row * 5 + 2)
    log_min_p = tl.load(params_ptr + row * 5 + 3).to(tl.float32)
    number = tl.load(params_ptr + row * 5 + 4)
    top = tl.load(heads_ptr + row * 2)
    total = tl.load(heads_ptr + row * 2 + 1).to(tl.float64)
    size = tl.load(sizes_ptr + row * 2)
    over = _key(top) + 1
    low = _key(tl.maximum(top + log_min_p, top - _FAR))
    count, mass = _above(values_ptr, size, low, top, BLOCK)
    top_k = tl.where((top_k > 0) & (top_k < vocab), top_k, 0)
    if (top_k > 0) & (count > top_k):  # find the largest key that top_k candidates reach
        high, high_count, high_mass = over, count * 0, mass * 0.0
        while (high - low > 1) & (count > top_k):
            middle = low + (high - low) // 2
            some, part = _above(values_ptr, size, middle, top, BLOCK)
            if some >= top_k:
                low, count, mass = middle, some, part
            else:
                high, high_count, high_mass = middle, some, part
        ties = (top_k - high_count) * tl.exp(_from_key(low) - top).to(tl.float64)
        total = tl.where(count > top_k, high_mass + ties, mass)
    elif top_k > 0:
        total = mass
    if top_p < 1.0:  # find the largest key above which the probabilities reach top_p
        target = top_p * total
        high, high_count = over, count * 0
        while (high - low > 1) & (count - high_count > 1):
            middle = low + (high - low) // 2
            some, part = _above(values_ptr, size, middle, top, BLOCK)
            if part >= target:
                low, count = middle, some
            else:
                high, high_count = middle, some
    count, mass = _above(values_ptr, size, low, top, BLOCK)
    target = number * mass
    lane = tl.arange(0, BLOCK)
    before = mass * 0.0
    token = tl.load(tokens_ptr)
    is_found = count * 0
    start = count * 0
    while (start < size) & (is_found == 0):
        x = tl.load(values_ptr + start + lane, mask=start + lane < size, other=float("-inf"))
        kept = (start + lane < size) & (_key(x) >= low)
        share = tl.where(kept, tl.exp(x - top), 0.0).to(tl.float64)
        sums = before + tl.cumsum(share, 0)
        last = tl.max(tl.where(share > 0.0, lane, -1), 0)  # if rounding leaves no sum above the target
        hit = tl.min(tl.where((sums > target) & (share > 0.0), lane, BLOCK), 0)
        is_found = (hit < BLOCK).to(tl.int32)
        hit = tl.minimum(hit, last)
        if hit >= 0:
            token = tl.load(tokens_ptr + start + hit)
        before += tl.sum(share, 0)
        start += BLOCK
    tl.store(out_ptr + row, token.to(tl.int64))


def sample(logits: Tensor, params: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `sampling.sample_reference`."""
    rows, vocab = logits.shape
    logits = logits.contiguous()
    values, tokens = (torch.empty((rows, vocab), dtype=kind, device=logits.device) for kind in (torch.float32, torch.int32))
    heads = torch.empty((rows, 2), dtype=torch.float32, device=logits.device)
    sizes = torch.empty((rows, 2), dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        words = 0 if bitmask is None else bitmask.shape[1]
        _gather_kernel[(rows,)](
            logits, params, bitmask, values, tokens, heads, sizes, vocab, words, math.log(vocab),
            MASKED=bitmask is not None, **launch_config.get_config("gather_candidates"),
        )  # fmt: skip
        _sample_kernel[(rows,)](params, values, tokens, heads, sizes, out, vocab, **launch_config.get_config("sample"))
    return out, sizes[:, 1].long()


@triton.jit
def _log_probs_kernel(logits_ptr, tokens_ptr, own_ptr, ranks_ptr, totals_ptr, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    lane = tl.arange(0, BLOCK)
    chosen = tl.load(logits_ptr + tl.load(tokens_ptr + row)).to(tl.float32)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    above = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits_ptr + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
        above += (x > chosen).to(tl.int32)
    top = tl.max(largest, 0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits_ptr + start + lane, mask=start + lane < vocab, other=float("-inf")).to(tl.float32)
        total += tl.exp(x - top)
    total = top + tl.log(tl.sum(total, 0))
    tl.store(own_ptr + row, chosen - total)
    tl.store(ranks_ptr + row, tl.sum(above, 0).to(tl.int64) + 1)
    tl.store(totals_ptr + row, total)


def log_probs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sampling.log_probs_reference`."""
    rows, vocab = logits.shape
    log_prob, totals = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    ranks = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _log_probs_kernel[(rows,)](
            logits.contiguous(), tokens, log_prob, ranks, totals, vocab, **launch_config.get_config("log_probs")
        )
    return log_prob, ranks, totals


@triton.jit(do_not_specialize=["size"])
def _penalties_kernel(logits_ptr, rows_ptr, tokens_ptr, counts_ptr, penalties_ptr, size, vocab, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < size
    row = tl.load(rows_ptr + entry, mask=inside, other=0)
    at = row * vocab + tl.load(tokens_ptr + entry, mask=inside, other=0)
    count = tl.load(counts_ptr + entry, mask=inside, other=0.0)
    repeat = tl.load(penalties_ptr + row * 3, mask=inside, other=1.0)
    presence = tl.load(penalties_ptr + row * 3 + 1, mask=inside, other=0.0)
    frequency = tl.load(penalties_ptr + row * 3 + 2, mask=inside, other=0.0)
    x = tl.load(logits_ptr + at, mask=inside, other=0.0)
    x = tl.where(x > 0, tl.div_rn(x, repeat), x * repeat)
    tl.store(logits_ptr + at, x - frequency * count - presence * (count > 0).to(tl.float32), mask=inside)


def apply_penalties_(logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Compute `sampling.apply_penalties_reference_`."""
    size, sizes = len(tokens), launch_config.get_config("penalties")
    if size:
        grid = (triton.cdiv(size, sizes["BLOCK"]),)
        _penalties_kernel[grid](logits, rows, tokens, counts, penalties, size, logits.shape[1], **sizes)
