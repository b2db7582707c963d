"""From logits to tokens for all rows at once, and log probabilities: torch and Triton. Knows no sequence.

Tokens that are equal to the last one kept are kept too, so that no order is left to chance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .dispatch import backend

NOTHING_LEFT, NOT_FINITE = 1, 2
"""What may be wrong with a row: no token is allowed; NaN or plus infinity among its logits."""


def draw(logits: Tensor, rules: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One token of each row, and what is wrong with it: int64 `[rows]` each. Nothing is read on the host.

    Args:
        logits: float32 or half precision, `[rows, vocab]`.
        rules: float64 `[rows, 5]`: the temperature (0: the first of the likeliest is taken), top_k (0: all), top_p, the
            logarithm of min_p (-inf: all), and a number in [0, 1) that says which of the kept tokens is drawn, in the order
            of their ids.
        allowed: int32 `[rows, words]`, a bit for each token, the lowest first; None allows all.
    """
    if backend("draw", logits.device, logits.dtype) == "triton":
        from .gpu import sampling

        return sampling.draw(logits, rules, allowed)
    return draw_reference(logits, rules, allowed)


def draw_reference(logits: Tensor, rules: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `draw`. min_p is of the likeliest token's probability, top_k of what that leaves, top_p of what both leave."""
    logits = logits.float()
    if allowed is not None:
        logits = logits.masked_fill(~bits(allowed, logits.shape[1]), -torch.inf)
    best = logits.amax(-1)  # NaN is the largest of all
    wrong = torch.where(best == -torch.inf, NOTHING_LEFT, torch.where(best.isfinite(), 0, NOT_FINITE))
    logits = logits.masked_fill((wrong > 0)[:, None], 0.0)  # drawn and thrown away
    greedy = rules[:, 0] == 0
    scaled = logits / rules[:, 0].masked_fill(greedy, 1.0).to(logits.dtype)[:, None]
    mass = scaled.masked_fill(scaled < kept_from(scaled, rules), -torch.inf).softmax(-1).cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:].contiguous()
    found = torch.searchsorted(mass, rules[:, 4:5] * total, right=True)
    drawn = torch.minimum(found, torch.searchsorted(mass, total)).squeeze(-1)
    return torch.where(greedy, logits.argmax(-1), drawn), wrong


def kept_from(scaled: Tensor, rules: Tensor) -> Tensor:
    """The smallest float32 logit that is kept of each row, `[rows, 1]`; `scaled`: divided by the temperature."""
    vocab = scaled.shape[1]
    floor = scaled.amax(-1, keepdim=True) + rules[:, 3:4].to(scaled.dtype)
    top_k = torch.where(rules[:, 1:2] > 0, rules[:, 1:2], vocab).clamp(max=vocab)
    best = scaled.masked_fill(scaled < floor, -torch.inf).sort(-1, descending=True).values
    best.masked_fill_(torch.arange(vocab, device=best.device) >= top_k, -torch.inf)
    probs = best.softmax(-1)
    before = probs.cumsum(-1) - probs
    inside = ((before < rules[:, 2:3]) | (rules[:, 2:3] >= 1.0)) & (best > -torch.inf)
    inside[:, 0] = True
    return best.gather(-1, inside.sum(-1, keepdim=True) - 1)


def bits(words: Tensor, count: int) -> Tensor:
    """int32 `[rows, words]` -> bool `[rows, count]`, the lowest bit first."""
    each = words[..., None] >> torch.arange(32, dtype=torch.int32, device=words.device)
    return (each & 1).bool().flatten(1)[:, :count]


def penalise_(logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Make tokens that were there before less likely, in place.

    Args:
        logits: float32 `[rows, vocab]`, contiguous.
        rows, tokens: int64 `[n]`, where they are: the tokens of prompts and answers, each once a row.
        counts: float32 `[n]`, how often the answer holds them.
        penalties: float32 `[rows, 3]`: repetition (divides or multiplies), presence and frequency (subtracted).
    """
    if backend("penalise", logits.device, logits.dtype) == "triton":
        from .gpu import sampling

        sampling.penalise_(logits, rows, tokens, counts, penalties)
    else:
        penalise_reference_(logits, rows, tokens, counts, penalties)


def penalise_reference_(logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """See `penalise_`."""
    flat = rows * logits.shape[1] + tokens
    repeat, presence, frequency = penalties[rows].unbind(1)
    part = logits.take(flat)
    part = torch.where(part > 0, part / repeat, part * repeat)
    logits.put_(flat, part - frequency * counts - presence * (counts > 0))


def log_probs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row of `[rows, vocab]`: its token's log probability and rank (1: none is likelier), and the log of its sum.

    float32, int64, float32, `[rows]` each; `tokens`: int64 `[rows]`. A logit less the last is its log probability.
    """
    if backend("log_probs", logits.device, logits.dtype) == "triton":
        from .gpu import sampling

        return sampling.log_probs(logits, tokens)
    return log_probs_reference(logits, tokens)


def log_probs_reference(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `log_probs`."""
    logits = logits.float()
    own, total = logits.gather(1, tokens[:, None]), logits.logsumexp(-1)
    return own[:, 0] - total, (logits > own).sum(-1) + 1, total
