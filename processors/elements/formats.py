"""The formats in which families name elements, by the name that their ProcessingInfo gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

from . import location_tokens
from .element import Element, ImageScale
from .json_places import find_json
from .tables import MAX_CELLS
from .tagged import BOX_REF, OBJECT_REF_BOX, REF_BOX, REF_DET, find_tagged

MAX_ELEMENTS = 10_000
MAX_CHARACTERS = 1_000_000  # of an answer; the rest is not searched
MAX_LABEL = 200  # characters; several elements share a label

Finder = Callable[[str, ImageScale], Iterable[Element]]


def _box_tokens(text: str, scale: ImageScale) -> Iterator[Element]:
    style = OBJECT_REF_BOX if OBJECT_REF_BOX.label[0] in text else BOX_REF
    return chain(find_tagged(text, scale, style), find_json(text, scale, 1000, 1000))


def _resized_json(text: str, scale: ImageScale) -> Iterator[Element]:
    height, width = scale.resized
    return find_json(text, scale, width, height)


FORMATS: Mapping[str, Finder] = {
    "box_tokens": _box_tokens,  # or JSON in thousandths
    "corner_tokens": location_tokens.find_corner_tokens,
    "doctags": location_tokens.find_doctags,
    "loc_tokens": location_tokens.find_loc_tokens,
    "pairs_in_text": location_tokens.find_pairs,
    "point_tags": location_tokens.find_point_tags,
    "ref_box": partial(find_tagged, style=REF_BOX),
    "ref_det": partial(find_tagged, style=REF_DET),
    "resized_json": _resized_json,  # pixels of the resized image
    "xy_tokens": location_tokens.find_xy_tokens,
}


@dataclass(frozen=True)
class MarkedText:
    """An answer with its special tokens, and the image that it is about.

    Args:
        format: key of FORMATS.
        source: the text, or a function that decodes it. Pickles hold the text.
        images: the images of the prompt. With several, there are no elements, because answers do not say which image they mean.
    """

    format: str
    source: str | Callable[[], str]
    images: tuple[ImageScale, ...] = ()

    def elements(self) -> tuple[Element, ...]:
        """Return the elements of the answer. Text that cannot be decoded or parsed gives none."""
        if len(self.images) != 1:
            return ()
        found, room = [], MAX_CELLS
        for one in islice(FORMATS[self.format](self.text[:MAX_CHARACTERS], self.images[0]), MAX_ELEMENTS):
            found.append(replace(one, label=one.label[:MAX_LABEL], cells=one.cells[:room]))
            room -= len(found[-1].cells)
        return tuple(found)

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
