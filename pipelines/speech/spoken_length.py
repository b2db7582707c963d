"""Estimates how long a written text takes to say.

A number in digits is one written word and many spoken ones: "1,327,451" has 17 syllables in English, and 15 to 25 in other
languages, also with letters next to the digits ("1,327,451원입니다"). Letters that are spelled, currencies, units, percentages
and addresses are written shorter than they are said, too.

An address may be spelled or said as words: slow speech spells it, normal and fast speech do not. The same holds for long runs
of capitals.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .merge import split_words

_WIDE_LETTERS = "\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WIDE = re.compile(f"[{_WIDE_LETTERS}]")  # letters that take about a syllable each
_NARROW = rf"[^\W\d_{_WIDE_LETTERS}]"
_TOKENS = re.compile(r"\d|[^\W\d_]+|[^\w\s]|_")
_SYMBOL_MARKS = re.compile(r"[^\w\s.,;:!?'\"’”“»«()\[\]{}…。、，！？：¿¡–—-]")
_DOTTED = re.compile(rf"(?<!\w){_NARROW}(?:[-.]{_NARROW})+(?!\w)")  # "S-M-I-T-H", "p.m"
_LETTERS_APART = re.compile(rf"(?<!\w){_NARROW}(?:(?:[-.]|, ?| ){_NARROW}(?!\w)){{2,}}")  # "S, M, I, T, H"
_CHUNKS = re.compile(rf"[^\s{_WIDE_LETTERS}]+")
_ADDRESS = re.compile(rf"@|://|(?<!\w)www(?!\w)|(?:{_NARROW}|\d)\.{_NARROW}{{2}}", re.I)
_ADDRESS_MARKS = re.compile(r"(?<=\w)[.:-](?=\w)")  # "dot", "dash"
_FEW_DIGITS_AFTER = re.compile(r"\W*[^\W\d_]*[^\W\d_A-ZÀ-Þ]{3}\d{1,2}\W*")  # "part2"
_DIGIT, _LONE_DIGIT, _SYMBOL = 2.3, 1.3, 2.0  # syllables; a digit of a number, with "hundred" and the like
_LETTER = 2.0  # a spelled letter, which takes as long as two syllables
_LONGEST_ABBREVIATION = 5  # letters; a longer run of capitals may be a word
_VOWELS = "aeiouyàáâãäåæèéêëìíîïòóôõöøùúûüýÿāăąēĕėęěīĭįıōŏőœūŭůűųαεηιουωάέήίόύώаеёиоуыэюяіїєў"
_SYLLABLES = re.compile(rf"[{_VOWELS}]+")
_UNPRONOUNCEABLE = re.compile(rf"[^{_VOWELS}]{{4}}|q[^u]|^[^{_VOWELS}]+$")
_LETTERS_PER_SYLLABLE = 2.5  # of words without known vowels, such as those of Hebrew, Arabic and Hindi
_SLOW, _NORMAL, _FAST = 0.33, 0.22, 0.15  # seconds per syllable; slow speech includes short pauses
_SYMBOLS_SAID = "%‰°$£€¥₹₩₽¢+=×÷&@#§/*<>^~|\\_"
_POINT = re.compile(r"(?<=\d)[.,:/](?=\d)")


def is_number_like(text: str) -> bool:
    """Return whether a text is written shorter than it is said: digits, symbols, addresses, spelled letters, capitals."""
    if _ADDRESS.search(text):
        return True
    if any(map(_is_digit, text)):
        return not _FEW_DIGITS_AFTER.fullmatch(text)
    letters = "".join(filter(str.isalpha, text))
    if _is_abbreviation(letters):
        return True
    if _has_lower_run(text):
        return False
    is_letter = len(letters) == 1 and letters.isupper() and letters not in ("A", "I", "O")
    return is_letter or bool(_SYMBOL_MARKS.search(text) or _DOTTED.search(text))


def spoken_syllables(text: str, is_spelled: bool = False) -> float:
    """Return about how many syllables a text has when it is said, in any language.

    `is_spelled`: whether the letters of addresses and of long runs of capitals are spelled.
    """
    return sum(_word_syllables(word, is_spelled) for word in text.split())


def slow_seconds(text: str) -> float:
    """Return the seconds that slow speech takes to say a text."""
    return _SLOW * spoken_syllables(text, is_spelled=True)


def normal_seconds(text: str) -> float:
    return _NORMAL * spoken_syllables(text)


def fast_seconds(text: str) -> float:
    """Return the seconds that fast speech takes to say a text."""
    return _FAST * spoken_syllables(text)


def spoken_words(text: str) -> int:
    """Return the number of words, where each digit and each symbol that is said counts as one."""
    return sum(map(_word_count, split_words(text)))


def number_groups(words: Sequence[str]) -> list[tuple[int, int]]:
    """Return for each word the first word of its group and the one after the last.

    A group is consecutive number-like words with the punctuation between and after them. The times of tokens within a number
    are not sharp, so its parts are judged together, as are those of an address and of letters that are spelled. Any other word
    is a group of its own.
    """
    inside = _inside_spans(words)
    is_part = [part or is_number_like(word) for part, word in zip(inside, words, strict=True)]
    groups, first = list[tuple[int, int]](), 0
    while first < len(words):
        end = first + 1
        if is_part[first]:
            while end < len(words) and (is_part[end] or not any(map(str.isalnum, words[end]))):
                end += 1
        groups += [(first, end)] * (end - first)
        first = end
    return groups


def _inside_spans(words: Sequence[str]) -> list[bool]:
    """Return for each word whether it is a part of an address or of several letters that are spelled."""
    text, at, inside = "".join(words), 0, list[bool]()
    spans = [match.span() for match in _CHUNKS.finditer(text) if _ADDRESS.search(match[0])]
    spans += [match.span() for match in _LETTERS_APART.finditer(text)]
    for word in words:
        start, at = at + len(word) - len(word.lstrip()), at + len(word)
        inside.append(any(start < last and first < at for first, last in spans))
    return inside


def _word_count(word: str) -> int:
    if _FEW_DIGITS_AFTER.fullmatch(word.strip()):
        return 1
    return max(1, sum(map(_is_said, word)) + (_has_lower_run(word) and any(map(_is_digit, word))))


def _word_syllables(word: str, is_spelled: bool) -> float:
    digits = sum(map(_is_digit, word))
    is_few = digits == 1 or _FEW_DIGITS_AFTER.fullmatch(word)
    is_address = bool(_ADDRESS.search(word))
    count = digits * (_LONE_DIGIT if is_few else _DIGIT) + 0.7 * len(_POINT.findall(word))
    count += len(_ADDRESS_MARKS.findall(word)) if is_address else 0.0
    for token in _TOKENS.findall(re.sub("['’]", "", word)):
        if token in _SYMBOLS_SAID:
            count += _SYMBOL
        elif letters := "".join(filter(str.isalpha, token)):
            count += _letter_syllables(letters, bool(digits), is_spelled, is_address)
    return count


def _letter_syllables(letters: str, has_digits: bool, is_spelled: bool, is_address: bool) -> float:
    """Return the syllables of consecutive letters of a word. `has_digits`: the word has digits, and may have a unit."""
    if wide := len(_WIDE.findall(letters)):
        return wide + max(0, len(letters) - wide) / _LETTERS_PER_SYLLABLE
    is_abbreviation = _is_abbreviation(letters)
    if len(letters) == 1 or (is_abbreviation and len(letters) <= _LONGEST_ABBREVIATION):
        return _LETTER * len(letters)
    if is_spelled and (is_address or is_abbreviation):
        return _LETTER * len(letters)
    if has_digits and len(letters) <= 2:
        return 2.5  # a unit
    vowels = len(_SYLLABLES.findall(letters.casefold()))
    return max(1.0, float(vowels) if vowels else len(letters) / _LETTERS_PER_SYLLABLE)


def _is_abbreviation(letters: str) -> bool:
    """Return whether letters are probably said one by one: "PM", "СССР", "mRNA", "SCHMIDT"."""
    if sum(map(str.isupper, letters)) < 2 or _has_lower_run(letters):
        return False
    return len(letters) <= _LONGEST_ABBREVIATION or (letters.isupper() and bool(_UNPRONOUNCEABLE.search(letters.lower())))


def _has_lower_run(text: str) -> bool:
    """Return whether a text has three consecutive letters that are not capitals, as words have."""
    return "aaa" in "".join("a" if mark.isalpha() and not mark.isupper() else "-" for mark in text)


def _is_said(character: str) -> bool:
    return _is_digit(character) or character in _SYMBOLS_SAID


def _is_digit(character: str) -> bool:
    """Return whether a character is a digit or a fraction; numerals of scripts such as Chinese are letters."""
    return character.isnumeric() and not character.isalpha()
