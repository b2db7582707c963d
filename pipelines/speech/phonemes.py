"""Converts texts to words of phonemes, and divides them into parts that one request speaks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from ...callers.errors import InputError, short_repr
from ...mm.speech import PhonemeRule

_LEAST = 40  # minimum phonemes of a part unless it is the last one; models speak very short texts badly
_LONG, _SHORTEST = 40, 20  # phonemes: a first part with more than _LONG is split if both parts then have at least _SHORTEST
_MARK = re.compile(r"""(?<![;:,.!?…])[;:,.!?…]++(?=[\s"”)\]]|$)|[—“”"()]""")  # linear in the length of a run of marks
_PARTS = re.compile(r"""[^\s;:,.!?…—“”"()]+\s*|[;:,.!?…—“”"()]+\s*|^\s+""")  # words and marks
_SENTENCE_ENDS, _CLAUSE_ENDS = ".!?…", ";:,—"
_QUOTES = str.maketrans({"«": "“", "»": "”", "„": "“", "[": "(", "]": ")", "‘": "'", "’": "'", "–": "—"})
_PLAIN_MARKS = re.compile(r"\.{2,}")
Phonemize = Callable[[str], str]
"""Returns the phonemes of words without punctuation, words separated by spaces."""


@dataclass(frozen=True)
class PhonemeWord:
    """A word or a mark of a text.

    Args:
        text: as written; empty for given phonemes.
        phonemes: with the space after it, if there is one.
    """

    text: str
    phonemes: str

    @property
    def ends(self) -> str:
        """The last character that is neither a space nor a closing quote or bracket."""
        return self.phonemes.rstrip(' "”)')[-1:]


def words_of_phonemes(phonemes: str, rule: PhonemeRule) -> list[PhonemeWord]:
    """Return the words of given phonemes. Raise InputError for a phoneme that the model does not know."""
    unknown = next((phoneme for phoneme in phonemes if phoneme not in rule.tokens), None)
    if unknown is not None:
        place = phonemes.index(unknown)
        known = "".join(rule.tokens)
        reason = f"<<param>> has {short_repr(unknown)} at {place}, which this model does not know; it knows {known}"
        raise InputError(reason, code="invalid_value", param="phonemes", value=unknown)
    return [PhonemeWord("", word) for word in _PARTS.findall(phonemes)]


def words_of_text(text: str, phonemize: Phonemize, rule: PhonemeRule) -> list[PhonemeWord]:
    """Return the words and marks of a text. Phonemes and marks that the model does not know are left out."""
    text, words, start = _PLAIN_MARKS.sub("…", text.translate(_QUOTES)), list[PhonemeWord](), 0
    for mark in [*_MARK.finditer(text), None]:
        piece = text[start : len(text) if mark is None else mark.start()]
        words += _words_of_piece(piece, phonemize, bool(mark))
        if mark is not None:
            start = mark.end()
            words.append(PhonemeWord(mark[0], mark[0] + (" " if text[start : start + 1].isspace() else "")))
    known = ((word.text, "".join(p for p in word.phonemes if p in rule.tokens)) for word in words)
    return [PhonemeWord(written, phonemes) for written, phonemes in known if phonemes.strip()]


def _words_of_piece(piece: str, phonemize: Phonemize, joined: bool) -> Iterator[PhonemeWord]:
    """Yield the words of a piece without marks. `joined`: a mark follows."""
    written = piece.split()
    if not written:
        return
    spoken = phonemize(" ".join(written)).split(" ")
    if len(spoken) != len(written):  # a number is spoken as several words
        spoken = [phonemize(word) for word in written]
    last = len(written) - 1
    for number, (word, phonemes) in enumerate(zip(written, spoken, strict=True)):
        ends = number == last and joined and not piece[-1].isspace()
        yield PhonemeWord(word, phonemes if ends or not phonemes else f"{phonemes} ")


def divide(words: Sequence[PhonemeWord], limit: int) -> Iterator[tuple[PhonemeWord, ...]]:
    """Yield parts of at most `limit` phonemes: a sentence or several short ones. Long ones are cut at a clause or word."""
    part, ended = list[PhonemeWord](), False
    for word in chain.from_iterable(_cut(whole, limit) for whole in words):
        while part and _count(part) + len(word.phonemes.rstrip()) > limit:
            kept = _clause_end(part)
            yield tuple(part[:kept])
            part = part[kept:]
        part.append(word)
        ended = word.ends in tuple(_SENTENCE_ENDS) if word.ends else ended  # a quote may follow the end of its sentence
        if ended and word.phonemes[-1].isspace() and _count(part) >= min(_LEAST, limit):
            yield tuple(part)
            part = []
    if part:
        yield tuple(part)


def split_first_part(parts: Sequence[tuple[PhonemeWord, ...]]) -> list[tuple[PhonemeWord, ...]]:
    """Split a long first part at the end of its first clause, so that the first sound comes sooner. Return all parts."""
    first, *others = parts
    if _count(first) > _LONG:
        for index in range(1, len(first)):
            ends = first[index - 1].ends
            if ends and ends in _SENTENCE_ENDS + _CLAUSE_ENDS and first[index - 1].phonemes[-1].isspace():
                halves = first[:index], first[index:]
                if min(map(_count, halves)) >= _SHORTEST:
                    return [*halves, *others]
    return [first, *others]


def _count(part: Sequence[PhonemeWord]) -> int:
    return sum(len(word.phonemes) for word in part)


def _clause_end(part: Sequence[PhonemeWord]) -> int:
    """Return how many words to keep before the last sentence or clause ends; all of them if none does in the second half."""
    for marks in (_SENTENCE_ENDS, _CLAUSE_ENDS):
        for index in range(len(part) - 1, len(part) // 2, -1):
            if part[index - 1].ends and part[index - 1].ends in marks:
                return index
    return len(part)


def _cut(word: PhonemeWord, limit: int) -> Iterator[PhonemeWord]:
    """Yield a word, or the parts of one that is longer than the limit."""
    if len(word.phonemes.rstrip()) <= limit:
        yield word
        return
    for start in range(0, len(word.phonemes), limit):
        yield PhonemeWord(word.text if start == 0 else "", word.phonemes[start : start + limit])
