"""Pooling parameters of a request that returns a vector instead of generating tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..callers.errors import InputError, check_utf8, hints_at_arguments, short_repr
from .param_checks import check_token_ids, read_truncation
from .pooling_requests import (
    CrossAttentionWeights,
    LayerStates,
    LikelyTokens,
    PoolingRequest,
    PromptClasses,
    PromptVector,
    TokenClasses,
    TokenLogits,
    TokenVectors,
)

_MAX_NUMBER = 2**31 - 1
_MAX_HEADS = 1024
_MAX_TOKENS = 1 << 20  # a whole vocabulary
_MAX_CANDIDATES = 1024
POOLINGS = ("last", "cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "tokens")


@hints_at_arguments
@dataclass(frozen=True)
class PoolingParams:
    """Parameters of a request that computes a vector from the hidden states of the prompt.

    Args:
        token_ids: return the logits of these tokens after the prompt; if empty, return the vector, scaled to length 1.
        pooling: the hidden states that make the vector: "last" or "cls" (the last or first token), "mean" (of all tokens),
            "max" (the largest value of each number), "mean_sqrt_len_tokens" (their sum divided by the root of their count),
            "weightedmean" (of all tokens, token i with weight i), several of these joined by "+", whose vectors are joined, or
            "tokens": a vector for each token, `[tokens, n]`. None: what the checkpoint is made for, "last" if it does not say.
        dimensions: `LLM.encode` and `LLM.embed` cut the vector to this length and scale it to length 1 again.
        task: the pooling task of `LLM.encode` if the call gives none: "embed", "token_embed" (which sets the pooling "tokens"),
            "classify" or "score" for class probabilities, or "token_classify" for those of each token.
        first_tokens: number of tokens of a pair's first text; the other tokens have token type 1. None: all have type 0.
        normalize: if False, vectors are not scaled to length 1. use_activation: if False, classes have logits.
        cross_attention: (layer, head) pairs of an encoder-decoder model: return the cross-attention weights of these heads,
            `[heads, tokens, encoder rows]`.
        candidates: return the likeliest next tokens after the request's logits processors, at most 1024, as float32
            `[3, candidates]`: ids, log probabilities among the tokens that the processors allow, and scores, the log
            probabilities among all tokens, changed by the processors (float32's minimum if forbidden).
        answer_tokens: number of the prompt's last tokens that these processors see as the answer.
        truncate_prompt_tokens: cut a longer prompt to this many tokens, special tokens included; -1: to the model's maximum.
            None: `embed` cuts texts to the limit that a checkpoint of sentence-transformers states; other long prompts are
            refused.
        truncation_side: "right" keeps the first tokens, "left" the last; None: as the tokenizer's files say, else "right".
        skip_tokens: number of tokens at the start of the prompt that are left out of the pooling.
        layer: with pooling="tokens", return the hidden states after this many decoder layers, unchanged, instead of vectors.
    """

    token_ids: tuple[int, ...] = ()
    dimensions: int | None = None
    task: str | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    first_tokens: int | None = None
    cross_attention: tuple[tuple[int, int], ...] = ()
    candidates: int | None = None
    answer_tokens: int = 0
    pooling: str | None = None
    layer: int | None = None
    skip_tokens: int = 0
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None

    @property
    def classifies(self) -> bool:
        return not self.token_ids and self.task in ("classify", "score")

    @property
    def classifies_tokens(self) -> bool:
        return self.task == "token_classify"

    def request(self, default: str) -> PoolingRequest:
        """Return what is asked for. `default`: the pooling if `pooling` is None.

        Raises:
            InputError: the default pooling does not go with the other parameters.
        """
        if self.candidates is not None:
            return LikelyTokens(self.candidates, self.answer_tokens)
        if self.cross_attention:
            return CrossAttentionWeights(self.cross_attention)
        if self.token_ids:
            return TokenLogits(self.token_ids)
        if self.pooling is None:
            return replace(self, pooling=default).request(default)
        if self.classifies_tokens:
            return TokenClasses(self.use_activation is not False)
        if self.layer is not None:
            return LayerStates(self.layer)
        if self.pooling == "tokens":
            return TokenVectors(self.normalize)
        modes = tuple(self.pooling.split("+"))
        if self.classifies:
            return PromptClasses(modes, self.skip_tokens, self.use_activation is not False)
        return PromptVector(modes, self.skip_tokens, self.normalize)

    def __post_init__(self) -> None:
        self._check_types()
        object.__setattr__(self, "token_ids", check_token_ids("token_ids", self.token_ids, _MAX_TOKENS))
        _check_count("dimensions", self.dimensions, 1)
        _check_count("first_tokens", self.first_tokens, 0)
        _check_count("candidates", self.candidates, 1, _MAX_CANDIDATES)
        _check_count("answer_tokens", self.answer_tokens, 0)
        _check_count("layer", self.layer, 1)
        object.__setattr__(self, "cross_attention", _check_heads(self.cross_attention))
        if self.task in ("token_embed", "token_classify"):
            self._pool_tokens()
        _check_count("skip_tokens", self.skip_tokens, 0)
        check_pooling(self.pooling)
        read_truncation(self.truncate_prompt_tokens, self.truncation_side)
        other = self.token_ids or self.candidates or self.cross_attention
        if self.layer is not None and (self.pooling != "tokens" or other):
            raise InputError('layer is for hidden states of tokens; set pooling="tokens", or leave it out', param="layer")
        if self.layer is not None and (self.dimensions is not None or self.normalize):
            reason = "layer returns hidden states unchanged; leave out dimensions and normalize=True"
            raise InputError(reason, param="layer")
        if self.layer is not None and self.classifies_tokens:
            raise InputError("layer and token_classify ask for different results; leave one out", param="layer")
        if self.pooling == "tokens" and self.classifies:
            reason = (
                'classes are those of a prompt; leave out pooling, or set <<task=>>"token_classify" for those of its tokens'
            )
            raise InputError(reason, param="pooling")
        self._check_candidates()

    def _check_types(self) -> None:
        if not isinstance(self.task, str | None):
            raise InputError(f"<<param=>>{short_repr(self.task)} must be a string or None", code="invalid_value", param="task")
        check_utf8(self.task or "", "task")
        for name in ("normalize", "use_activation"):
            if not isinstance(getattr(self, name), bool | None):
                raise InputError(
                    f"<<param=>>{short_repr(getattr(self, name))} must be True, False or None", code="invalid_value", param=name
                )

    def _pool_tokens(self) -> None:
        """Set the pooling of a task whose result is one for each token. Raise InputError if something else is asked for."""
        what = "classes" if self.classifies_tokens else "vectors"
        if self.token_ids or self.cross_attention:
            reason = f'<<task=>>"{self.task}" returns {what} of tokens; leave out task, or token_ids and cross_attention'
            raise InputError(reason, param="task")
        if self.pooling not in (None, "tokens"):
            reason = f'<<task=>>"{self.task}" needs pooling="tokens", not {short_repr(self.pooling)}; leave one of them out'
            raise InputError(reason, param="pooling")
        object.__setattr__(self, "pooling", "tokens")

    def _check_candidates(self) -> None:
        """Raise InputError if `candidates` are asked for together with another result, or `answer_tokens` without them."""
        others = ("token_ids", "dimensions", "task", "first_tokens", "cross_attention", "pooling")
        named = [name for name in others if getattr(self, name)]
        if self.candidates is not None and named:
            raise InputError(f"candidates and {named[0]} ask for different results; leave one out", param="candidates")
        if self.answer_tokens and self.candidates is None:
            raise InputError("<<param>> is for candidates; give candidates, too", param="answer_tokens")


def check_pooling(pooling: object) -> None:
    """Raise InputError for a pooling, or poolings joined by "+", that `embed` does not have."""
    modes = pooling.split("+", maxsplit=len(POOLINGS)) if isinstance(pooling, str) else [pooling]
    valid = all(mode in POOLINGS for mode in modes) and (len(modes) == 1 or "tokens" not in modes)
    valid = valid and len(set(modes)) == len(modes)  # each mode takes memory of its own
    if pooling is not None and not valid:
        names = ", ".join(POOLINGS)
        raise InputError(
            f"<<param=>>{short_repr(pooling)} is unknown; give one of {names}", code="invalid_value", param="pooling"
        )


def _check_count(name: str, value: object, least: int, most: int = _MAX_NUMBER) -> None:
    valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    if value is not None and not valid:
        limits = f"{least} or above" if most == _MAX_NUMBER else f"from {least} to {most}"
        raise InputError(f"<<param=>>{short_repr(value)} must be an integer, {limits}", code="invalid_value", param=name)


def _check_heads(heads: object) -> tuple[tuple[int, int], ...]:
    if not (isinstance(heads, list | tuple) and len(heads) <= _MAX_HEADS and all(map(_is_head, heads))):
        reason = f"<<param=>>{short_repr(heads)} must be a list of at most {_MAX_HEADS} pairs (layer, head), from 0"
        raise InputError(reason, code="invalid_value", param="cross_attention")
    return tuple((layer, head) for layer, head in heads)


def _is_head(pair: object) -> bool:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return False
    return all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MAX_NUMBER for n in pair)
