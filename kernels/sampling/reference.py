"""Sampling and log probabilities for all rows of a batch, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

NO_TOKEN_ALLOWED, NOT_FINITE = 1, 2
"""Reasons why a row cannot be sampled: no token is allowed; a logit is NaN or plus infinity."""


def sample(logits: Tensor, params: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute `sampling.sample`. min_p is relative to the likeliest token; top_k applies to what it keeps, then top_p."""
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
    first_above = torch.searchsorted(mass, params[:, 4:5] * total, right=True)
    drawn = torch.minimum(first_above, torch.searchsorted(mass, total)).squeeze(-1)
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
    """Compute `sampling.apply_penalties_`."""
    flat = rows * logits.shape[1] + tokens
    repeat, presence, frequency = penalties[rows].unbind(1)
    part = logits.take(flat)
    part = torch.where(part > 0, part / repeat, part * repeat)
    logits.put_(flat, part - frequency * counts - presence * (counts > 0))


def log_probs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `sampling.log_probs`."""
    logits = logits.float()
    logit, total = logits.gather(1, tokens[:, None]), logits.logsumexp(-1)
    return logit[:, 0] - total, (logits > logit).sum(-1) + 1, total
