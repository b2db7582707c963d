"""Sampling on a CPU, one row at a time in numpy, which partitions and sorts float32 many times faster than torch.

A row's token depends on that row alone. `reference.sample` states the rules.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .reference import NO_TOKEN_ALLOWED, NOT_FINITE

_CANDIDATES = 4096  # likeliest tokens, which usually hold all of top_p; if they do not, all tokens are sorted
_CHUNK = 256  # probabilities that are summed at once


def sample(logits: Tensor, params: Tensor, bitmask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Sample as `reference.sample` does, in float32. `logits` are overwritten where `bitmask` forbids tokens."""
    logits = logits.float()
    values = logits.numpy()
    if bitmask is not None:
        _mask_(values, bitmask.numpy())
    table = params.tolist()
    tokens, wrong = [0] * len(values), [0] * len(values)
    if not all(row[0] for row in table):
        tokens = values.argmax(-1).tolist()  # NaN counts as the largest
    for i, (row, (temperature, top_k, top_p, log_min_p, number)) in enumerate(zip(logits.unbind(), table, strict=True)):
        if not temperature:
            good = math.isfinite(values[i, tokens[i]])
        else:
            probs: np.ndarray = (row / temperature).softmax(-1).numpy()
            good = not math.isnan(probs[0])  # one NaN logit makes all of them NaN
            if good:
                threshold = _threshold(probs, int(top_k), top_p, math.exp(log_min_p))
                tokens[i] = _first_above(probs if threshold is None else probs * (probs >= threshold), number)
        if not good:
            wrong[i] = NO_TOKEN_ALLOWED if values[i].max() == -math.inf else NOT_FINITE
    return torch.tensor(tokens, dtype=torch.int64), torch.tensor(wrong, dtype=torch.int64)


def _mask_(values: np.ndarray, words: np.ndarray) -> None:
    """Set the logits of tokens whose bit in `words` is 0 to -inf, in place."""
    for i in np.flatnonzero((words != -1).any(-1)):
        allowed = np.unpackbits(words[i].view(np.uint8), count=values.shape[1], bitorder="little").view(bool)
        values[i, ~allowed] = -np.inf


def _threshold(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.float32 | None:
    """Return the smallest probability that is kept; None keeps all."""
    vocab, threshold = len(probs), np.float32(min_p) * probs.max() if min_p else None
    if 0 < top_k < vocab:
        return _nucleus(_largest(probs, top_k, threshold), top_p)
    if top_p >= 1.0:
        return threshold
    total = probs.sum() if threshold is None else probs[probs >= threshold].sum()
    if vocab > 4 * _CANDIDATES:  # sorting a smaller vocabulary is as fast
        candidates = _largest(probs, _CANDIDATES, threshold)
        share = top_p * float(total) / float(candidates.sum())
        if share < 1.0:
            return _nucleus(candidates, share)
    return _nucleus(_largest(probs, vocab, threshold), top_p)


def _largest(probs: np.ndarray, count: int, threshold: np.float32 | None) -> np.ndarray:
    """Return the `count` largest probabilities, without those below the threshold, in ascending order."""
    first = len(probs) - count
    largest = np.sort(np.partition(probs, first)[first:] if first else probs)
    return largest if threshold is None else largest[largest >= threshold]


def _nucleus(ascending: np.ndarray, share: float) -> np.float32:
    """Return the smallest value of the nucleus: of the largest values whose sum reaches this share of the total."""
    value: np.float32 = ascending[_first_above(ascending, 1.0 - share)]
    return value


def _first_above(values: np.ndarray, share: float) -> int:
    """Return the first index at which the running sum exceeds `share` (in [0, 1)) of the total. The value there is never 0.

    Chunks are summed first, because a running sum over all values adds them one by one.
    """
    sums = np.add.reduceat(values, np.arange(0, len(values), _CHUNK)).cumsum(dtype=np.float64)
    target = share * sums[-1]
    first = _search(sums, target) * _CHUNK
    rest = target - (sums[first // _CHUNK - 1] if first else 0.0)
    return first + _search(values[first : first + _CHUNK].cumsum(dtype=np.float64), rest)


def _search(sums: np.ndarray, target: float) -> int:
    """Return the index of the first running sum above the target; if rounding leaves none, of the first equal to the last."""
    index = int(sums.searchsorted(target, "right"))
    return index if index < len(sums) else int(sums.searchsorted(sums[-1]))
