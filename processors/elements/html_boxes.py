"""Boxes in HTML: the `data-bbox` of Qwen2.5-VL's and Qwen3-VL's documents.

Source: the publisher's cookbook on document parsing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html import unescape

from .element import Element, ImageScale, numbers_of
from .tables import read_table

_MARKUP = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)\b([^<>]*)>")
_BOX = re.compile(r"\bdata-bbox\s{0,4}=\s{0,4}[\"']([^\"'<>]{0,100})")
_CLASS = re.compile(r"\bclass\s{0,4}=\s{0,4}[\"']([^\"'<>]{1,100})")
_GROUPS = ("html", "body", "ol", "ul", "dl", "section", "article", "main")  # whose parts are elements of their own
_EMPTY = ("img", "br", "hr", "input", "meta", "link")
_MAX_TAGS = 100_000


@dataclass(frozen=True)
class _Opened:
    """A tag that is not closed yet, with its box or that of the group around it."""

    name: str
    attributes: str
    start: int
    end: int
    numbers: list[float]


@dataclass(frozen=True)
class _Document:
    """A text with boxes whose numbers count `across` and `down` the image."""

    text: str
    scale: ImageScale
    across: float
    down: float

    def elements(self, opened: _Opened, content_end: int, end: int) -> Iterator[Element]:
        """Yield the element of a tag, unless its box is none."""
        inside, named = self.text[opened.end : content_end], _CLASS.search(opened.attributes)
        label = "_".join(named[1].split()) if opened.name == "div" and named and named[1].strip() else opened.name
        cells = read_table(inside)
        content = inside.strip() if cells else unescape(_MARKUP.sub("", inside)).strip()
        element = self.scale.element(opened.numbers[:4], self.across, self.down, "table" if cells else label, content)
        if element is not None:
            yield replace(element, cells=cells, span=(opened.start, end))


def find_html_boxes(text: str, scale: ImageScale, across: float, down: float) -> Iterator[Element]:
    """Yield the outermost HTML elements with `data-bbox`; of lists, their items. Tags inside are no part of the text.

    The label is the tag, or the class of a `div`, such as "image" or "formula". Tables keep their HTML as text.
    """
    document, opened, groups = _Document(text, scale, across, down), None, list[_Opened]()
    depth = 0  # of tags with the name of the opened one
    for _, tag in zip(range(_MAX_TAGS), _MARKUP.finditer(text), strict=False):
        closes, name, attributes = tag[1], tag[2].lower(), tag[3]
        if opened is not None:
            depth += 0 if name != opened.name else -1 if closes else 1
            if depth == 0:
                yield from document.elements(opened, tag.start(), tag.end())
                opened = None
            continue
        if name in _GROUPS:
            groups = groups[:-1] if closes else [*groups[-32:], _opened(tag, groups)]
        elif not closes and (candidate := _opened(tag, groups)).numbers:
            if name in _EMPTY or attributes.endswith("/"):
                yield from document.elements(candidate, tag.end(), tag.end())
            else:
                opened, depth = candidate, 1
    if opened is not None:
        yield from document.elements(opened, len(text), len(text))


def _opened(tag: re.Match[str], groups: list[_Opened]) -> _Opened:
    box = _BOX.search(tag[3])
    numbers = numbers_of(box[1]) if box else groups[-1].numbers if groups else []
    return _Opened(tag[2].lower(), tag[3], tag.start(), tag.end(), numbers)
