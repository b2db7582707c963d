"""From logits to one token per row: temperature, then min_p, top_k, top_p, then the draw. Knows no sequence.

On the CPU rows are drawn one by one: numpy partitions and sorts float32 many times faster than torch does there, and a row
cannot depend on its neighbours. Elsewhere all rows are drawn at once where they are. Both keep tokens that are equal to the
last one kept, so that no order is left to chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .sampling_params import SamplingParams

_FIRST = 4096  # largest tokens, which are enough for top_p as a rule; else all are sorted
_BLOCK = 256  # tokens whose sum is made at once


def likeliest(logits: Tensor) -> list[int]:
    """The first of the largest logits of each row."""
    if logits.device.type != "cpu":
        return logits.argmax(-1).tolist()  # type: ignore[no-any-return]
    return logits.numpy().argmax(-1).tolist()  # type: ignore[no-any-return]


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """One token of each row of float32 `[rows, vocab]`; `numbers` in [0, 1) say which."""
    if logits.device.type != "cpu":
        return draw_together(logits, params, numbers)
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


def draw_together(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """As `draw`, on any device and without a loop over rows."""
    logits = logits / _column([p.temperature for p in params], logits)
    _mask_min_p(logits, params)
    _mask_top(logits, params)
    mass = logits.softmax(-1, dtype=torch.float64).cumsum(-1)  # [rows, vocab]
    total = mass[:, -1:].contiguous()
    found = torch.searchsorted(mass, _column(numbers, mass) * total, right=True)
    return torch.minimum(found, torch.searchsorted(mass, total)).squeeze(-1).tolist()  # type: ignore[no-any-return]


def _mask_min_p(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    if any(p.min_p > 0 for p in params):
        floor = logits.amax(-1, keepdim=True) + _column([p.min_p for p in params], logits).log()
        logits.masked_fill_(logits < floor, -torch.inf)


def _mask_top(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """top_k, then top_p of what is left, in place."""
    vocab = logits.shape[1]
    need = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
    if not need:
        return
    keep = [params[i].top_k if 0 < params[i].top_k < vocab else vocab for i in need]
    part = logits if len(need) == len(params) else logits[need]
    best = part.topk(max(keep), dim=-1).values  # [n, most kept], from high to low
    best.masked_fill_(torch.arange(best.shape[1], device=best.device) >= _column(keep, best), -torch.inf)
    probs = best.softmax(-1)
    before = probs.cumsum(-1) - probs
    inside = (before < _column([params[i].top_p if params[i].top_p < 1.0 else 2.0 for i in need], best)) & (best > -torch.inf)
    inside[:, 0] = True
    floor = best.gather(-1, inside.sum(-1, keepdim=True) - 1)
    logits[need] = part.masked_fill(part < floor, -torch.inf)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
