"""Merges the texts of overlapping windows at words that both contain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

_UNSPACED = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"  # scripts that put no spaces between words
_WORDS = re.compile(rf"\s*[{_UNSPACED}]|\s*[^\s{_UNSPACED}]+")
_MAX_WORDS = 60  # compared on each side to find the overlap


def split_words(text: str) -> list[str]:
    """Return words with the spaces before them; in scripts without spaces, characters."""
    return _WORDS.findall(text)


def join_texts(texts: Sequence[str]) -> str:
    """Join texts with spaces, but not next to a script without spaces."""
    found: list[str] = []
    for text in filter(None, texts):
        unspaced = found and (re.search(rf"[{_UNSPACED}]\W*$", found[-1]) or re.match(rf"\W*[{_UNSPACED}]", text))
        found += [text] if unspaced or not found else [" ", text]
    return "".join(found)


def find_merge_point(left: Sequence[str], right: Sequence[str]) -> tuple[int, int]:
    """Return how many words of `left` to keep, and how many of `right` to drop, so that no word is lost or repeated.

    The texts are joined in the middle of the longest run of equal words, since words next to a window's edge may be wrong.
    """
    keys_left = [word_key(word) for word in left[-_MAX_WORDS:]]
    keys_right = [word_key(word) for word in right[:_MAX_WORDS]]
    match = SequenceMatcher(None, keys_left, keys_right, autojunk=False).find_longest_match()
    run = keys_left[match.a : match.a + match.size]
    if sum(map(len, run)) < 2 or (match.size == 1 and not _is_sure(match.a, match.b, len(keys_left))):
        return len(left), 0
    half = (match.size + 1) // 2
    return len(left) - len(keys_left) + match.a + half, match.b + half


def _is_sure(a: int, b: int, length: int) -> bool:
    """Return whether a single equal word is next to both cuts. Elsewhere it may be equal by chance."""
    return length - a <= 2 and b <= 1


def word_key(word: str) -> str:
    return re.sub(r"\W", "", word).casefold()
