"""Efficient video sampling: the rows of a video that differ least from those of the frame before are dropped.

Sources: `compute_retention_mask` of transformers' Nemotron-H Omni; vLLM's nano_nemotron_vl.py puts the text between the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from ...mm.geometry import retained_rows


def prune_video(rows: Tensor, text: Tensor, lengths: Sequence[int], rate: float) -> Tensor:
    """Return the rows that remain, frame by frame, with the text around those of each frame. No value leaves the device.

    Args:
        rows: `[frames * n, width]`. All rows of the first frame remain.
        text: `[sum(lengths) + frames, width]`, the embeddings of the tokens before the rows of each frame, of which there are
            `lengths`, and of the token after them.
        rate: share of the rows that are dropped, see `retained_rows`.
    """
    frames, device = len(lengths), rows.device
    each = len(rows) // frames
    similar = F.cosine_similarity(rows[each:], rows[:-each], dim=-1)
    change = torch.cat((rows.new_full((each,), 255.0), 1 - similar))
    chosen = change.argsort(descending=True, stable=True)[: retained_rows(each, frames, rate)].sort().values
    rows_before = torch.searchsorted(chosen, torch.arange(0, len(rows) + 1, each, device=device))  # each frame, and the end
    text_before = torch.tensor([total + frame for frame, total in enumerate(accumulate(lengths))]).to(device)
    next_frame = torch.tensor([frame + end for frame, length in enumerate(lengths) for end in (*[0] * length, 1)]).to(device)
    out = rows.new_empty(len(chosen) + len(text), rows.shape[1])
    out[torch.arange(len(chosen), device=device) + text_before[chosen // each]] = rows[chosen]
    out[torch.arange(len(text), device=device) + rows_before[next_frame]] = text.to(rows.dtype)
    return out
