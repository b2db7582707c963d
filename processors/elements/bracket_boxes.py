"""Finds the regions of Dolphin's layout: `[x1,y1,x2,y2][label][attribute][PAIR_SEP]...`, in pixels of the resized image.

Source: the publisher's `parse_layout_string`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from .element import Element, ImageScale, numbers_of

_NUMBER = r"\d{1,5}(?:\.\d{1,4})?"
_BOX = rf"\[({_NUMBER}(?:,[ ]?{_NUMBER}){{3}})\]"
IS_LAYOUT = re.compile(rf"\s{{0,8}}{_BOX}[ ]?\[[a-z]")
"""The beginning of such an answer."""
_REGION = re.compile(rf"{_BOX}[ ]?\[([a-z]\w{{0,39}})\](?:\[\w{{1,40}}\])*")  # with its attributes and separator


def find_bracket_boxes(text: str, scale: ImageScale, across: float, down: float) -> Iterator[Element]:
    """Yield the regions of a layout in order."""
    for region in _REGION.finditer(text):
        element = scale.element(numbers_of(region[1]), across, down, region[2])
        if element is not None:
            yield replace(element, span=region.span())
