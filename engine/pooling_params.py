"""Pooling parameters of a request that returns a vector instead of generating tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PoolingParams:
    """What a request computes from the last token's hidden state of its prompt.

    Args:
        token_ids: return the logits of these tokens; if empty, return the hidden state, scaled to length 1.
    """

    token_ids: tuple[int, ...] = ()
