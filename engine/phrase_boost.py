"""Raises the logits of tokens that continue given phrases, so that names are written as a caller spells them.

The phrases form a tree over their tokens. A token that continues a phrase gets its weight. While a phrase is unfinished, its
score is on credit: a token that leaves it takes the score back, so that only finished phrases gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ..callers.errors import InputError, short_repr

MAX_WEIGHT = 20.0
_MAX_PHRASES = 1 << 14  # spellings
_MAX_DEPTH = 512  # tokens of a phrase
_MAX_CACHED = 4096  # states of a tree whose scores are kept


@dataclass
class _Node:
    """A prefix of phrases.

    Args:
        weight: of its last token. score: the sum of the weights of its tokens.
        kept: the part of the score that is not taken back, that of finished phrases. is_end: it is a whole phrase.
    """

    weight: float = 0.0
    score: float = 0.0
    kept: float = 0.0
    is_end: bool = False
    children: dict[int, _Node] = field(default_factory=dict)


@dataclass(frozen=True)
class _Scores:
    """Changes of logits: `values`, float32 `[n]`, are added at `tokens`, int64 `[n]`; `unfinished` is taken from all others."""

    tokens: np.ndarray
    values: np.ndarray
    unfinished: float


@dataclass(frozen=True)
class _Start:
    """A place among tokens at which a phrase may begin. `after_boundary`: also one without a space before it."""

    at: int
    after_boundary: bool


@dataclass(frozen=True)
class SpokenPhrases:
    """The boosted phrases in an answer.

    Args:
        score: the sum of the scores of its finished phrases. One that is repeated counts once: loops gain nothing.
        unfinished: (first position, end) of each prefix of a phrase that was left.
    """

    score: float
    unfinished: tuple[tuple[int, int], ...]


class _Tree:
    """The phrases that begin anywhere, and those that begin only after a boundary."""

    def __init__(self, phrases: Sequence[tuple[tuple[int, ...], float, bool]]) -> None:
        self._roots = {False: _Node(), True: _Node()}
        self.depth = max((len(tokens) for tokens, _, _ in phrases), default=1)
        self._cache = dict[tuple[int, ...], _Scores]()
        for tokens, weight, after_boundary in phrases:
            node = self._roots[after_boundary]
            for token in tokens:
                node = node.children.setdefault(token, _Node())
                node.weight = max(node.weight, weight)  # a shared prefix has the largest weight of its phrases
            node.is_end = True
        for root in self._roots.values():
            _sum_weights(root)

    def scores(self, tokens: Sequence[int], starts: Sequence[_Start]) -> _Scores:
        """Return the scores of the token after `tokens`. `starts`: where phrases may begin, up to the next token itself."""
        nodes = [node for start in starts for root in self.roots(start) if (node := _walk(root, tokens[start.at :]))]
        key = tuple(map(id, nodes))
        if key not in self._cache:
            if len(self._cache) >= _MAX_CACHED:
                self._cache.clear()
            self._cache[key] = _make_scores(nodes)
        return self._cache[key]

    def roots(self, start: _Start) -> Sequence[_Node]:
        """Return the empty prefixes of the phrases that may begin there."""
        return (self._roots[False], self._roots[True]) if start.after_boundary else (self._roots[False],)


def _walk(node: _Node, tokens: Sequence[int]) -> _Node | None:
    """Return the prefix that the tokens continue `node` to, or None if no phrase goes on so."""
    for token in tokens:
        following = node.children.get(token)
        if following is None:
            return None
        node = following
    return node


def _sum_weights(root: _Node) -> None:
    """Set the scores of all prefixes. A longer one keeps the score of the phrase that it begins with."""
    nodes = [root]
    while nodes:
        node = nodes.pop()
        for child in node.children.values():
            child.score = node.score + child.weight
            child.kept = child.score if child.is_end else node.kept
            nodes.append(child)


def _make_scores(nodes: Sequence[_Node]) -> _Scores:
    """Return the scores after prefixes of phrases, the longest first. Without any, no phrase may begin."""
    longest = nodes[0] if nodes else _Node()
    unfinished, best = longest.score - longest.kept, dict[int, float]()
    for node in nodes:
        for token, child in node.children.items():
            value = child.score - (longest.score if node is longest else unfinished)
            best[token] = max(best.get(token, value), value)
    tokens, values = np.array(list(best), np.int64), np.array(list(best.values()), np.float32)
    return _Scores(tokens, values, unfinished)


@lru_cache(maxsize=16)
def _tree(phrases: tuple[tuple[tuple[int, ...], float, bool], ...]) -> _Tree:
    """Return the tree of phrases; the sequences of a call share it."""
    return _Tree(phrases)


@dataclass(frozen=True)
class BoostPhrases:
    """Adds a phrase's weight to the logit of each token that continues it, and takes the sum back if it is left unfinished.

    Args:
        phrases: (token ids, weight, after_boundary) of each spelling. If `after_boundary`, it begins only at the start of the
            answer or after one of `boundaries`; otherwise anywhere.
        boundaries: tokens that end with neither a letter nor a digit.
        ignored: tokens without text, such as a blank. They neither continue nor leave a phrase, and their logits do not change.
        before: tokens of the text before the answer.
        skipped: positions of the answer, without ignored tokens, at which no phrase begins.
    """

    keeps_logprobs = True  # log probabilities are those before it

    phrases: Sequence[tuple[Sequence[int], float, bool]]
    boundaries: Sequence[int] = ()
    ignored: Sequence[int] = ()
    before: Sequence[int] = ()
    skipped: Sequence[int] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.phrases, list | tuple) or len(self.phrases) > _MAX_PHRASES:
            raise InputError(f"phrases is {short_repr(self.phrases)}; it must be a list of at most {_MAX_PHRASES} phrases")
        object.__setattr__(self, "phrases", tuple(map(_as_phrase, self.phrases)))
        for name in ("boundaries", "ignored", "before", "skipped"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))

    def __call__(self, token_ids: Sequence[int], logits: Tensor) -> None:
        self.batch([self], [token_ids], logits[None])

    @staticmethod
    def batch(processors: Sequence[BoostPhrases], answers: Sequence[Sequence[int]], logits: Tensor) -> None:
        for processor, answer, row in zip(processors, answers, logits, strict=True):
            processor.add_scores(answer, row)

    def add_scores(self, answer: Sequence[int], logits: Tensor) -> None:
        """Change logits `[..., vocab]` in place; all rows follow the same answer."""
        scores = self._scores(answer)
        inside = scores.tokens < logits.shape[-1]
        tokens = torch.from_numpy(scores.tokens[inside]).to(logits.device)
        values = torch.from_numpy(scores.values[inside]).to(logits.device)
        if scores.unfinished > 0:
            ignored = [token for token in self.ignored if token < logits.shape[-1]]
            kept, continued = logits[..., ignored].clone(), logits[..., tokens]
            logits -= scores.unfinished
            logits[..., ignored] = kept
            logits[..., tokens] = continued
        logits[..., tokens] += values

    def find(self, answer: Sequence[int]) -> SpokenPhrases:
        """Return the phrases of an answer that has ended."""
        tokens, unfinished, at = [token for token in answer if token not in self._ignored], [], 0
        scores = dict[tuple[int, ...], float]()
        while at < len(tokens):
            nodes = [node for start in self._starts(tokens, at, at + 1) for node in self._tree.roots(start)]
            reached = [_longest(node, tokens[at:]) for node in nodes]
            num_finished, gain = max(((entry.num_finished, entry.score) for entry in reached), default=(0, 0.0))
            num_open = max((entry.num_tokens for entry in reached), default=0)
            if num_open and not num_finished:
                unfinished.append((at, at + num_open))
            scores[tuple(tokens[at : at + num_finished])] = gain
            at += max(1, num_finished)
        return SpokenPhrases(sum(scores.values()), tuple(unfinished))

    @cached_property
    def _tree(self) -> _Tree:
        return _tree(self.phrases)  # type: ignore[arg-type]

    @cached_property
    def _ignored(self) -> frozenset[int]:
        return frozenset(self.ignored)

    @cached_property
    def _skipped(self) -> frozenset[int]:
        return frozenset(self.skipped)

    @cached_property
    def _boundaries(self) -> frozenset[int]:
        return frozenset(self.boundaries)

    def _scores(self, answer: Sequence[int]) -> _Scores:
        if self.ignored:
            answer = [token for token in answer if token not in self._ignored]
        first = len(answer) - self._tree.depth  # a phrase that began before is finished
        return self._tree.scores(*self._window(answer, first))

    def _window(self, answer: Sequence[int], first: int) -> tuple[list[int], list[_Start]]:
        """Return the tokens from position `first` on, which may lie in the text before the answer, and where phrases begin."""
        known = [*self.before[first:], *answer] if first < 0 else list(answer[first:])
        begin = len(answer) - len(known)
        starts = self._starts(answer, begin, len(answer) + 1)
        return known, [_Start(start.at - begin, start.after_boundary) for start in starts]

    def _starts(self, answer: Sequence[int], first: int, end: int) -> list[_Start]:
        """Return the positions from `first` up to `end` at which phrases may begin; negative ones are before the answer."""
        starts = []
        for at in range(first, end):
            last = answer[at - 1] if at > 0 else self.before[at - 1] if -at < len(self.before) else None
            if at not in self._skipped:
                starts.append(_Start(at, last is None or last in self._boundaries))
        return starts


@dataclass(frozen=True)
class _Reached:
    """How far tokens follow a phrase, how many of these finish one, and its score."""

    num_tokens: int
    num_finished: int
    score: float


def _longest(node: _Node, tokens: Sequence[int]) -> _Reached:
    count = finished = 0
    score = 0.0
    for token in tokens:
        following = node.children.get(token)
        if following is None:
            break
        node, count = following, count + 1
        if node.is_end:
            finished, score = count, node.score
    return _Reached(count, finished, score)


def _as_phrase(phrase: object) -> tuple[tuple[int, ...], float, bool]:
    if not isinstance(phrase, list | tuple) or len(phrase) != 3:
        raise InputError(f"a phrase is {short_repr(phrase)}; it must be token ids, a weight, and True or False")
    tokens, weight, after_boundary = phrase
    ids = _token_ids("a phrase", tokens)
    if not ids or len(ids) > _MAX_DEPTH:
        raise InputError(f"a phrase has {len(ids)} tokens; it must have 1 to {_MAX_DEPTH}")
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and isfinite(weight)
    if not is_number or not 0 < weight <= MAX_WEIGHT:
        raise InputError(f"the weight of a phrase is {short_repr(weight)}; it must be above 0 and at most {MAX_WEIGHT:g}")
    return ids, float(weight), bool(after_boundary)


def _token_ids(name: str, tokens: object) -> tuple[int, ...]:
    if not isinstance(tokens, list | tuple) or not all(type(token) is int and token >= 0 for token in tokens):
        raise InputError(f"{name} is {short_repr(tokens)}; it must be a list of token ids")
    return tuple(tokens)
