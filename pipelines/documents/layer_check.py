"""Compares a page's text layer with a reading of some of its lines. This finds layers with wrong encodings or wrong text."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import pairwise

from ...callers.errors import InputError
from ...mm.media.isolate import run_isolated
from ...mm.media.line_pictures import LinePlace, line_pictures
from ...mm.media.page_facts import Box, PageFacts, TextLine
from ...mm.media.policy import MediaPolicy
from .inputs import patiently
from .line_recognizer import LineRecognizer, Picture
from .stop import StopSignal

_FIRST = 2  # lines that are read; if each agrees, no other is
_MORE = 6  # lines that are read if one of them differs
_LEAST_CHARS = 8  # letters and digits of a line
_LEAST_READ = 4  # of its reading
_LEAST_SHARE = 0.7  # share of them among the characters of a line: formulas are often read wrong
_LEAST_SIZE = 5.0  # points
_TALL = 1.5  # text sizes of the height of a line; the box of a higher one has more than a line
_WIDE = 7  # heights of the part of a line that is read: the recognition takes that width in any case
_LEAST_SCORE = 0.8  # of a reading that says something
_LEAST_ALIKE = 0.75  # share of the characters that a line and its reading have in common; right ones have nearly all
_SHAPES = str.maketrans("l10", "iio")  # letters and digits that look alike in many fonts
_CONTRAST = 40  # difference in brightness, of 255, in a picture that shows something


def checked_facts(
    data: bytes,
    pages: Sequence[tuple[int, PageFacts]],
    recognizer: LineRecognizer,
    policy: MediaPolicy,
    stop: StopSignal,
    tenant: str | None = None,
) -> list[PageFacts]:
    """Compare lines of each page with a reading of them. Return the facts with `num_sampled` and `num_differing`, in order.

    Which lines are read depends on the text of the page alone. Pages that cannot be rendered are not compared.
    """
    samples = [_samples(facts, recognizer.alphabet) for _, facts in pages]
    numbers = [number for number, _ in pages]
    render = partial(_pictures, data, policy=policy, tenant=tenant)
    first = _compared(numbers, [lines[:_FIRST] for lines in samples], recognizer, render, stop)
    rest = [lines[_FIRST:] if any(differs) else [] for lines, differs in zip(samples, first, strict=True)]
    second = _compared(numbers, rest, recognizer, render, stop)
    both = [one + other for one, other in zip(first, second, strict=True)]
    return [
        replace(facts, num_sampled=len(differs), num_differing=sum(differs))
        for (_, facts), differs in zip(pages, both, strict=True)
    ]


def _samples(facts: PageFacts, alphabet: Set[str]) -> list[TextLine]:
    """Return the lines to read: the first ones, and then those that are read if one of these differs."""
    lines = [line for line in facts.lines if _is_readable(line, facts, alphabet)]
    seed = hashlib.sha256("\n".join(line.text for line in lines).encode("utf-8", "replace")).digest()
    first = _spread(lines, _FIRST, seed)
    others = [line for line in lines if line not in first]
    return first + _spread(others, _MORE, seed[_FIRST:])


def _spread(lines: Sequence[TextLine], count: int, seed: bytes) -> list[TextLine]:
    """Return one line of each of so many parts of a page, or all lines if there are fewer."""
    ends = [len(lines) * part // count for part in range(count + 1)]
    parts = [lines[start:end] for start, end in pairwise(ends)]
    return [part[byte % len(part)] for part, byte in zip(parts, seed, strict=False) if part]


def _is_readable(line: TextLine, facts: PageFacts, alphabet: Set[str]) -> bool:
    """Return whether the recognition of a line says something: it is level, on the page, and has letters that are known."""
    left, top, right, bottom = line.box
    height, text = bottom - top, folded(line.text)
    is_level = _LEAST_SIZE <= height <= _TALL * line.size and 2 * height <= right - left
    is_inside = left >= 0 and top >= 0 and right <= facts.width and bottom <= facts.height
    is_text = len(text) >= max(_LEAST_CHARS, _LEAST_SHARE * sum(not char.isspace() for char in line.text))
    letters = {char for char in unicodedata.normalize("NFKC", line.text) if char.isalnum()}
    return is_level and is_inside and is_text and alphabet >= letters


def folded(text: str) -> str:
    """Return the letters and digits of a text, without ligatures, accents, hyphens, upper case, and shapes that are alike."""
    text = unicodedata.normalize("NFKD", text).casefold().translate(_SHAPES)
    return "".join(char for char in text if char.isalnum())


def _compared(
    numbers: Sequence[int],
    samples: Sequence[Sequence[TextLine]],
    recognizer: LineRecognizer,
    render: Callable[[Sequence[Sequence[LinePlace]]], list[list[Picture]]],
    stop: StopSignal,
) -> list[list[bool]]:
    """Return for each page whether its lines differ from their pictures, without those whose reading says nothing."""
    places = [[LinePlace(number, _first_part(line)) for line in lines] for number, lines in zip(numbers, samples, strict=True)]
    pictures = stop.run(lambda: render(places))
    readings = iter(recognizer.recognize([picture for group in pictures for picture in group], stop))
    return [
        [
            differs
            for line, picture in zip(lines, group, strict=False)
            if (differs := _differs(line, picture, *next(readings))) is not None
        ]
        for lines, group in zip(samples, pictures, strict=True)
    ]


def _pictures(
    data: bytes, places: Sequence[Sequence[LinePlace]], policy: MediaPolicy, tenant: str | None
) -> list[list[Picture]]:
    """Return the pictures of the lines of each page. They are rendered together, or page by page if one of them fails."""
    flat = [place for group in places for place in group]
    if not flat:
        return [[] for _ in places]
    try:
        rendered = iter(patiently(lambda: run_isolated(line_pictures, data, flat, policy, tenant=tenant)))
    except InputError:
        return [[]] if len(places) == 1 else [_pictures(data, [group], policy, tenant)[0] for group in places]
    return [[next(rendered).numpy() for _ in group] for group in places]


def _first_part(line: TextLine) -> Box:
    left, top, right, bottom = line.box
    return left, top, min(right, left + _WIDE * (bottom - top)), bottom


def _differs(line: TextLine, picture: Picture, reading: str, score: float) -> bool | None:
    """Return whether a line differs from the reading of its first part, None if that says nothing."""
    if int(picture.max()) - int(picture.min()) < _CONTRAST:
        return True  # it is not shown
    read = folded(reading)
    if score < _LEAST_SCORE or len(read) < _LEAST_READ:
        return None
    return alike(folded(line.text), read, _first_part(line) != line.box) < _LEAST_ALIKE


def alike(text: str, reading: str, is_cut: bool) -> float:
    """Return 1 minus the edit distance of a text and its reading by the length of the longer one.

    Args:
        is_cut: the reading is that of the beginning of the text: its best one counts.
    """
    text = text[: 2 * len(reading)] if is_cut else text
    row = list(range(len(text) + 1))  # distances of the reading so far from each beginning of the text
    for number, char in enumerate(reading, 1):
        before, row = row, [number]
        for place, other in enumerate(text):
            row.append(min(before[place] + (char != other), before[place + 1] + 1, row[place] + 1))
    return 1 - (min(row) / len(reading) if is_cut else row[-1] / max(len(text), len(reading)))
