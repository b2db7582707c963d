"""The formats in which families name elements, by the name that their ProcessingInfo gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

from . import location_tokens
from .bracket_boxes import IS_LAYOUT, find_bracket_boxes
from .element import HTML_BOX, Element, ImageScale
from .html_boxes import find_html_boxes
from .json_places import find_json
from .markdown_boxes import COMMENT, find_comments, find_pictures
from .tables import read_table
from .tagged import BOX_REF, BOX_REF_MD, OBJECT_REF_BOX, REF_BOX, REF_DET, find_tagged

_OTSL_STARTS = ("<fcel>", "<ecel>", "<ched>", "<rhed>", "<srow>")

Finder = Callable[[str, ImageScale], Iterable[Element]]


def _box_tokens(text: str, scale: ImageScale) -> Iterator[Element]:
    style = OBJECT_REF_BOX if OBJECT_REF_BOX.label[0] in text else BOX_REF
    return chain(_table(text, scale), find_tagged(text, scale, style), _places(text, scale, 1000, 1000))


def _places(text: str, scale: ImageScale, across: float, down: float) -> Iterable[Element]:
    """Return the elements of HTML, Markdown with comments, or JSON."""
    if HTML_BOX in text:
        return find_html_boxes(text, scale, across, down)
    return (find_comments if COMMENT.search(text) else find_json)(text, scale, across, down)


def _table(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield the table of an answer that is one table as OTSL tokens, without a box (MinerU 2.5)."""
    if text.lstrip().startswith(_OTSL_STARTS) and (cells := read_table(text)):
        yield Element("table", text.strip(), cells=cells, image=scale.index, span=(0, len(text)))


def _resized_places(text: str, scale: ImageScale) -> Iterable[Element]:
    height, width = scale.resized
    if IS_LAYOUT.match(text):
        return find_bracket_boxes(text, scale, width, height)
    return _places(text, scale, width, height)


FORMATS: Mapping[str, Finder] = {
    "box_tokens": _box_tokens,  # or JSON, HTML or Markdown in thousandths, or one table
    "corner_tokens": location_tokens.find_corner_tokens,
    "doctags": location_tokens.find_doctags,
    "image_boxes": find_pictures,
    "loc_tokens": location_tokens.find_loc_tokens,
    "md_tokens": partial(find_tagged, style=BOX_REF_MD),
    "pairs_in_text": location_tokens.find_pairs,
    "point_tags": location_tokens.find_point_tags,
    "pointing_tags": location_tokens.find_pointing_tags,
    "ref_box": partial(find_tagged, style=REF_BOX),
    "ref_det": partial(find_tagged, style=REF_DET),
    "resized_json": _resized_places,  # or HTML, or a layout in brackets, in pixels of the resized image
    "xy_tokens": location_tokens.find_xy_tokens,
}
NUMBERED: Mapping[str, Callable[[str, Sequence[ImageScale]], Iterable[Element]]] = {
    "point_groups": location_tokens.find_point_groups,
}
"""Formats that are given all images: `marked_text.NUMBERED_FORMATS`."""
