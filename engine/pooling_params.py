"""Pooling parameters of a request that returns a vector instead of generating tokens."""

from __future__ import annotations

from dataclasses import dataclass

from ..mm.errors import InputError, check_utf8, hints_at_arguments, short_repr
from ..mm.plain import check_classes, reading
from .param_checks import check_token_ids

_MOST = 2**31 - 1
_MAX_HEADS = 1024
_MAX_TOKENS = 1 << 20  # a whole vocabulary


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
        cross_attention: (layer, head) pairs of an encoder-decoder model: return the cross-attention weights of these heads,
            `[heads, tokens, encoder rows]`.
    """

    token_ids: tuple[int, ...] = ()
    dimensions: int | None = None
    task: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    first_tokens: int | None = None
    cross_attention: tuple[tuple[int, int], ...] = ()

    @property
    def classifies(self) -> bool:
        return not self.token_ids and self.task in ("classify", "score")

    def __post_init__(self) -> None:
        check_classes(**{f"pooling.{name}": value for name, value in vars(self).items()})
        object.__setattr__(self, "token_ids", check_token_ids("pooling.token_ids", self.token_ids, _MAX_TOKENS))
        _check_count("dimensions", self.dimensions, 1)
        _check_count("first_tokens", self.first_tokens, 0)
        object.__setattr__(self, "cross_attention", _check_heads(self.cross_attention))
        if not isinstance(self.task, str | None):
            raise InputError(f"task={short_repr(self.task)} must be a text or None", param="pooling.task")
        check_utf8(self.task or "", "pooling.task")
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InputError(
                    f"{name}={short_repr(getattr(self, name))} must be True, False or None", param=f"pooling.{name}"
                )


def _check_count(name: str, value: object, least: int) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= _MOST
    if value is not None and not valid:
        raise InputError(f"{name}={short_repr(value)} must be an integer, {least} or above", param=f"pooling.{name}")


def _check_heads(given: object) -> tuple[tuple[int, int], ...]:
    with reading(given, "pooling.cross_attention"):
        valid = isinstance(given, list | tuple) and len(given) <= _MAX_HEADS and all(map(_is_head, given))
    if not valid:
        reason = f"cross_attention={short_repr(given)} must be a list of at most {_MAX_HEADS} pairs (layer, head), from 0"
        raise InputError(reason, param="pooling.cross_attention")
    return tuple((layer, head) for layer, head in given)  # type: ignore[attr-defined]


def _is_head(pair: object) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MOST for n in pair)
