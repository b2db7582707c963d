"""LocalAgreement-2 (arXiv 2307.14743, section 3): words on which two passes over a growing window agree become stable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from itertools import accumulate
from math import ceil

from .merge import find_merge_point, join_texts, split_words, word_key
from .segments import Segment, Word

_CONTEXT = 20  # final words that are compared with an overlapping window


class OpenText:
    """The words of the open window, and how many of them will not change.

    The common prefix of two consecutive passes becomes stable. Later passes only add words after it.

    Attributes:
        stable: number of `words` that will not change.
    """

    def __init__(self) -> None:
        self.words: list[str] = []
        self.stable = 0
        self._before: list[str] = []  # last final words of the previous window, if it overlaps this one
        self._held: list[str] = []  # words of the previous window after these, which are not final

    @property
    def text(self) -> str:
        return "".join(self.words)

    @property
    def stable_upto(self) -> int:
        """Number of characters of `text` that will not change."""
        return len("".join(self.words[: self.stable]))

    def add_pass(self, text: str) -> int:
        """Take the text of a pass over the open window. Return how many words at its start will not change."""
        new_words, dropped = self._own_words(text)
        shown, _, next_word = self._shown(new_words)
        before, self.stable = self.stable, max(self.stable, _common(self.words, shown))
        self.words = shown
        return max(0, dropped + next_word + self.stable - before)

    def close(self, text: str, keep: bool) -> str:
        """Take the text of the last pass and return the final text.

        `keep`: stable words that this pass does not contain belong to the next window.
        """
        new_words = self._own_words(text)[0]
        shown, covered, _ = self._shown(new_words)
        end = covered if keep and covered < self.stable else len(shown)
        return self._finish(shown, end, self.stable)

    def close_parts(self, parts: Sequence[str], least: int) -> tuple[str, int]:
        """Take the segments of a pass. Return the final text and how many segments (at least `least`) agree."""
        new_words, dropped = self._own_words(join_texts(parts))
        shown, covered, next_word = self._shown(new_words)
        agreed = max(self.stable, _common(self.words, shown))
        part_ends = (max(0, count - dropped) for count in accumulate(len(split_words(part)) for part in parts))
        ends = [min(at, covered) if at <= next_word else self.stable + at - next_word for at in part_ends]
        count = max(least, sum(end <= agreed for end in ends))
        return self._finish(shown, ends[count - 1], agreed), count

    def close_overlapping(self, text: str, share: float) -> str:
        """Take the text of the last pass and return it without the words that the next window transcribes again.

        `share`: fraction of this window that is also in the next one.
        """
        shown = self._shown(self._own_words(text)[0])[0]
        end = max(0, len(shown) - ceil(len(shown) * share) - 1)
        final = self._finish(shown, end, self.stable)
        self._before, self._held = shown[max(0, end - _CONTEXT) : end], shown[end:]
        return final

    def _finish(self, shown: list[str], end: int, stable: int) -> str:
        self._before, self._held = [], []
        self.words = _stripped(shown[end:])
        self.stable = min(max(0, stable - end), len(self.words))
        return "".join(shown[:end]).strip()

    def _own_words(self, text: str) -> tuple[list[str], int]:
        """Return the words after the final text, and how many words at the start of `text` are dropped (negative: added)."""
        words = split_words(text.strip())
        if not self._before and not self._held:
            return words, 0
        keep, drop = find_merge_point([*self._before, *self._held], words)
        if not drop:  # no equal words
            return words, 0
        first = len(self._before) - keep + drop
        return (words[first:], first) if first >= 0 else (_concat(self._held[:-first], words), first)

    def _shown(self, new_words: list[str]) -> tuple[list[str], int, int]:
        """Append the words of a pass to the stable ones.

        Returns the words, how many of the stable ones the pass contains, and the index of its first word after those.
        """
        stable = self.words[: self.stable]
        covered, next_word = _align(stable, new_words)
        shown = _concat(stable, new_words[next_word:])
        return _stripped(shown), covered, next_word


def fit_segments(parts: Sequence[Segment], text: str) -> list[Segment]:
    """Distribute the words of a final text over the segments of its last pass. Segments without words are left out."""
    words, part_words = split_words(text), list[str]()
    fitted, begin = list[Segment](), 0
    for number, part in enumerate(parts, 1):
        part_words += split_words(part.text)
        end = len(words) if number == len(parts) else max(begin, _align(part_words, words)[1])
        line = "".join(words[begin:end]).strip()
        if line:
            fitted.append(replace(part, id=len(fitted) + 1, text=line, tokens=part.tokens if line == part.text else ()))
        begin = end
    if all(part.words is None for part in parts):
        return fitted
    left = iter(fit_words([word for part in parts for word in part.words or ()], text))
    return [replace(part, words=tuple(next(left) for _ in split_words(part.text))) for part in fitted]


def fit_words(words: Sequence[Word], text: str) -> list[Word]:
    """Return the words of a final text with the times of the words of its last pass.

    Words that this pass does not have share the time between their neighbours, with probability 0.
    """
    parts = [part for word in words for part in _split(word)]
    final_words, fitted = split_words(text), list[Word]()
    keys = [word_key(part.word) for part in parts], [word_key(word) for word in final_words]
    for kind, first, end, begin, stop in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        count = stop - begin
        if kind == "equal":
            fitted += [replace(part, word=word) for part, word in zip(parts[first:end], final_words[begin:stop], strict=True)]
            continue
        start = parts[first].start if first < end else fitted[-1].end if fitted else parts[0].start if parts else 0.0
        last = parts[end - 1].end if first < end else parts[end].start if end < len(parts) else start
        step = max(0.0, last - start) / max(count, 1)
        fitted += [Word(start + i * step, start + (i + 1) * step, final_words[begin + i], 0.0) for i in range(count)]
    return fitted


def _split(word: Word) -> list[Word]:
    """Split a word as `split_words` does."""
    parts = split_words(word.word)
    step = (word.end - word.start) / max(len(parts), 1)
    times = (word.start + i * step for i in range(len(parts)))
    return [replace(word, word=part, start=at, end=at + step) for part, at in zip(parts, times, strict=True)]


def _align(stable: Sequence[str], new_words: Sequence[str]) -> tuple[int, int]:
    """Return how many stable words `new_words` contains, and the index of its first word after them."""
    left, right = [word_key(word) for word in stable], [word_key(word) for word in new_words]
    if right[: len(left)] == left:
        return len(left), len(left)
    blocks = [block for block in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks() if block.size]
    a, b = (blocks[-1].a + blocks[-1].size, blocks[-1].b + blocks[-1].size) if blocks else (0, 0)
    others = min(len(left) - a, len(right) - b)  # words that both have, spelled differently
    return a + others, b + others


def _stripped(words: Sequence[str]) -> list[str]:
    return [words[0].lstrip(), *words[1:]] if words else []


def _common(left: Sequence[str], right: Sequence[str]) -> int:
    """Return the length of the common prefix in words."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _concat(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """Concatenate two texts, with a space between them if their script uses spaces."""
    if not left or not right or right[0][0].isspace():
        return [*left, *right]
    joined = join_texts([left[-1], right[0]])
    return [*left, joined[len(left[-1]) :], *right[1:]]
