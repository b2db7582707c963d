"""Sampling of tokens and log probabilities for all rows of a batch, in torch and Triton; on a CPU, numpy samples.

Tokens as likely as the last kept one are kept, too, so the result never depends on a sort order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu_sampling
from .cpu_sampling import NO_TOKEN_ALLOWED as NO_TOKEN_ALLOWED
from .cpu_sampling import NOT_FINITE as NOT_FINITE
from .dispatch import backend


def sample(logits: Tensor, params: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sample one token per row. Returns tokens and status (0, NO_TOKEN_ALLOWED or NOT_FINITE), int64 `[rows]` each.

    On a GPU, nothing is read on the host.

    Args:
        logits: float32 or half precision, `[rows, vocab]`. May be overwritten.
        params: float64 `[rows, 5]`: temperature (0: argmax), top_k (0: all), top_p, log of min_p (-inf: all), and a uniform
            random number in [0, 1) that picks one of the kept tokens, in the order of their ids.
        bitmask: int32 `[rows, words]`, one bit per token, lowest first; None allows all tokens.
    """
    chosen = backend("sample", logits.device, logits.dtype)
    if chosen == "triton":
        from .gpu import sampling

        return sampling.sample(logits, params, bitmask)
    if chosen == "numpy":
        return cpu_sampling.sample(logits, params, bitmask)
    return sample_reference(logits, params, bitmask)


def sample_reference(logits: Tensor, params: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `sample` in torch. min_p is relative to the likeliest token; top_k applies to what it keeps, then top_p."""
    logits = logits.float()
    if bitmask is not None:
        logits = logits.masked_fill(~unpack_bitmask(bitmask, logits.shape[1]), -torch.inf)
    best = logits.amax(-1)  # NaN compares as the largest value
    wrong = torch.where(best == -torch.inf, NO_TOKEN_ALLOWED, torch.where(best.isfinite(), 0, NOT_FINITE))
    logits = logits.masked_fill((wrong > 0)[:, None], 0.0)  # their tokens are sampled and discarded
    greedy = params[:, 0] == 0
    scaled = logits / params[:, 0].masked_fill(greedy, 1.0).to(logits.dtype)[:, None]
    mass = scaled.masked_fill(scaled < min_kept_logit(scaled, params), -torch.inf).softmax(-1).cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:].contiguous()
    found = torch.searchsorted(mass, params[:, 4:5] * total, right=True)
    drawn = torch.minimum(found, torch.searchsorted(mass, total)).squeeze(-1)
    return torch.where(greedy, logits.argmax(-1), drawn), wrong


def min_kept_logit(scaled: Tensor, params: Tensor) -> Tensor:
    """Return the smallest logit that each row keeps, float32 `[rows, 1]`. `scaled` is logits divided by the temperature."""
    vocab = scaled.shape[1]
    floor = scaled.amax(-1, keepdim=True) + params[:, 3:4].to(scaled.dtype)
    top_k = torch.where(params[:, 1:2] > 0, params[:, 1:2], vocab).clamp(max=vocab)
    best = scaled.masked_fill(scaled < floor, -torch.inf).sort(-1, descending=True).values
    best.masked_fill_(torch.arange(vocab, device=best.device) >= top_k, -torch.inf)
    probs = best.softmax(-1)
    before = probs.cumsum(-1) - probs
    inside = ((before < params[:, 2:3]) | (params[:, 2:3] >= 1.0)) & (best > -torch.inf)
    inside[:, 0] = True
    return best.gather(-1, inside.sum(-1, keepdim=True) - 1)


def unpack_bitmask(words: Tensor, count: int) -> Tensor:
    """Unpack int32 `[rows, words]` to bool `[rows, count]`, lowest bit first."""
    each = words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (each & 1).bool().flatten(1)[:, :count]


def apply_penalties_(logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Apply repetition, presence and frequency penalties in place.

    Args:
        logits: float32 `[rows, vocab]`, contiguous.
        rows, tokens: int64 `[n]`: (row, token) pairs of the tokens in prompt and output, each pair once.
        counts: float32 `[n]`, occurrences in the output.
        penalties: float32 `[rows, 3]`: repetition (divides or multiplies), presence and frequency (subtracted).
    """
    if backend("penalties", logits.device, logits.dtype) == "triton":
        from .gpu import sampling

        sampling.apply_penalties_(logits, rows, tokens, counts, penalties)
    else:
        apply_penalties_reference_(logits, rows, tokens, counts, penalties)


def apply_penalties_reference_(logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Compute `apply_penalties_` in torch."""
    flat = rows * logits.shape[1] + tokens
    repeat, presence, frequency = penalties[rows].unbind(1)
    part = logits.take(flat)
    part = torch.where(part > 0, part / repeat, part * repeat)
    logits.put_(flat, part - frequency * counts - presence * (counts > 0))


def top_log_probs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log probability and rank of one token per row, and ids and log probabilities of the `count` likeliest tokens.

    Shapes are `[rows]`, `[rows]`, `[rows, count]` and `[rows, count]`. `tokens` is int64 `[rows]`.
    """
    if logits.device.type != "cpu" or backend("log_probs", logits.device, logits.dtype) == "triton":
        return top_log_probs_fused(logits, tokens, count)
    table = logits.float().log_softmax(-1)  # on a CPU its bits do not depend on the other rows, unlike those of logsumexp
    own = table.gather(-1, tokens[:, None])
    best = table.topk(count, -1)
    return own[:, 0], (table > own).sum(-1) + 1, best.indices, best.values


def top_log_probs_fused(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `top_log_probs` with `log_probs`, without a table of all log probabilities."""
    own, ranks, totals = log_probs(logits, tokens)
    best = logits.topk(count, -1)
    return own, ranks, best.indices, best.values.float() - totals[:, None]


def log_probs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probability and rank (1: the likeliest) of one token per row, and the row's logsumexp.

    They are float32, int64, float32, `[rows]` each. `tokens` is int64 `[rows]`. Any logit minus the logsumexp is that token's
    log probability.
    """
    if backend("log_probs", logits.device, logits.dtype) == "triton":
        from .gpu import sampling

        return sampling.log_probs(logits, tokens)
    return log_probs_reference(logits, tokens)


def log_probs_reference(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `log_probs` in torch."""
    logits = logits.float()
    own, total = logits.gather(1, tokens[:, None]), logits.logsumexp(-1)
    return own[:, 0] - total, (logits > own).sum(-1) + 1, total
