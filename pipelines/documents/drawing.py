"""Pages with the boxes of their blocks drawn over them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ...callers.errors import ConfigError, is_disk_full
from ...mm.media.isolate import run_isolated
from ...mm.media.page_facts import page_pixels
from ...mm.media.policy import MediaPolicy
from .blocks import Kind, PageRecord, pixel_box
from .inputs import pages_of_file, read_bytes, scale_of

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#f032e6")
_LINE = "#b0b0b0"


def draw_pages(item: object, pages: Iterable[PageRecord], policy: MediaPolicy, folder: Path, name: str) -> Iterator[Path]:
    """Write each page that has boxes as `name-0001.png` into a folder. Yield the paths. The name may begin with a subfolder.

    Raises:
        InputError: the file or a page cannot be opened.
        ConfigError: a picture cannot be written.
    """
    data: bytes | None = None
    for page in pages:
        if not any(block.box is not None for block in page.blocks) or not page.width:
            continue
        data = pages_of_file(read_bytes(item, policy), policy) if data is None else data
        pixels = run_isolated(page_pixels, data, page.number, policy).numpy()
        path = folder / f"{name}-{page.number:04}.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _drawn(pixels, page, scale_of(data, policy)).save(path)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise ConfigError(f"<<draw>>: {os.fspath(path)} cannot be written: {error.strerror or error}") from None
        yield path


def _drawn(pixels: np.ndarray, page: PageRecord, scale: float) -> Image:
    """Return a page with a rectangle for each block and line. The number of a block is that in reading order."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.fromarray(pixels)
    pen, kinds, width = ImageDraw.Draw(image), get_args(Kind), max(2, max(image.size) // 600)
    font = ImageFont.load_default(8 * width)
    for block in page.blocks:
        for line in block.lines:
            if line.box is not None:
                pen.rectangle(pixel_box(line.box, scale), outline=_LINE, width=max(width // 2, 1))
    for order, block in enumerate(page.blocks):
        if block.box is None:
            continue
        left, top, right, bottom = pixel_box(block.box, scale)
        color = _COLORS[kinds.index(block.kind) % len(_COLORS)]
        pen.rectangle((left, top, right, bottom), outline=color, width=width)
        pen.text((left, max(top - 10 * width, 0)), f"{order} {block.kind}", fill=color, font=font)
    return image
