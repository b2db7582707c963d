"""Text that knows which of its characters a template wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, SupportsIndex


class TemplateText(str):
    """Text with a mark per character: 1 if the template wrote it, 0 if the caller did.

    The marks follow through the operations below. The result of any other operation is a plain `str`, which counts as the
    caller's as a whole.
    """

    __slots__ = ("_marks",)
    _marks: bytes

    def __new__(cls, text: str, marks: bytes | None = None) -> TemplateText:
        self = super().__new__(cls, str.__str__(text))
        self._marks = bytes(len(self)) if marks is None else marks
        return self

    @classmethod
    def written(cls, text: str) -> TemplateText:
        """Return text that the template wrote."""
        return cls(text, b"\1" * len(text))

    @classmethod
    def concat(cls, texts: Iterable[str]) -> str:
        texts = list(texts)
        text = "".join(map(str.__str__, texts))
        if not any(isinstance(part, TemplateText) for part in texts):
            return text
        return cls(text, b"".join(map(_marks_of, texts)))

    @property
    def num_pieces(self) -> int:
        return self._marks.count(b"\0\1") + self._marks.count(b"\1\0") + bool(self)

    def pieces(self) -> tuple[tuple[str, bool], ...]:
        """Return runs of text in order, each with True if the template wrote it."""
        text = str.__str__(self)
        runs = re.finditer(rb"\x00+|\x01+", self._marks)
        return tuple((text[run.start() : run.end()], self._marks[run.start()] == 1) for run in runs)

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return NotImplemented if hasattr(other, "__html__") or not isinstance(other, str) else self.concat((self, other))

    def __radd__(self, other: str) -> str:
        return self.concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return TemplateText(super().__mul__(count), self._marks * count.__index__())

    __rmul__ = __mul__

    def __getitem__(self, key: Any) -> TemplateText:
        marks = self._marks[key]
        return TemplateText(super().__getitem__(key), marks if isinstance(marks, bytes) else bytes([marks]))

    def join(self, texts: Iterable[str]) -> str:
        parts = [part for text in texts for part in (self, text)]
        return self.concat(parts[1:])

    def lstrip(self, chars: str | None = None, /) -> TemplateText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> TemplateText:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> TemplateText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str, /) -> str:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        return TemplateText(new, _marks_of(new)).join(self.split(old, count)) if old else super().replace(old, new, count)

    def lower(self) -> str:
        return self._same_length(super().lower())

    def upper(self) -> str:
        return self._same_length(super().upper())

    def capitalize(self) -> str:
        return self._same_length(super().capitalize())

    def title(self) -> str:
        return self._same_length(super().title())

    def _same_length(self, text: str) -> str:
        return TemplateText(text, self._marks) if len(text) == len(self) else text

    def _located(self, parts: list[str], sep: str | None) -> list[str]:
        """Return these parts of this text, in order and with `sep` or whitespace between them, with their marks."""
        located, start = list[str](), 0
        for part in parts:
            start = self.find(part, start)
            located.append(self[start : start + len(part)])
            start += len(part) + len(sep or "")
        return located


def _marks_of(text: str) -> bytes:
    return text._marks if isinstance(text, TemplateText) else bytes(len(text))
