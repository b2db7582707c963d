"""The regions of a page: which are read, their pictures, and drafts of their text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from ...engine.elements import Element
from ...mm.media.page_facts import Box
from ..two_steps import TwoSteps
from .answers import kind_of
from .blocks import Block, pixel_box
from .line_recognizer import Picture

if TYPE_CHECKING:
    from PIL import Image

WHOLE_PAGE = "text"
"""Label of a page that is read in one piece."""
_INSIDE = 0.9  # share of a region's area from which it is a part of a table, and not read by itself
_OVERLAP = 0.1  # intersection over union from which regions overlap
_LEAST_SIDE, _MOST_RATIO = 28, 50.0  # of a region's picture: mineru-vl-utils
_MARGIN = 0.3  # around a region of printed lines, in heights of its lowest line


def layout_regions(elements: Iterable[Element], two_steps: TwoSteps) -> list[Element]:
    """Return the regions that are read, in order, without repeated ones, containers and what is in tables.

    The list is empty if the page is to be read in one piece: its layout has no regions, or too many overlap.
    """
    regions = dict[tuple[str, Box], Element]()
    for element in elements:
        if element.box is not None and element.label.lower() not in two_steps.containers and _area(element.box):
            regions.setdefault((element.label, element.box), element)
    tables = [region.box for region in regions.values() if kind_of(region) == "table" and region.box is not None]
    kept = [region for region in regions.values() if not _is_in_table(region, tables)]
    return [] if _is_distorted(kept, two_steps) else kept


def printed_regions(blocks: Iterable[Block], scale: float) -> Iterator[Element]:
    """Yield the blocks of printed lines as regions."""
    for block in blocks:
        if block.box is not None:
            left, top, right, bottom = pixel_box(block.box, scale)
            heights = [line.box[3] - line.box[1] for line in block.lines if line.box is not None]
            margin = _MARGIN * scale * min(heights, default=0.0)
            label = f"h{max(block.level, 1)}" if block.kind == "heading" else block.kind
            yield Element(label, box=(max(left - margin, 0.0), max(top - margin, 0.0), right + margin, bottom + margin))


def _is_in_table(region: Element, tables: Sequence[Box]) -> bool:
    if region.box is None or kind_of(region) not in ("paragraph", "formula"):
        return False
    return any(_common(region.box, table) >= _INSIDE * _area(region.box) for table in tables)


def _is_distorted(regions: Sequence[Element], two_steps: TwoSteps) -> bool:
    """Return whether so many regions overlap that the page was probably photographed."""
    boxes = [region.box for region in regions if region.box is not None]
    if two_steps.most_overlapping is None or len(boxes) < 2:
        return False
    count = sum(
        any(i != j and _common(a, b) > _OVERLAP * (_area(a) + _area(b) - _common(a, b)) for j, b in enumerate(boxes))
        for i, a in enumerate(boxes)
    )
    return count > two_steps.most_overlapping * len(boxes)


def _area(box: Box) -> float:
    left, top, right, bottom = box
    return max(right - left, 0.0) * max(bottom - top, 0.0)


def _common(a: Box, b: Box) -> float:
    return _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))


def region_picture(pixels: Picture, region: Element) -> Image.Image | None:
    """Return the upright picture of a region; None if it has no pixels.

    Sides are at least 28 pixels, and the longer one is at most 50 times the shorter one, which is padded with white.

    Args:
        pixels: of the page.
    """
    import numpy as np
    from PIL import Image

    assert region.box is not None
    left, top, right, bottom = (round(side) for side in region.box)
    part = pixels[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)]
    if part.size == 0:
        return None
    picture = Image.fromarray(np.ascontiguousarray(np.rot90(part, (region.angle or 0) // 90)))
    width, height = picture.size
    if max(width, height) > _MOST_RATIO * min(width, height):
        size = max(width, ceil(height / _MOST_RATIO)), max(height, ceil(width / _MOST_RATIO))
        padded = Image.new("RGB", size, "white")
        padded.paste(picture, ((size[0] - width) // 2, (size[1] - height) // 2))
        picture = padded
    if min(picture.size) < _LEAST_SIDE:
        scale = _LEAST_SIDE / min(picture.size)
        size = ceil(picture.width * scale), ceil(picture.height * scale)
        picture = picture.resize(size, Image.Resampling.BICUBIC)
    return picture


def text_in(region: Element, lines: Iterable[tuple[str, Box]], scale: float) -> str:
    """Return the text of the lines whose middles are in a region. `lines`: with boxes in points."""
    assert region.box is not None
    left, top, right, bottom = region.box
    inside = (
        text
        for text, box in lines
        if left <= scale * (box[0] + box[2]) / 2 <= right and top <= scale * (box[1] + box[3]) / 2 <= bottom
    )
    return " ".join(inside)
