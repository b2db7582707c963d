"""Merges the texts of overlapping windows at words that both contain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from math import ceil

_UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # scripts that put no spaces between words
_WORDS = re.compile(rf"\s*[{_UNSPACED}]|\s*[^\s{_UNSPACED}]+")
_MAX_WORDS = 60  # compared on each side to find the overlap, if its length is not known
_MAX_BESIDE = 2  # words beside a run of equal words, for each of its words
_RATE, _SPARE_WORDS = 6, 3  # words, or characters of a script without spaces, that are spoken per second at most


def split_words(text: str) -> list[str]:
    """Return words with the spaces before them; in scripts without spaces, characters."""
    return _WORDS.findall(text)


def join_texts(texts: Sequence[str]) -> str:
    """Join texts with spaces, but not next to a script without spaces."""
    merger = TextMerger()
    return "".join([*(merger.add(text) for text in texts), merger.finish()])


def merge_overlap(left: str, right: str, seconds: float) -> tuple[str, str, int, int]:
    """Cut two texts that overlap by `seconds`, so that one follows the other. Return both, and how many words each lost."""
    most = min(_MAX_WORDS, ceil(_RATE * seconds) + _SPARE_WORDS)
    keep, drop = find_merge_point(words := split_words(left), own_words := split_words(right), most)
    return "".join(words[:keep]), "".join(own_words[drop:]).strip(), len(words) - keep, drop


class TextMerger:
    """Joins texts in order; each call returns more of the joined text, which is final."""

    def __init__(self) -> None:
        self._before = self._last = ""  # the last text that was returned, and the one after it

    def add(self, text: str, overlap: float = 0.0) -> str:
        """Add a text. With an `overlap` (seconds), it begins with the end of the previous text, which must not be final yet."""
        if overlap and self._last and text:
            self._last, text, _, _ = merge_overlap(self._last, text, overlap)
        final, self._last = self.finish(), text
        return final

    def finish(self) -> str:
        """Make the last text final, with a space before it unless it is next to a script without spaces."""
        text, self._last, before = self._last, "", self._before
        if not text:
            return ""
        unspaced = not before or re.search(rf"[{_UNSPACED}]\W*$", before) or re.match(rf"\W*[{_UNSPACED}]", text)
        self._before = text
        return text if unspaced else f" {text}"


def find_merge_point(left: Sequence[str], right: Sequence[str], most: int = _MAX_WORDS) -> tuple[int, int]:
    """Return how many words of `left` to keep, and how many of `right` to drop, so that no word is lost or repeated.

    The texts are joined in the middle of the longest run of equal words, since words next to a window's edge may be wrong.
    Speakers repeat phrases: only the last and the first `most` words are compared, and the words that both texts have in the
    overlap may not be many more than those that are equal, nor more than `most`.
    """
    keys_left = [word_key(word) for word in left[-most:]]
    keys_right = [word_key(word) for word in right[:most]]
    best, other = (0, 0, 0), 0  # place in both texts, size; words of the overlap beside the run
    for a, b in product(range(len(keys_left)), range(len(keys_right))):
        size = 0
        while keys_left[a + size : a + size + 1] == keys_right[b + size : b + size + 1] != []:
            size += 1
        beside = b + len(keys_left) - a - size
        if 0 < size <= most - beside and beside <= _MAX_BESIDE * size + 2 and (size, -beside) > (best[2], -other):
            best, other = (a, b, size), beside
    a, b, size = best
    if sum(map(len, keys_left[a : a + size])) < 2 or (size == 1 and not _is_sure(a, b, len(keys_left))):
        return len(left), 0
    half = (size + 1) // 2
    return len(left) - len(keys_left) + a + half, b + half


def _is_sure(a: int, b: int, length: int) -> bool:
    """Return whether a single equal word is next to both cuts. Elsewhere it may be equal by chance."""
    return length - a <= 2 and b <= 1


def word_key(word: str) -> str:
    return re.sub(r"\W", "", word).casefold()
