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

_FIRST = 512  # most tokens that top_p keeps, as a rule; where it is more, all are sorted


def draw(logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[float]) -> list[int]:
    """One token of each row of float32 `[rows, vocab]`; `numbers` in [0, 1) say which."""
    if logits.device.type != "cpu":
        return draw_together(logits, params, numbers)
    probs = (logits / _column([p.temperature for p in params], logits)).softmax(-1).numpy()
    return [_draw_row(*entry) for entry in zip(probs, params, numbers, strict=True)]


def _draw_row(probs: np.ndarray, params: SamplingParams, number: float) -> int:
    floor = _floor(probs, params)
    ids = np.flatnonzero(probs >= floor) if floor > 0 else None
    mass = np.cumsum(probs if ids is None else probs[ids], dtype=np.float64)
    last = np.searchsorted(mass, mass[-1])  # where rounding says 1, not behind the last token that has any mass
    found = min(last, np.searchsorted(mass, number * mass[-1], side="right"))
    return int(found if ids is None else ids[found])


def _floor(probs: np.ndarray, params: SamplingParams) -> float:
    """The smallest probability that is kept; 0 keeps all."""
    vocab, floor = len(probs), params.min_p * float(probs.max()) if params.min_p else 0.0
    if 0 < params.top_k < vocab:
        best = _best(probs, params.top_k, floor)
        return _nucleus(best, float(best.sum()), params.top_p)
    if params.top_p >= 1.0:
        return floor
    total = float(probs[probs >= floor].sum() if floor else probs.sum())
    best = _best(probs, min(_FIRST, vocab), floor)
    if best.sum() < params.top_p * total:
        best = _best(probs, vocab, floor)
    return _nucleus(best, total, params.top_p)


def _best(probs: np.ndarray, count: int, floor: float) -> np.ndarray:
    """The `count` largest that are not below `floor`, from high to low."""
    first = len(probs) - count
    best = np.sort(np.partition(probs, first)[first:] if first else probs)[::-1]
    return best[best >= floor] if floor else best


def _nucleus(best: np.ndarray, total: float, share: float) -> float:
    """The last of the largest that are needed to reach this share of the total."""
    if share >= 1.0:
        return float(best[-1])
    before = np.cumsum(best, dtype=np.float64) - best
    return float(best[max(1, int(np.searchsorted(before, share * total))) - 1])


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
