"""Rules about single tokens that checkpoints and speech models come with, as registered logits processors. Knows no family."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .logits_processors import register_logits_processor

SUPPRESS, ONLY, TIMES, NGRAMS = "suppress_tokens", "only_tokens", "timestamps", "no_repeat_ngrams"


@dataclass(frozen=True)
class SuppressTokens:
    """`tokens` are never chosen, those of `first` not as the first of an answer."""

    tokens: Sequence[int] = ()
    first: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))  # lists come from JSON; rules that are equal run together
        object.__setattr__(self, "first", tuple(self.first))

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        self.batch([self], [token_ids], logits[None])

    @staticmethod
    def batch(processors: Sequence[SuppressTokens], answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        for (rule, empty), rows in _alike([(one, not answer) for one, answer in zip(processors, answers, strict=True)]):
            tokens = (*rule.tokens, *rule.first) if empty else rule.tokens
            logits[torch.tensor(rows)[:, None], _known(tokens, logits)] = -torch.inf


@dataclass(frozen=True)
class OnlyTokens:
    """None but these tokens are chosen."""

    tokens: Sequence[int]

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        kept = _known(self.tokens, logits)
        values = logits[kept]
        logits.fill_(-torch.inf)[kept] = values


@dataclass(frozen=True)
class Timestamps:
    """Times stand in pairs around text, never go back, and come as soon as all together are likelier than any word.

    `first`: the token of the time 0, all after it are times. `none`: is never chosen. `end`: the first token that may follow
    the time at the end of a text. `latest`: the answer begins with a time of at most so many steps.

    Source: arXiv 2212.04356, section 2.3 and the appendix on long-form decoding.
    """

    first: int
    none: int
    end: int
    latest: int | None = None

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        self.batch([self], [token_ids], logits[None])

    @staticmethod
    def batch(processors: Sequence[Timestamps], answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        for rule, rows in _alike(processors):
            part = logits[rows]
            rule._apply([answers[row] for row in rows], part)
            logits[rows] = part

    def _apply(self, answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        bounds = torch.tensor([self._bounds(answer) for answer in answers], device=logits.device)
        ids = torch.arange(logits.shape[1], device=logits.device)
        lowest_word, lowest_time, highest = bounds[:, None].unbind(2)
        word = ids < self.first
        wrong = torch.where(word, ids < lowest_word, (ids < lowest_time) | (ids > highest))
        logits.masked_fill_(wrong | (ids == self.none), -torch.inf)
        times, words = logits[:, self.first :].logsumexp(1), logits[:, : self.first].amax(1)
        logits.masked_fill_((times > words)[:, None] & word, -torch.inf)

    def _bounds(self, answer: Sequence[int]) -> tuple[int, int, int]:
        """The lowest word, the lowest time and the highest time that may follow."""
        anything = 1 << 40
        if not answer:
            return self.first, self.first, anything if self.latest is None else self.first + self.latest
        last = next((token for token in reversed(answer) if token >= self.first), None)
        if answer[-1] < self.first:
            return 0, self.first if last is None else last + 1, anything
        if len(answer) > 1 and answer[-2] < self.first:  # the text is closed: its like opens the next, or the end comes
            return self.end, answer[-1], anything
        return 0, anything, anything


@dataclass(frozen=True)
class NoRepeatNGrams:
    """No run of `ngram_size` tokens of an answer comes again while its first one is among the last `window_size` tokens.

    Tokens of `whitelist_token_ids` may end a run again all the same: those of the cells of a table, of which pages are full.
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
        count = self.ngram_size - 1
        seen = token_ids[-self.window_size :]
        last = seen[len(seen) - count :]
        again = {seen[end] for end in range(count, len(seen)) if seen[end - count : end] == last}
        again.difference_update(self.whitelist_token_ids)
        if again:
            logits[torch.tensor(sorted(again), device=logits.device)] = -torch.inf


def _known(tokens: Sequence[int], logits: Tensor) -> Tensor:
    """Those that the vocabulary has: some checkpoints write -1 for none. int64, where `logits` are."""
    ids = [token for token in tokens if 0 <= token < logits.shape[-1]]
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def _alike(keys: Sequence[Hashable]) -> list[tuple[Any, list[int]]]:
    """Equal keys and the places of each."""
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    return list(places.items())


for _name, _rule in ((SUPPRESS, SuppressTokens), (ONLY, OnlyTokens), (TIMES, Timestamps), (NGRAMS, NoRepeatNGrams)):
    register_logits_processor(_name, _rule)
