"""From logits to one token per row on a CPU: temperature, then min_p, top_k, top_p, then the draw. Knows no sequence.

Rows are drawn one by one: numpy partitions and sorts float32 many times faster than torch does there, and a row cannot depend
on its neighbours. Tokens that are equal to the last one kept are kept too, so that no order is left to chance. On other
devices all rows are drawn at once (`kernels.sampling`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .sampling_params import SamplingParams

_FIRST = 4096  # largest tokens, which are enough for top_p as a rule; else all are sorted
_BLOCK = 256  # tokens whose sum is made at once


def likeliest(logits: Tensor) -> list[int]:
    """The first of the largest logits of each row."""
    return logits.numpy().argmax(-1).tolist()  # type: ignore[no-any-return]


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """One token of each row of float32 `[rows, vocab]`; `numbers` in [0, 1) say which."""
    return [_draw_row(*entry) for entry in zip(logits, params, numbers, strict=True)]


def _draw_row(logits: Tensor, params: SamplingParams, number: float) -> int:
    probs: np.ndarray = (logits / params.temperature).softmax(-1).numpy()
    floor = _floor(probs, params)
    return _crossing(probs if floor is None else probs * (probs >= floor), number)


def _floor(probs: np.ndarray, params: SamplingParams) -> np.float32 | None:
    """The smallest probability that is kept; None keeps all."""
    vocab, floor = len(probs), np.float32(params.min_p) * probs.max() if params.min_p else None
    if 0 < params.top_k < vocab:
        best = _best(probs, params.top_k, floor)
        return _nucleus(best, params.top_p)
    if params.top_p >= 1.0:
        return floor
    total = probs.sum() if floor is None else probs[probs >= floor].sum()
    if vocab > 4 * _FIRST:  # else sorting all is as fast
        best = _best(probs, _FIRST, floor)
        share = params.top_p * float(total) / float(best.sum())
        if share < 1.0:
            return _nucleus(best, share)
    return _nucleus(_best(probs, vocab, floor), params.top_p)


def _best(probs: np.ndarray, count: int, floor: np.float32 | None) -> np.ndarray:
    """The `count` largest that are not below `floor`, from low to high."""
    first = len(probs) - count
    best = np.sort(np.partition(probs, first)[first:] if first else probs)
    return best if floor is None else best[best >= floor]


def _nucleus(best: np.ndarray, share: float) -> np.float32:
    """The last of the largest that are needed to reach this share of them."""
    return best[_crossing(best, 1.0 - share)]  # type: ignore[no-any-return]


def _crossing(values: np.ndarray, share: float) -> int:
    """Where the running sum exceeds this share of all, from 0 and below 1; always at a value above 0.

    In blocks, since a running sum is made one value after the other.
    """
    sums = np.add.reduceat(values, np.arange(0, len(values), _BLOCK)).cumsum(dtype=np.float64)
    target = share * sums[-1]
    first = _above(sums, target) * _BLOCK
    rest = target - (sums[first // _BLOCK - 1] if first else 0.0)
    return first + _above(values[first : first + _BLOCK].cumsum(dtype=np.float64), rest)


def _above(sums: np.ndarray, target: float) -> int:
    """The first of the running sums above the target, or, where rounding left none, the first that is as large as the last."""
    found = int(sums.searchsorted(target, "right"))
    return found if found < len(sums) else int(sums.searchsorted(sums[-1]))
