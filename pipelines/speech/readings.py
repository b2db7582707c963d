"""Tells another reading of the same sounds from a reading with more words.

A shorter window may spell what the text writes: "www.example.com" is read as "w w w dot example dot com", "SCHMIDT" as
"S C H M I D T S C H", and "1,327,451" as "1,327,000 and 27,400".
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .merge import split_words, word_key
from .spoken_length import is_number_like, spoken_words

_LONGEST_NUMBER = 8  # words
_ONE_NUMBER = re.compile(r"\W*\d(?:[\d.,:'’/-]*\d)?[^\W\d_]*\W*")  # "1,327,451 won", without spaces
_MARK_SAID = re.compile(
    "dot|point|period|at|slash|dash|hyphen|minus|underscore|colon|double|triple|capital|punkt|punto|ponto|arroba|arobase|tiret"
    "|barra|strich|schrägstrich|unterstrich|bindestrich|guion|guión|hífen|traço|klammeraffe|точка|собака|тире|дефис|점|쩜|골뱅이"
    "|点|點|ドット|アット|نقطة|נקודה"
)
"""Names of the marks of addresses and codes, and words between spelled letters."""


def says(text: str, numbers: str) -> bool:
    """Return whether whole words of a text say one number, or each of several with spaces between them.

    Letters beside the digits of a number are its unit, which may be written in another way: "1,327 Euro", "€1327".
    """
    keys = [word_key(word) for word in text.split()]
    runs = _runs(keys) | _runs([_digits(key) for key in keys if _digits(key)])

    def is_said(number: str) -> bool:
        return word_key(number) in runs or bool(_ONE_NUMBER.fullmatch(number) and _digits(number) in runs)

    return is_said(numbers) or all(map(is_said, numbers.split()))


def count_other_words(text: str, near: str, with_numbers: bool = True) -> int:
    """Return how many spoken words of a text are neither a part of the words `near` nor a way to spell them.

    `with_numbers`: words with digits count, too.
    """
    key, is_number = word_key(near), is_number_like(near)
    digits = _digits(key)

    def is_part(word: str) -> bool:
        word_letters = word_key(word)
        if not with_numbers and _digits(word_letters):
            return True
        is_mark = is_number and _MARK_SAID.fullmatch(word_letters)
        return bool(word_letters in key or is_mark or (_digits(word_letters) and _digits(word_letters) in digits))

    return sum(spoken_words(word) for word in split_words(text) if not is_part(word))


def _runs(keys: Sequence[str]) -> set[str]:
    """Return all runs of consecutive words that are as long as a number may be."""
    return {"".join(keys[start:end]) for start in range(len(keys)) for end in range(start + 1, start + _LONGEST_NUMBER + 1)}


def _digits(text: str) -> str:
    return "".join(filter(str.isdigit, text))
