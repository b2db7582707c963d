"""The formats in which families name elements, by the name that their ProcessingInfo gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

from . import location_tokens
from .bracket_boxes import IS_LAYOUT, find_bracket_boxes
from .element import Element, ImageScale
from .html_boxes import find_html_boxes
from .json_places import find_json
from .markdown_boxes import COMMENT, find_comments, find_pictures
from .tables import MAX_CELLS, read_table
from .tagged import BOX_REF, BOX_REF_MD, OBJECT_REF_BOX, REF_BOX, REF_DET, find_tagged

MAX_ELEMENTS = 10_000
MAX_CHARACTERS = 1_000_000  # of an answer; the rest is not searched
HTML_BOX = "data-bbox"
"""The attribute that distinguishes HTML with boxes from JSON."""
_OTSL_STARTS = ("<fcel>", "<ecel>", "<ched>", "<rhed>", "<srow>")
MAX_LABEL = 200  # characters; several elements share a label

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
"""Formats that say which image, or which second of a video, an element is in."""


def located_modalities(markup: str) -> tuple[str, ...]:
    """Return the modalities of the items in which the elements of a format can be."""
    return ("image", "video") if markup in NUMBERED else ("image",)


@dataclass(frozen=True)
class MarkedText:
    """An answer with its special tokens, and the image that it is about.

    Args:
        format: key of FORMATS or of NUMBERED.
        source: the text, or a function that decodes it. Pickles hold the text.
        images: the images of the prompt. With several, there are no elements, unless the format says which image they are in.
            With several videos, there are none.
    """

    format: str
    source: str | Callable[[], str]
    images: tuple[ImageScale, ...] = ()

    def elements(self) -> tuple[Element, ...]:
        """Return the elements of the answer. Text that cannot be decoded or parsed gives none."""
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
