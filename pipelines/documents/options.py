"""Options of `read`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from ...callers.errors import InputError, short_repr
from ..ocr import QUESTION
from ..validation import check_type
from .manifest import Ranges
from .ways import TextLayer

AUTO = "auto"
"""Name of the reader of printed lines that is installed: RapidOCR, or else tesseract."""
_READER = re.compile(r"auto|rapidocr|tesseract(:[\w/-]+(\+[\w/-]+)*)?")
_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:(-)\s*(\d{1,9})?\s*)?")
_LAST = 1 << 31
LINE_CHARACTERS = 32
"""Characters that a line counts as, at least: its box takes memory, too."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of `read`.

    Args:
        pages: which pages of each document are read, such as "3-7,12" or "10-"; None: all.
        text_layer: "auto" uses the text layer of a page if it can be trusted, "always" if there is one, "never" reads each
            page's picture.
        jobs: pages are inspected in so many codec workers at a time; None: one for each processor, at most 8.
        max_pages: pages of one document, longer ones are refused; None: `max_pdf_pages` of the media policy.
        max_characters: characters of the text layers of one document, in which a line counts as at least `LINE_CHARACTERS`;
            further pages are not read. None: no limit.
        question: the prompt beside each page that a model reads, as in `ocr`.
        max_tokens: maximum number of tokens of such a page.
        cache_salt: requests with different salts share no cache.
        reader: of printed lines: "auto" for the one that is installed, "rapidocr", "tesseract" (in English), or with languages
            "tesseract:deu+eng". With a model, its lines are drafts and checks of the model's readings.
        calibration: file with the calibration of confidences that `fit_calibration` has written for the model or, without one,
            the reader.
        convert_office: office files are read through LibreOffice, which this starts with the rights of this process; else they
            are refused.

    Raises:
        InputError: an option has a wrong type or value.
    """

    pages: str | None = None
    text_layer: TextLayer = "auto"
    jobs: int | None = None
    max_pages: int | None = None
    max_characters: int | None = None
    question: str = QUESTION
    max_tokens: int | None = 4096
    cache_salt: str | None = None
    convert_office: bool = True
    reader: str = AUTO
    calibration: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check_type("convert_office", self.convert_office, bool)
        check_type("pages", self.pages, str, type(None))
        check_type("text_layer", self.text_layer, str)
        check_type("question", self.question, str)
        check_type("cache_salt", self.cache_salt, str, type(None))
        check_type("reader", self.reader, str)
        check_type("calibration", self.calibration, str, os.PathLike, type(None))
        if not _READER.fullmatch(self.reader):
            names = 'auto, rapidocr, tesseract, and tesseract:LANGUAGES such as "tesseract:deu+eng"'
            raise InputError(f"<<param=>>{short_repr(self.reader)}; the known ones are {names}", param="reader")
        if self.text_layer not in get_args(TextLayer):
            names = ", ".join(get_args(TextLayer))
            raise InputError(f"<<param=>>{short_repr(self.text_layer)}; the known ones are {names}", param="text_layer")
        for name in ("jobs", "max_pages", "max_characters", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"<<param=>>{short_repr(value)} must be an integer of 1 or above", param=name)
        parse_pages(self.pages)

    @property
    def num_jobs(self) -> int:
        return self.jobs or min(os.cpu_count() or 1, 8)


@dataclass(frozen=True)
class OutputOptions:
    """Where `read` writes documents, and how; see the arguments of `LLM.read`.

    Raises:
        InputError: an option has a wrong type.
    """

    output_dir: str | os.PathLike[str] | None = None
    output_format: str = "md"
    resume: bool = False

    def __post_init__(self) -> None:
        check_type("output_dir", self.output_dir, str, os.PathLike, type(None))
        check_type("output_format", self.output_format, str)
        check_type("resume", self.resume, bool)


def parse_pages(text: str | None) -> Ranges:
    """Return first and last numbers of pages, in order and without overlaps; all pages for None.

    Raises:
        InputError: the text is not like "3-7,12" or "10-".
    """
    if text is None:
        return ((1, _LAST),)
    pairs = list[tuple[int, int]]()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first = int(match[1]) if match else 0
        last = 0 if match is None else first if not match[2] else int(match[3] or _LAST)
        if not 1 <= first <= last:
            advice = 'give numbers from 1 and ranges, such as "3-7,12" or "10-"'
            raise InputError(f"<<param=>>{short_repr(text)} names no pages; {advice}", param="pages", code="invalid_value")
        pairs.append((first, last))
    return tuple(_merged(sorted(pairs)))


def _merged(pairs: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    first, last = pairs[0]
    for start, end in pairs[1:]:
        if start > last + 1:
            yield first, last
            first, last = start, end
        else:
            last = max(last, end)
    yield first, last


def pages_within(ranges: Ranges, count: int) -> Ranges:
    """Return the ranges of a document with so many pages; () if it has none of them."""
    return tuple((first, min(last, count)) for first, last in ranges if first <= count)
