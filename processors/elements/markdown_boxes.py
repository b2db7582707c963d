"""Finds boxes in Markdown: Qwen3-VL's comments before tables and in place of pictures, LightOnOCR-2's numbers after pictures.

Sources: Qwen3-VL's cookbook on document parsing (its Markdown has LaTeX tables); LightOnOCR-2's model card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from .element import Element, ImageScale, numbers_of

COMMENT = re.compile(r"<!--\s{0,4}([A-Za-z]{1,20})\s{0,4}\(([\d\s,.]{7,60})\)\s{0,4}-->")
_PICTURE = re.compile(r"!\[([^\[\]\n]{0,200})\]\([^()\s]{0,200}\)[ \t]{0,2}(\d{1,4}(?:,[ \t]?\d{1,4}){3})(?!\d)")


def find_comments(text: str, scale: ImageScale, across: float, down: float) -> Iterator[Element]:
    """Yield an element for each comment `<!-- Image (x1, y1, x2, y2) -->`, or `<!-- Table ... -->`, which a table follows."""
    for comment in COMMENT.finditer(text):
        numbers = numbers_of(comment[2])
        if len(numbers) == 4 and (element := scale.element(numbers, across, down, comment[1].lower())) is not None:
            yield replace(element, span=comment.span())


def find_pictures(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield an element for each `![image](image_1.png)x1,y1,x2,y2`, in thousandths."""
    for picture in _PICTURE.finditer(text):
        element = scale.element(numbers_of(picture[2]), 1000, 1000, "image", picture[1])
        if element is not None:
            yield replace(element, span=picture.span())
