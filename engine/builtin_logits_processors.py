"""Logits processors that checkpoints and speech models need, registered by name."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .logits_processors import register_logits_processor

SUPPRESS_TOKENS, ALLOWED_TOKENS = "suppress_tokens", "allowed_tokens"
TIMESTAMPS, NO_REPEAT_NGRAMS = "timestamps", "no_repeat_ngrams"


@dataclass(frozen=True)
class SuppressTokens:
    """Forbid `tokens` everywhere, and the tokens of `first` as the first token of an answer."""

    tokens: Sequence[int] = ()
    first: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))  # JSON gives lists; equal processors run as one batch
        object.__setattr__(self, "first", tuple(self.first))

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        self.batch([self], [token_ids], logits[None])

    @staticmethod
    def batch(processors: Sequence[SuppressTokens], answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        keys = [(processor, not answer) for processor, answer in zip(processors, answers, strict=True)]
        for (processor, is_first), rows in _group(keys):
            tokens = (*processor.tokens, *processor.first) if is_first else processor.tokens
            logits[torch.tensor(rows)[:, None], _in_vocab(tokens, logits)] = -torch.inf


@dataclass(frozen=True)
class AllowedTokens:
    """Forbid all tokens but these."""

    tokens: Sequence[int]

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        allowed = _in_vocab(self.tokens, logits)
        values = logits[allowed]
        logits.fill_(-torch.inf)[allowed] = values


@dataclass(frozen=True)
class TimestampRules:
    """Rules for timestamps in transcripts: they come in pairs around text, never decrease, and win over text.

    A timestamp is forced as soon as the timestamps together are likelier than the likeliest text token.

    Args:
        first: the timestamp of 0 s; all tokens from it on are timestamps.
        none: the token that asks for no timestamps; it is never allowed.
        end: the first token that may follow the timestamp at the end of a text.
        latest: the answer begins with a timestamp of at most this many steps; None for no limit.

    Source: arXiv 2212.04356, section 2.3 and the appendix on long-form decoding.
    """

    first: int
    none: int
    end: int
    latest: int | None = None

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        self.batch([self], [token_ids], logits[None])

    @staticmethod
    def batch(processors: Sequence[TimestampRules], answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        for processor, rows in _group(processors):
            part = logits[rows]
            processor._apply([answers[row] for row in rows], part)
            logits[rows] = part

    def _apply(self, answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        bounds = torch.tensor([self._bounds(answer) for answer in answers], device=logits.device)  # [rows, 3]
        ids = torch.arange(logits.shape[1], device=logits.device)
        lowest_text, lowest_time, highest_time = bounds[:, None].unbind(2)  # each [rows, 1]
        is_text = ids < self.first
        forbidden = torch.where(is_text, ids < lowest_text, (ids < lowest_time) | (ids > highest_time))
        logits.masked_fill_(forbidden | (ids == self.none), -torch.inf)
        times, texts = logits[:, self.first :].logsumexp(1), logits[:, : self.first].amax(1)
        logits.masked_fill_((times > texts)[:, None] & is_text, -torch.inf)

    def _bounds(self, answer: Sequence[int]) -> tuple[int, int, int]:
        """Return the lowest text token, the lowest timestamp and the highest timestamp that may follow."""
        unbounded = 1 << 40
        if not answer:
            return self.first, self.first, unbounded if self.latest is None else self.first + self.latest
        last_time = next((token for token in reversed(answer) if token >= self.first), None)
        if answer[-1] < self.first:
            return 0, self.first if last_time is None else last_time + 1, unbounded
        if len(answer) > 1 and answer[-2] < self.first:  # the text is closed: a new one begins, or the answer ends
            return self.end, answer[-1], unbounded
        return 0, unbounded, unbounded


@dataclass(frozen=True)
class NoRepeatNGrams:
    """Forbid a token that would repeat an n-gram whose first token is among the last `window_size` tokens of the answer.

    Args:
        ngram_size: tokens of an n-gram.
        window_size: tokens that are searched.
        whitelist_token_ids: tokens that may end a repeated n-gram, such as the tags of table cells.
    """

    ngram_size: int
    window_size: int = 100
    whitelist_token_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        for name in ("ngram_size", "window_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be a positive whole number")
        object.__setattr__(self, "whitelist_token_ids", frozenset(self.whitelist_token_ids))

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        length = self.ngram_size - 1
        window = token_ids[-self.window_size :]
        prefix = window[len(window) - length :]
        repeated = {window[end] for end in range(length, len(window)) if window[end - length : end] == prefix}
        repeated.difference_update(self.whitelist_token_ids)
        if repeated:
            logits[torch.tensor(sorted(repeated), device=logits.device)] = -torch.inf


def _in_vocab(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Return the tokens that the vocabulary has, int64 on the device of `logits`; some checkpoints write -1 for no token."""
    ids = [token for token in tokens if 0 <= token < logits.shape[-1]]
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def _group(keys: Sequence[Hashable]) -> list[tuple[Any, list[int]]]:
    """Return each distinct key with its positions."""
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return list(positions.items())


for _name, _factory in (
    (SUPPRESS_TOKENS, SuppressTokens),
    (ALLOWED_TOKENS, AllowedTokens),
    (TIMESTAMPS, TimestampRules),
    (NO_REPEAT_NGRAMS, NoRepeatNGrams),
):
    register_logits_processor(_name, _factory)
