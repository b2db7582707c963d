"""Pooling parameters of a request that returns a vector instead of generating tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..mm.errors import InputError, check_utf8, hints_at_arguments, short_repr
from .param_checks import check_token_ids

_MAX_DIMENSIONS = 2**31 - 1


@hints_at_arguments
@dataclass(frozen=True)
class PoolingParams:
    """Parameters of a request that computes a vector from the hidden state of the prompt's last token.

    Args:
        token_ids: return the logits of these tokens; if empty, return the hidden state, scaled to length 1.
        dimensions: `LLM.encode` and `LLM.embed` cut the vector to this length and scale it to length 1 again.
        task: the pooling task of `LLM.encode` if the call gives none: "embed", or "classify" or "score" for class
            probabilities.
        first_tokens: number of tokens of a pair's first text; the other tokens have token type 1. None: all have type 0.
        normalize: if False, vectors are not scaled to length 1. use_activation: if False, classes have logits.
    """

    token_ids: tuple[int, ...] = ()
    dimensions: int | None = None
    task: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    first_tokens: int | None = None

    @property
    def classifies(self) -> bool:
        return not self.token_ids and self.task in ("classify", "score")

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", check_token_ids("pooling.token_ids", self.token_ids))
        size = self.dimensions
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= _MAX_DIMENSIONS):
            raise InputError(f"dimensions={short_repr(size)} must be an integer, 1 or above", param="pooling.dimensions")
        first = self.first_tokens
        if first is not None and (isinstance(first, bool) or not isinstance(first, int) or first < 0):
            reason = f"first_tokens={short_repr(first)} must be an integer, 0 or above, or None"
            raise InputError(reason, param="pooling.first_tokens")
        if not isinstance(self.task, str | None):
            raise InputError(f"task={short_repr(self.task)} must be a text or None", param="pooling.task")
        check_utf8(self.task or "", "pooling.task")
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InputError(
                    f"{name}={short_repr(getattr(self, name))} must be True, False or None", param=f"pooling.{name}"
                )
