"""What the sampler keeps of one sequence from step to step: counts, bad words, grammar. Knows no logits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ..mm.errors import InputError
from .logits_processors import LogitsProcessor, make_processors
from .sampling_params import SamplingParams
from .structured import Grammar, GrammarFactory


class TokenCounts:
    """The tokens of a sequence, each once, and how often the answer holds it. Only new tokens are looked at."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._read = 0

    def follow(self, token_ids: Sequence[int], turn_start: int) -> tuple[np.ndarray, np.ndarray]:
        """All tokens up to now, int64 `[n]`, and the answer's occurrences of each, float32 `[n]`."""
        for token in token_ids[self._read : turn_start]:
            self._slot(token)
        for token in token_ids[max(self._read, turn_start) :]:
            slot = self._slot(token)  # first: it may replace the arrays
            self._counts[slot] += 1
        self._read = len(token_ids)
        return self._ids[: len(self._slots)], self._counts[: len(self._slots)]

    def _slot(self, token: int) -> int:
        size = len(self._slots)
        slot = self._slots.setdefault(token, size)
        if slot == size:
            if size == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token
        return slot


class SampleRow:
    """One sequence as the sampler sees it. Its tokens are the caller's list, which may only grow between calls of `changed`.

    Args:
        token_ids: all tokens, the answer from `turn_start` on.
        seed: with the number of tokens it decides the random number.
        end_ids: EOS and stop tokens. eos_ids: those that end the answer of a grammar.
        bad_word_ids: token sequences that the answer must not complete.
        grammars: makes the grammar, where the parameters ask for one.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: list[int],
        turn_start: int,
        seed: int = 0,
        end_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
        eos_ids: Sequence[int] = (),
        grammars: GrammarFactory | None = None,
    ) -> None:
        self.params, self.token_ids, self.turn_start, self.seed = params, token_ids, turn_start, seed
        self.end_ids, self.eos_ids = tuple(end_ids), tuple(eos_ids)
        self.must_end = False  # nothing but the end is left of its grammar, in this step
        self._grammars = grammars
        self._counts = TokenCounts()
        self._words: dict[int | None, list[tuple[int, ...]]]  # by the token before the last
        self._forbid(bad_word_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.turn_start

    @property
    def answer(self) -> list[int]:
        return self.token_ids[self.turn_start :]

    @property
    def constrained(self) -> bool:
        """Its logits are changed."""
        return self.params.changes_logits or bool(self._words)

    @property
    def plain(self) -> bool:
        """The likeliest token, whatever it is."""
        return self.params.plain and not self._words

    @cached_property
    def processors(self) -> list[LogitsProcessor]:
        """InputError when a factory does not take its arguments."""
        return make_processors(self.params.processors)

    @cached_property
    def grammar(self) -> Grammar | None:
        """InputError when the parameters ask for one that cannot be made."""
        wanted = self.params.structured_outputs
        return None if wanted is None or self._grammars is None else self._grammars.make(wanted)

    def changed(self, num_tokens: int, turn_start: int, bad_word_ids: Sequence[Sequence[int]] = ()) -> None:
        """The sequence was rolled back to `num_tokens` tokens, then perhaps continued; its answer begins at `turn_start`."""
        grammar = self.__dict__.get("grammar")
        if grammar is not None:
            grammar.roll_back(max(0, num_tokens - self.turn_start) if turn_start == self.turn_start else 0)
        self.turn_start = turn_start
        self._counts = TokenCounts()
        self._forbid(bad_word_ids)

    def _forbid(self, words: Sequence[Sequence[int]]) -> None:
        self._words = {}
        for word in words:
            self._words.setdefault(word[-2] if len(word) > 1 else None, []).append(tuple(word))

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens, int64 `[n]`, and how often the answer holds each, float32 `[n]`."""
        return self._counts.follow(self.token_ids, self.turn_start)

    def allowed(self, vocab: int) -> np.ndarray:
        """Tokens that the grammar allows next, bool `[vocab]`. InputError where it allows none, or cannot be made."""
        if self.grammar is None:
            raise InputError("the parameters ask for no structured outputs, or there is no tokenizer to make them with")
        self.grammar.follow(self.token_ids, self.turn_start)
        may_end = self.num_generated >= self.params.min_tokens and not self.params.ignore_eos
        allowed, self.must_end = self.grammar.allowed(self.eos_ids, may_end, vocab)
        return allowed

    def banned(self) -> list[int]:
        """Tokens that would complete a bad word, or end the answer too soon."""
        early = self.num_generated < self.params.min_tokens and not self.must_end
        banned = list(self.end_ids) if early else []
        if self._words:
            banned += [word[-1] for word in self._words.get(None, ())]
            following = self._words.get(self.token_ids[-1], ()) if self.num_generated else ()
            banned += [word[-1] for word in following if self._ends_with(word[:-1])]
        return banned

    def _ends_with(self, start: tuple[int, ...]) -> bool:
        return len(start) <= self.num_generated and tuple(self.token_ids[-len(start) :]) == start
