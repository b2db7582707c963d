"""Locations as tokens: PaliGemma, PaddleOCR-VL, DocTags, Nemotron-Parse. Coordinates in text: HunYuan-OCR, Molmo, Isaac.

Sources: the model cards, docling-core's DocTags, Nemotron-Parse's post-processing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import unescape
from itertools import pairwise

from .element import Element, ImageScale, numbers_of
from .tables import read_table

_LOC_TOKENS = re.compile(r"((?:<loc\d{4}>){4})(?:<seg\d{3}>)*([^;<\n]*)")
_CORNER_TOKENS = re.compile(r"((?:<\|LOC_\d{1,4}\|>){8})")
_PAIRS = re.compile(r"(\(\d{1,4},\s?\d{1,4}\),\s?\(\d{1,4},\s?\d{1,4}\))")
_TAG = re.compile(r"<[A-Za-z_/|][^<>]*>")
_POINTS = re.compile(r"<(?:points?|tracks)\s([^<>]*)>([^<]*)")
_ATTRIBUTE = re.compile(r"([xy]\d*)\s*=\s*\"\s*(\d{1,3}(?:\.\d{1,9})?)\s*\"")
_COORDS = re.compile(r"coords\s*=\s*\"([^\"]*)\"")
# the whitespace after a separator holds no tab, which is a separator itself: otherwise a run of tabs takes quadratic time
_GROUP = re.compile(r"(?:^|[\t:,;])[^\S\t]*(\d{1,9}(?:\.\d{1,9})?) ([\d ]+)")
_POINT = re.compile(r"(\d{1,9}) (\d{3,4}) (\d{3,4})")
_POINTING = re.compile(r"<(point|point_box|polygon)((?:\s[^<>]*)?)>([^<]*)</\1>|<(/?)collection((?:\s[^<>]*)?)>", re.IGNORECASE)
_MENTION = re.compile(r"mention\s*=\s*(?:\"([^\"]*)\"|([^\s\"]+))")
_SECOND = re.compile(r"\st\s*=\s*\"?(\d{1,9}(?:\.\d{1,9})?)")
_DOCTAG = re.compile(r"<([a-z_]\w*)>((?:<loc_\d{1,3}>){4})|</([a-z_]\w*)>")
_CORNER = re.compile(r"<x_(\d\.?\d{0,9})><y_(\d\.?\d{0,9})>(?:<class_([^<>]*)>)?")
_DOCTAG_UNITS = 500.0
_MAX_OPEN = 32  # DocTags inside each other


def find_loc_tokens(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield boxes written as four `<loc0123>` (top, left, bottom, right; units of 1/1024) and a label."""
    for tokens, label in _LOC_TOKENS.findall(text):
        top, left, bottom, right = (int(digits) for digits in re.findall(r"loc(\d{4})", tokens))
        element = scale.element((left, top, right, bottom), 1024, 1024, label.strip())
        if element is not None:
            yield element


def find_corner_tokens(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield polygons written as a text and eight `<|LOC_123|>`: four corners, in thousandths. A table is one element."""
    cells = read_table(text)
    if cells:
        yield Element("table", text.strip(), cells=cells, image=scale.index, span=(0, len(text)))
    yield from _after_their_text(_CORNER_TOKENS.split(text), scale)


def find_pairs(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield boxes written as a text and `(x1,y1),(x2,y2)`, in thousandths."""
    yield from _after_their_text(_PAIRS.split(text), scale)


def _after_their_text(parts: list[str], scale: ImageScale) -> Iterator[Element]:
    end = 0
    for content, location in zip(parts[::2], parts[1::2], strict=False):
        start, end = end, end + len(content) + len(location)
        element = scale.element(numbers_of(location), 1000, 1000, text=_TAG.sub("", content).strip())
        if element is not None:
            yield replace(element, span=(start, end))


def find_point_tags(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield points of `<point x= y=>` and `<points x1= y1= x2= ...>`, in percent, and of Molmo2's `coords=`, in thousandths."""
    for attributes, content in _POINTS.findall(text):
        label, values = content.strip(), dict(_ATTRIBUTE.findall(attributes))
        for name in values:
            pair = values[name], values.get(name.replace("x", "y"))
            if name.startswith("x") and pair[1] is not None:
                yield Element(label, points=(scale.point(float(pair[0]), float(pair[1]), 100, 100),), image=scale.index)
        for _, x, y in (point for coords in _COORDS.findall(attributes) for point in _POINT.findall(coords)):
            yield Element(label, points=(scale.point(float(x), float(y), 1000, 1000),), image=scale.index)


def find_point_groups(text: str, scales: Sequence[ImageScale]) -> Iterator[Element]:
    """Yield points of Molmo2's `<points coords="1 1 100 200 2 300 400;2 1 ...">` and `<tracks ...>`, in thousandths.

    A group begins with the number of the image, from 1, or with the seconds of the video. Each point has a number, x and y.
    With one image, the forms of `find_point_tags` are read, too.
    """
    if len(scales) == 1 and not scales[0].is_video and not _COORDS.search(text):
        yield from find_point_tags(text, scales[0])
        return
    for attributes, content in _POINTS.findall(text):
        for frame, points in (group for coords in _COORDS.findall(attributes) for group in _GROUP.findall(coords)):
            number = int(float(frame)) - 1
            is_video = len(scales) == 1 and scales[0].is_video
            scale = scales[0] if len(scales) == 1 else scales[number] if 0 <= number < len(scales) else None
            for track, x, y in _POINT.findall(points) if scale is not None else ():
                if max(int(x), int(y)) <= 1000:
                    assert scale is not None
                    element = Element(content.strip(), points=(scale.point(int(x), int(y), 1000, 1000),), image=scale.index)
                    yield replace(element, time=float(frame) if is_video else None, track=int(track))


def find_pointing_tags(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield `<point mention="cup" t=1.5> (1,2) </point>`, `<point_box>` and `<polygon>`, in thousandths (Isaac).

    Tags without a mention have that of the `<collection>` around them. Tags in the reasoning before `</think>` are not read.
    """
    outer = ""
    for tag, attributes, inside, closing, collection in _POINTING.findall(text, text.rfind("</think>") + 1):
        mention, second = _MENTION.search(attributes or collection), _SECOND.search(attributes)
        label = unescape(mention[1] or mention[2] or "") if mention else ""
        if not tag:
            outer = "" if closing else label
            continue
        numbers = numbers_of(inside)
        pairs = list(zip(numbers[::2], numbers[1::2], strict=False))
        least = {"point": 1, "point_box": 2}.get(tag.lower(), 3)
        points = tuple(scale.point(x, y, 1000, 1000) for x, y in (pairs if least == 3 else pairs[:least]))
        if len(points) < least:
            continue
        (left, right), (top, bottom) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
        box = (left, top, right, bottom) if least > 1 else None
        time = float(second[1]) if second else None
        yield Element(label or outer, "", box, () if least == 2 else points, image=scale.index, time=time)


@dataclass
class _Open:
    """A DocTag that is not closed yet."""

    name: str
    numbers: list[float]
    order: int
    start: int
    pieces: list[str] = field(default_factory=list)


def find_doctags(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield the elements of `<name><loc_1><loc_2><loc_3><loc_4>content</name>`, in units of 1/500, by opening tag."""
    numbered: list[tuple[int, Element]] = []
    opened: list[_Open] = []

    def close(end: int) -> None:
        last = opened.pop()
        content = "".join(last.pieces)
        cells = read_table(content) if last.name in ("otsl", "chart", "picture") else ()
        label = "table" if last.name == "otsl" else last.name
        located = scale.element(last.numbers, _DOCTAG_UNITS, _DOCTAG_UNITS)
        if located is not None:
            element = Element(
                label,
                _TAG.sub(" " if cells else "", content).strip(),
                located.box,
                cells=cells,
                image=scale.index,
                span=(last.start, end),
            )
            numbered.append((last.order, element))

    end = 0
    for order, tag in enumerate(_DOCTAG.finditer(text)):
        if opened:
            opened[-1].pieces.append(text[end : tag.start()])
        end = tag.end()
        if tag[1]:
            if len(opened) < _MAX_OPEN:
                opened.append(_Open(tag[1], numbers_of(tag[2]), order, tag.start()))
        elif any(outer.name == tag[3] for outer in opened):
            while opened[-1].name != tag[3]:
                close(tag.start())
            close(end)
    if opened:
        opened[-1].pieces.append(text[end:])
    while opened:
        close(len(text))
    yield from (element for _, element in sorted(numbered, key=lambda pair: pair[0]))


def find_xy_tokens(text: str, scale: ImageScale) -> Iterator[Element]:
    """Yield `<x_0.1><y_0.2>content<x_0.3><y_0.4><class_Text>`, in fractions of the padded image (Nemotron-Parse).

    The image is in the middle of `scale.resized`; larger images are shrunk to it, smaller ones keep their size.
    """
    (height, width), (tall, wide) = scale.size, scale.resized
    ratio = width / height  # the order of operations is that of the resize
    inner_tall, inner_wide = min(height, tall), width if height <= tall else int(tall * ratio)
    if inner_wide > wide:
        inner_tall, inner_wide = int(wide / ratio), wide
    left, top = (wide - inner_wide) // 2, (tall - inner_tall) // 2
    for first, last in pairwise(_CORNER.finditer(text)):
        if first[3] is not None or last[3] is None:
            continue
        numbers = [float(value) for corner in (first, last) for value in (corner[1], corner[2])]
        moved = [value * (tall if i % 2 else wide) - (top if i % 2 else left) for i, value in enumerate(numbers)]
        content = text[first.end() : last.start()].strip()
        element = scale.element(moved, max(1, inner_wide), max(1, inner_tall), last[3].strip(), content)
        if element is not None:
            yield replace(element, span=(first.start(), last.end()))
