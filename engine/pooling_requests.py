"""The results that a request may ask for instead of an answer: a vector, classes, logits and others, a type for each.

Callers write `PoolingParams`, as in vLLM; `PoolingParams.request` checks them together and returns one of these.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptVector:
    """One vector of the prompt, float32 `[n]`.

    Args:
        modes: poolings of hidden states, see `PoolingParams`; the vectors of several are joined.
        skip_tokens: number of tokens at the start that are left out of the pooling.
        normalize: scale it to length 1. None: if the model does.
    """

    modes: tuple[str, ...]
    skip_tokens: int = 0
    normalize: bool | None = None


@dataclass(frozen=True)
class PromptClasses:
    """Numbers of the prompt's classes, float32 `[classes]`. `activates`: probabilities, else logits."""

    modes: tuple[str, ...]
    skip_tokens: int = 0
    activates: bool = True


@dataclass(frozen=True)
class TokenVectors:
    """A vector of each token, float32 `[tokens, n]`. `normalize`: as in `PromptVector`."""

    normalize: bool | None = None


@dataclass(frozen=True)
class TokenClasses:
    """Numbers of each token's classes, float32 `[tokens, classes]`. `activates`: probabilities, else logits."""

    activates: bool = True


@dataclass(frozen=True)
class LayerStates:
    """The hidden states after `layer` decoder layers, unchanged, `[tokens, hidden]`."""

    layer: int


@dataclass(frozen=True)
class TokenLogits:
    """The logits of these tokens after the prompt, float32 `[token_ids]`."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class LikelyTokens:
    """The likeliest next tokens, float32 `[3, count]`: see `PoolingParams.candidates`.

    Args:
        answer_tokens: number of the prompt's last tokens that logits processors see as the answer.
    """

    count: int
    answer_tokens: int = 0


@dataclass(frozen=True)
class CrossAttentionWeights:
    """Cross-attention weights of these (layer, head) pairs, float32 `[heads, tokens, encoder rows]`."""

    heads: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SpokenPrompt:
    """The speech of a prompt, float32 `[tokens + samples]`: the frames of each token, then the samples.

    Args:
        style: of the voice. speed: 2 halves the durations. seed: of the noise.
    """

    style: tuple[float, ...]
    speed: float
    seed: int


PooledPrompt = PromptVector | PromptClasses
PooledTokens = TokenVectors | TokenClasses | LayerStates
PoolingRequest = PooledPrompt | PooledTokens | TokenLogits | LikelyTokens | CrossAttentionWeights | SpokenPrompt


def keeps_rows(pooling: PoolingRequest | None) -> bool:
    """Return whether the result needs hidden states of other tokens than the last."""
    return isinstance(pooling, PooledTokens | SpokenPrompt) or (
        isinstance(pooling, PooledPrompt) and pooling.modes != ("last",)
    )
