"""The sampler's state of a sequence: token counts, bad words and the grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from ...callers.errors import InputError
from ..logits_processors import LogitsProcessor, make_processors
from ..sampling_params import SamplingParams
from .grammar import Grammar, GrammarFactory


class TokenCounts:
    """The distinct tokens of a sequence after the first `skip`, and how often its answer has each. Only new tokens are read."""

    def __init__(self, skip: int = 0) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._num_read = skip

    def update(self, token_ids: Sequence[int], turn_start: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens, int64 `[n]`, and how often the answer has each, float32 `[n]`."""
        for token in token_ids[self._num_read : turn_start]:
            self._slot(token)
        for token in token_ids[max(self._num_read, turn_start) :]:
            slot = self._slot(token)  # first: it may replace the arrays
            self._counts[slot] += 1
        self._num_read = len(token_ids)
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


@dataclass(frozen=True)
class TokenRules:
    """Tokens of a sequence that the sampler treats in a way of their own.

    Args:
        end_ids: EOS and stop tokens. eos_ids: tokens that end an answer with a grammar.
        bad_word_ids: token sequences that the answer must not complete.
        num_embeds: first tokens of the prompt that were given as embeddings; no penalty counts them.
    """

    end_ids: Sequence[int] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    eos_ids: Sequence[int] = ()
    num_embeds: int = 0


class SamplingState:
    """The sampler's state of one sequence. `token_ids` is the sequence's list; between calls of `rollback` it may only grow.

    Args:
        token_ids: all tokens; the answer begins at `turn_start`.
        seed: determines the random numbers, together with the number of tokens.
        grammars: makes the grammar if the parameters ask for one.
    """

    def __init__(
        self,
        params: SamplingParams,
        token_ids: list[int],
        turn_start: int,
        seed: int = 0,
        rules: TokenRules = TokenRules(),
        grammars: GrammarFactory | None = None,
    ) -> None:
        self.params, self.token_ids, self.turn_start, self.seed = params, token_ids, turn_start, seed
        self.end_ids, self.eos_ids = tuple(rules.end_ids), tuple(rules.eos_ids)
        self.must_end = False  # in this step the grammar allows only the end
        self._grammars, self._num_embeds = grammars, rules.num_embeds
        self._counts = TokenCounts(rules.num_embeds)
        self._bad_words: Mapping[int, list[tuple[int, ...]]]  # words of several tokens, by their second-last token
        self._bad_tokens: Sequence[int]
        self._set_bad_words(rules.bad_word_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.turn_start

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.turn_start :]

    @property
    def changes_logits(self) -> bool:
        """True if a rule before the temperature changes the logits."""
        return self.params.changes_logits or self._has_bad_words

    @property
    def only_argmax(self) -> bool:
        """True if the token is the argmax of the raw logits and no log probabilities are asked for."""
        return self.params.plain and not self._has_bad_words

    @property
    def _has_bad_words(self) -> bool:
        return bool(self._bad_words or self._bad_tokens)

    @cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of logit_bias, int64 `[n]`, and what is added to their logits, float32 `[n]`."""
        biases = self.params.logit_bias or {}
        return np.array(list(biases), dtype=np.int64), np.array(list(biases.values()), dtype=np.float32)

    @cached_property
    def processors(self) -> list[LogitsProcessor]:
        """The request's logits processors. Raises InputError if a factory does not accept its arguments."""
        return make_processors(self.params.processors)

    @cached_property
    def grammar(self) -> Grammar | None:
        """The state of the request's grammar; None if it has none. Raises InputError if the grammar cannot be compiled."""
        output_format = self.params.structured_outputs
        return None if output_format is None or self._grammars is None else self._grammars.make(output_format)

    def rollback(self, num_tokens: int, turn_start: int, bad_word_ids: Sequence[Sequence[int]] = ()) -> None:
        """Follow a rollback to `num_tokens` tokens. The list may have grown since; its answer begins at `turn_start`."""
        grammar = self.__dict__.get("grammar")
        if grammar is not None:
            grammar.rollback(max(0, num_tokens - self.turn_start) if turn_start == self.turn_start else 0)
        self.turn_start = turn_start
        self._counts = TokenCounts(min(self._num_embeds, num_tokens))
        self._set_bad_words(bad_word_ids)

    def _set_bad_words(self, words: Sequence[Sequence[int]]) -> None:
        self._bad_tokens, self._bad_words = _index_words(tuple(map(tuple, words)))

    def token_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct tokens of the sequence, int64 `[n]`, and how often the answer has each, float32 `[n]`."""
        return self._counts.update(self.token_ids, self.turn_start)

    def allowed_tokens(self, vocab: int) -> np.ndarray:
        """Return the tokens that the grammar allows next, bool `[vocab]`.

        Raises:
            InputError: the grammar allows no token, or cannot be compiled.
        """
        if self.grammar is None:
            raise InputError("the parameters ask for no structured outputs, or there is no tokenizer to compile them")
        self.grammar.accept_tokens(self.token_ids, self.turn_start)
        may_end = self.num_output_tokens >= self.params.min_tokens and not self.params.ignore_eos
        allowed, self.must_end = self.grammar.allowed_tokens(self.eos_ids, may_end, vocab)
        return allowed

    def banned_tokens(self) -> list[int]:
        """Return the tokens that would complete a bad word, or end the answer before min_tokens."""
        early = self.num_output_tokens < self.params.min_tokens and not self.must_end
        banned = [*self.end_ids, *self._bad_tokens] if early else list(self._bad_tokens)
        if self._bad_words and self.num_output_tokens:
            following = self._bad_words.get(self.token_ids[-1], ())
            banned += [word[-1] for word in following if self._ends_with(word[:-1])]
        return banned

    def _ends_with(self, start: tuple[int, ...]) -> bool:
        return len(start) <= self.num_output_tokens and tuple(self.token_ids[-len(start) :]) == start


@lru_cache(maxsize=64)
def _index_words(words: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], Mapping[int, list[tuple[int, ...]]]]:
    """Return the words of one token, and all others by their second-last token. Cached for the requests of a call."""
    longer: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if len(word) > 1:
            longer.setdefault(word[-2], []).append(word)
    return tuple(word[0] for word in words if len(word) == 1), longer
