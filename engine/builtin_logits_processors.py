"""Logits processors that checkpoints and speech models need, registered by name."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..callers.errors import InputError, short_repr
from .logits_processors import register_logits_processor
from .phrase_boost import BoostPhrases

SUPPRESS_TOKENS, ALLOWED_TOKENS = "suppress_tokens", "allowed_tokens"
TIMESTAMPS, NO_REPEAT_NGRAMS, BOOST_PHRASES = "timestamps", "no_repeat_ngrams", "boost_phrases"
_MAX_WINDOW = 4096
_MAX_TOKEN = 2**40
_MAX_SUPPRESSED, _MAX_ALLOWED = 1 << 14, 1 << 20  # tokens in a list
_MAX_LISTED = 1024  # allowed tokens that remain a list


@dataclass(frozen=True)
class SuppressTokens:
    """Forbids `tokens` everywhere, and the tokens of `first` as the first token of an answer."""

    tokens: Sequence[int] = ()
    first: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "first"):  # JSON gives lists; equal processors run as one batch
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name), _MAX_SUPPRESSED))

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        self.batch([self], [token_ids], logits[None])

    @staticmethod
    def batch(processors: Sequence[SuppressTokens], answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        keys = [(processor, not answer) for processor, answer in zip(processors, answers, strict=True)]
        for (processor, is_first), rows in _group(keys):
            tokens = (*processor.tokens, *processor.first) if is_first else processor.tokens
            logits[torch.tensor(rows)[:, None], _in_vocab(tokens, logits)] = -torch.inf


def pack_tokens(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of AllowedTokens with a long list of tokens as the bytes of int64 numbers.

    A step makes a processor for each sequence; from a list of 100,000 tokens that takes 20 ms.
    """
    tokens = arguments.get("tokens")
    if not isinstance(tokens, list | tuple | range) or len(tokens) <= _MAX_LISTED:
        return dict(arguments)
    ids = np.sort(np.array(_as_tuple("tokens", tokens, _MAX_ALLOWED), np.int64))  # np.unique holds the GIL
    return {**arguments, "tokens": ids[np.diff(ids, prepend=ids[0] - 1) > 0].tobytes()}


@dataclass(frozen=True)
class AllowedTokens:
    """Forbids all tokens except these. `tokens` may also be the bytes of int64 numbers."""

    tokens: Sequence[int] | bytes

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, bytes):
            object.__setattr__(self, "tokens", _as_tuple("tokens", self.tokens, _MAX_ALLOWED))
        elif len(self.tokens) % 8 or len(self.tokens) > 8 * _MAX_ALLOWED:
            raise InputError(f"tokens is {short_repr(self.tokens)}; it must be at most {_MAX_ALLOWED} int64 numbers")

    @cached_property
    def _array(self) -> np.ndarray:
        return np.frombuffer(self.tokens, np.int64) if isinstance(self.tokens, bytes) else np.array(self.tokens, np.int64)

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        inside = (self._array >= 0) & (self._array < logits.shape[-1])
        allowed = torch.from_numpy(self._array[inside]).to(logits.device)
        values = logits[allowed]
        logits.fill_(-torch.inf)[allowed] = values


@dataclass(frozen=True)
class TimestampRules:
    """Rules for timestamps in transcripts: they come in pairs around text, never decrease, and take precedence over text.

    A timestamp is forced as soon as the timestamps together are likelier than the likeliest text token.

    Args:
        first: the timestamp of 0 s; all tokens from it on are timestamps.
        none: the control token for "no timestamps"; it is never allowed.
        end: the first token that may follow the timestamp at the end of a text.
        latest: the answer begins with a timestamp of at most this many steps; None for no limit.

    Source: arXiv 2212.04356, section 2.3 and the appendix on long-form decoding.
    """

    first: int
    none: int
    end: int
    latest: int | None = None

    def __post_init__(self) -> None:
        for name in ("first", "none", "end", *(() if self.latest is None else ("latest",))):
            _check_whole(name, getattr(self, name), 0, _MAX_TOKEN)

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
        unbounded = _MAX_TOKEN
        if not answer:
            return self.first, self.first, unbounded if self.latest is None else self.first + self.latest
        last_time = next((token for token in reversed(answer) if token >= self.first), None)
        if answer[-1] < self.first:
            return 0, self.first if last_time is None else last_time + 1, unbounded
        if len(answer) > 1 and answer[-2] < self.first:  # this timestamp closed a text: another begins, or the answer ends
            return self.end, answer[-1], unbounded
        return 0, unbounded, unbounded


@dataclass(frozen=True)
class NoRepeatNGrams:
    """Forbids tokens that would repeat an n-gram which begins in the last `window_size` tokens of the answer.

    Args:
        ngram_size: tokens of an n-gram.
        window_size: tokens that are searched, at most 4096.
        whitelist_token_ids: tokens that may end a repeated n-gram, such as the tags of table cells.
    """

    ngram_size: int
    window_size: int = 100
    whitelist_token_ids: Collection[int] = ()

    def __post_init__(self) -> None:
        for name in ("ngram_size", "window_size"):
            _check_whole(name, getattr(self, name), 1, _MAX_WINDOW)
        whitelist = _as_tuple("whitelist_token_ids", self.whitelist_token_ids, _MAX_ALLOWED)
        object.__setattr__(self, "whitelist_token_ids", frozenset(whitelist))

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        length = self.ngram_size - 1
        window = token_ids[-self.window_size :]
        if len(window) < length:
            return
        data, size = array("i", window).tobytes(), length * 4  # bytes are copied and compared much faster than lists
        prefix = data[len(data) - size :]
        repeated = {window[end] for end in range(length, len(window)) if data[end * 4 - size : end * 4] == prefix}
        repeated.difference_update(self.whitelist_token_ids)
        if repeated:
            logits[torch.tensor(sorted(repeated), device=logits.device)] = -torch.inf


def _as_tuple(name: str, tokens: Collection[int], limit: int) -> tuple[int, ...]:
    if isinstance(tokens, str | bytes | Mapping | Tensor) or not isinstance(tokens, Collection):
        raise InputError(f"{name} is {short_repr(tokens)}; it must be a list of token ids")
    if len(tokens) > limit:
        raise InputError(
            f"{name} has {len(tokens)} tokens, the limit is {limit}; give fewer",
            code="over_limit",
            limit=limit,
            value=len(tokens),
        )
    kinds = set(map(type, tokens))
    if not all(issubclass(kind, int | np.integer) and kind is not bool for kind in kinds):
        raise InputError(f"{name} holds values that are not token ids: {short_repr(tokens)}")
    for token in (min(tokens), max(tokens)) if tokens else ():  # some checkpoints write -1 for no token
        _check_whole(name, int(token), -_MAX_TOKEN, _MAX_TOKEN)
    return tuple(tokens)


def _check_whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InputError(f"{name} is {short_repr(value)}; it must be a whole number from {least} to {most}")


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
    (BOOST_PHRASES, BoostPhrases),
):
    register_logits_processor(_name, _factory)
