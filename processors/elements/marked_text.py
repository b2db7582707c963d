"""An answer with the places in it that a family's format names. The formats are imported when elements are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from .element import Element, ImageScale

MAX_ELEMENTS = 10_000
MAX_CHARACTERS = 1_000_000  # of an answer; the rest is not searched
MAX_LABEL = 200  # characters; several elements share a label
NUMBERED_FORMATS = frozenset({"point_groups"})
"""Formats that say which image, or which second of a video, an element is in."""


def located_modalities(markup: str) -> tuple[str, ...]:
    """Return the modalities of the items in which the elements of a format can be."""
    return ("image", "video") if markup in NUMBERED_FORMATS else ("image",)


@dataclass(frozen=True)
class MarkedText:
    """An answer with its special tokens, and the image that it is about.

    Args:
        format: key of `formats.FORMATS` or of `formats.NUMBERED`.
        source: the text, or a function that decodes it. Pickles hold the text.
        images: the images of the prompt. With several, there are no elements, unless the format says which image they are in.
            With several videos, there are none.
    """

    format: str
    source: str | Callable[[], str]
    images: tuple[ImageScale, ...] = ()

    def elements(self) -> tuple[Element, ...]:
        """Return the elements of the answer. Text that cannot be decoded or parsed gives none."""
        from .formats import FORMATS, NUMBERED
        from .tables import MAX_CELLS

        several = len(self.images) > 1 and any(element.is_video for element in self.images)
        if not self.images or several or (len(self.images) > 1 and self.format not in NUMBERED):
            return ()
        text, located, room = self.text[:MAX_CHARACTERS], list[Element](), MAX_CELLS
        numbered = NUMBERED.get(self.format)
        elements = FORMATS[self.format](text, self.images[0]) if numbered is None else numbered(text, self.images)
        for element in islice(elements, MAX_ELEMENTS):
            located.append(replace(element, label=element.label[:MAX_LABEL], cells=element.cells[:room]))
            room -= len(located[-1].cells)
        return tuple(located)

    @property
    def text(self) -> str:
        """The text; "" if it cannot be decoded."""
        if isinstance(self.source, str):
            return self.source
        try:
            return self.source()
        except Exception:  # tokenizers raise exceptions of many types
            return ""

    def __reduce__(self) -> tuple[type[MarkedText], tuple[object, ...]]:
        return MarkedText, (self.format, self.text, self.images)
