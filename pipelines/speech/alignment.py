"""Times of tokens from cross-attention weights, by dynamic time warping (arXiv 2212.04356; openai-whisper's method)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_FILTER_WIDTH = 7  # encoder rows
_DIAGONAL, _TOKEN, _FRAME = 0, 1, 2  # steps of a path: to the next token and frame, to the next token, to the next frame


def token_starts(weights: Tensor, num_prefix: int, num_frames: int) -> np.ndarray:
    """Return the encoder row at which each token after the prefix begins, and the row at which the last one ends.

    Args:
        weights: `[heads, tokens, encoder rows]` of the prefix, the text and the end token.
        num_frames: encoder rows of the audio; the other rows are padding.
    """
    inside = weights[..., :num_frames]
    inside = inside / inside.sum(-1, keepdim=True)
    tokens, frames = time_warp(-alignment_matrix(inside)[num_prefix - 1 : -1])
    return frames[np.diff(tokens, prepend=-1) > 0]


def alignment_matrix(weights: Tensor) -> np.ndarray:
    """Return `[tokens, frames]`, large where a token was spoken: the mean of the heads' normalised and filtered weights."""
    deviation, mean = torch.std_mean(weights, -2, keepdim=True, unbiased=False)
    filtered = _median_filter((weights - mean) / deviation.clamp(min=1e-20))
    return filtered.mean(0).double().numpy()


def _median_filter(values: Tensor) -> Tensor:
    pad = _FILTER_WIDTH // 2
    if values.shape[-1] <= pad:
        return values
    return F.pad(values, (pad, pad), mode="reflect").unfold(-1, _FILTER_WIDTH, 1).sort(-1).values[..., pad]


def time_warp(costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cheapest monotone path through `[tokens, frames]`: the token and the frame of each of its points.

    Total costs are float32, and ties prefer the next frame, as in openai-whisper. Each antidiagonal is one vector operation.
    """
    rows, columns = costs.shape
    # total[d % 3][i]: cost of the path to token i - 1 and frame d - i - 1; skewed[d, i]: cost of that point
    skewed = np.zeros((rows + columns + 1, rows + 1))
    token, frame = np.indices(costs.shape)
    skewed[token + frame + 2, token + 1] = costs
    steps = np.full((rows + columns + 1, rows + 1), _FRAME, dtype=np.int8)
    total = np.full((3, rows + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0
    for d in range(1, rows + columns + 1):
        first, last = max(1, d - columns), min(rows, d - 1)
        current, before = total[d % 3], total[(d - 1) % 3]
        current[:] = np.inf
        if first > last:
            continue
        diagonal, up, left = total[(d - 2) % 3, first - 1 : last], before[first - 1 : last], before[first : last + 1]
        is_diagonal = (diagonal < up) & (diagonal < left)
        is_up = ~is_diagonal & (up < diagonal) & (up < left)
        steps[d, first : last + 1] = np.where(is_diagonal, _DIAGONAL, np.where(is_up, _TOKEN, _FRAME))
        best = np.where(is_diagonal, diagonal, np.where(is_up, up, left))
        current[first : last + 1] = skewed[d, first : last + 1] + best
    path = []
    i, j = rows, columns
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = _FRAME if i == 0 else _TOKEN if j == 0 else steps[i + j, i]
        i, j = i - (step != _FRAME), j - (step != _TOKEN)
    tokens, frames = np.array(path[::-1]).T
    return tokens, frames
