"""Sampling of tokens and log probabilities for all rows of a batch.

Tokens as likely as the last kept one are kept, too, so the result never depends on a sort order.
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import backend, implementation
from .reference import NO_TOKEN_ALLOWED as NO_TOKEN_ALLOWED
from .reference import NOT_FINITE as NOT_FINITE


def sample(logits: Tensor, params: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sample one token per row. Returns tokens and status (0, NO_TOKEN_ALLOWED or NOT_FINITE), int64 `[rows]` each.

    On a GPU, nothing is read on the host.

    Args:
        logits: float32 or half precision, `[rows, vocab]`. May be overwritten.
        params: float64 `[rows, 5]`: temperature (0: argmax), top_k (0: all), top_p, log of min_p (-inf: all), and a uniform
            random number in [0, 1) that picks one of the kept tokens, in the order of their ids.
        bitmask: int32 `[rows, words]`, one bit per token, lowest first; None allows all tokens.
    """
    sampled: tuple[Tensor, Tensor] = implementation("sample", logits.device, logits.dtype).sample(logits, params, bitmask)
    return sampled


def apply_penalties_(logits: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Apply repetition, presence and frequency penalties in place.

    Args:
        logits: float32 `[rows, vocab]`, contiguous.
        rows, tokens: int64 `[n]`: (row, token) pairs of the tokens in prompt and output, each pair once.
        counts: float32 `[n]`, occurrences in the output.
        penalties: float32 `[rows, 3]`: repetition (divides or multiplies), presence and frequency (subtracted).
    """
    implementation("penalties", logits.device, logits.dtype).apply_penalties_(logits, rows, tokens, counts, penalties)


def top_log_probs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log probability and rank of one token per row, and ids and log probabilities of the `count` likeliest tokens.

    Shapes are `[rows]`, `[rows]`, `[rows, count]` and `[rows, count]`. `tokens` is int64 `[rows]`.
    """
    if logits.device.type != "cpu" or backend("log_probs", logits.device, logits.dtype) == "triton":
        return top_log_probs_fused(logits, tokens, count)
    table = logits.float().log_softmax(-1)  # on a CPU its bits do not depend on the other rows, unlike those of logsumexp
    log_prob = table.gather(-1, tokens[:, None])
    best = table.topk(count, -1)
    return log_prob[:, 0], (table > log_prob).sum(-1) + 1, best.indices, best.values


def top_log_probs_fused(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `top_log_probs` with `log_probs`, without a table of all log probabilities."""
    log_prob, ranks, totals = log_probs(logits, tokens)
    best = logits.topk(count, -1)
    return log_prob, ranks, best.indices, best.values.float() - totals[:, None]


def log_probs(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log probability and rank (1: the likeliest) of one token per row, and the row's logsumexp.

    They are float32, int64, float32, `[rows]` each. `tokens` is int64 `[rows]`. Any logit minus the logsumexp is that token's
    log probability.
    """
    result: tuple[Tensor, Tensor, Tensor] = implementation("log_probs", logits.device, logits.dtype).log_probs(logits, tokens)
    return result
