"""Pooling: returns the hidden state of a prompt's last row, the logits of a few tokens, or classes, instead of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from ...models.interface import Model, SupportsClassification
from ..pooling_params import PoolingParams


def pool(hidden: Tensor, params: Sequence[PoolingParams], model: Model) -> list[Tensor]:
    """Return float32 `[hidden]`, `[tokens]` or `[classes]` for each of the last rows `[n, hidden]`, on the CPU."""
    logits = model.compute_logits(hidden) if any(one.token_ids for one in params) else hidden
    return [_pool_row(hidden[i : i + 1], logits[i], one, model).float().cpu().clone() for i, one in enumerate(params)]


def _pool_row(hidden: Tensor, logits: Tensor, params: PoolingParams, model: Model) -> Tensor:
    if params.token_ids:
        return logits[list(params.token_ids)]
    if params.classifies:
        assert isinstance(model, SupportsClassification)
        return model.classify(hidden, params.use_activation is not False)[0]
    return hidden[0] if params.normalize is False else F.normalize(hidden[0].float(), dim=-1)
