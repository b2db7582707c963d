"""Renders parts of the lines of a PDF's pages. `line_pictures` runs in a codec worker, as `page_facts` does."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from .page_facts import Box
from .pdf import opened_page
from .policy import MediaPolicy

_PIXELS = 36  # of the height of a line without its margin
_MARGIN = 0.1  # heights on each side


@dataclass(frozen=True)
class LinePlace:
    """A line of page `number`, counted from 1, with its box in points as the page is shown."""

    number: int
    box: Box


def line_pictures(data: bytes, places: list[LinePlace], policy: MediaPolicy) -> list[Tensor]:
    """Return the pictures of lines of a PDF as uint8 `[height, width, 3]` on white, some 43 pixels high.

    Raises:
        InputError: as `pdf.decode_page`.
    """
    pictures = list[Tensor]()
    for number, group in groupby(places, lambda place: place.number):
        with opened_page(data, number, with_forms=True) as page:
            width, height = page.get_size()
            pictures += [_picture(page, place.box, width, height) for place in group]
    return pictures


def _picture(page: Any, box: Box, width: float, height: float) -> Tensor:
    left, top, right, bottom = box
    margin, scale = _MARGIN * (bottom - top), _PIXELS / (bottom - top)
    sides = (left - margin, height - bottom - margin, width - right - margin, top - margin)
    bitmap = page.render(scale=scale, crop=tuple(max(side, 0.0) for side in sides), rev_byteorder=True)
    pixels = torch.from_numpy(bitmap.to_numpy()[..., :3].copy())  # [height, width, 3]
    bitmap.close()
    return pixels
