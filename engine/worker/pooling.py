"""Pools the last row of a prompt: it returns the hidden state, or logits of a few tokens, instead of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor

from ..pooling_params import PoolingParams


def pool(hidden: Tensor, params: Sequence[PoolingParams], compute_logits: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return float32 `[hidden]` or `[tokens]` for each of the last rows `[n, hidden]`, on the CPU."""
    logits = compute_logits(hidden) if any(one.token_ids for one in params) else hidden
    vectors = F.normalize(hidden.float(), dim=-1)
    return [
        (logits[i, list(one.token_ids)] if one.token_ids else vectors[i]).float().cpu().clone() for i, one in enumerate(params)
    ]
