"""Tells at an end marker whether a block of calls ends there, or whether the marker is a part of an argument."""

from __future__ import annotations

import re

from .call_formats import CallFormat

_QUOTES = re.compile(r"\\.|[\"']", re.S)
_TAIL = 64  # characters; longer than any tag


class BlockEnd:
    """The state of a block that has been read so far.

    In JSON and in Python's syntax, an end marker within quotes is text. A block in tags ends after one of the last tags of the
    format (`closers`), or has no arguments (`openers`).
    """

    def __init__(self, call_format: CallFormat) -> None:
        self._form, self._is_quoted, self._quote, self._tail = call_format, call_format.is_quoted, "", ""
        self._is_empty, self._has_openers = True, False
        self.has_other_begin = False  # after an end marker in tags, another block seems to begin

    def add(self, text: str) -> None:
        """Take the next part of the block, which ends before an end marker."""
        if self._is_empty and (start := text.lstrip()):
            self._is_empty, self._is_quoted = False, self._is_quoted or start[0] in "{["
        if self._form.quote:
            self._quote = self._form.quote if (text.count(self._form.quote) + bool(self._quote)) % 2 else ""
        elif self._is_quoted:
            for mark in _QUOTES.findall(text):
                if not self._quote or mark == self._quote:
                    self._quote = "" if self._quote else mark.strip("\\")
        else:
            self.has_other_begin = bool(self._tail) and any(begin in text for begin in self._form.strong_begins)
        near = self._tail + text
        self._has_openers = self._has_openers or any(opener in near for opener in self._form.openers)
        self._tail = near.rstrip()[-_TAIL:]

    @property
    def is_complete(self) -> bool:
        if self._is_quoted or self._form.quote:
            return not self._quote
        return not self._has_openers or self._tail.endswith(self._form.closers)
