"""Pooling parameters of a request that returns a vector instead of generating tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .sampling_params import check_token_ids


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of a request that computes a vector from the hidden state of the prompt's last token.

    Args:
        token_ids: return the logits of these tokens; if empty, return the hidden state, scaled to length 1.
    """

    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", check_token_ids("pooling.token_ids", self.token_ids))
