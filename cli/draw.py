"""`--draw`: an image with the boxes and points that an answer names."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..callers.errors import ConfigError, short_repr

if TYPE_CHECKING:
    from ..engine.outputs import RequestOutput

_COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#f032e6")
_FORMATS = (".png", ".jpg", ".jpeg", ".webp")


def check_drawing(path: Path | None, images: int, has_question: bool) -> None:
    """Raise ConfigError if the drawing cannot be made: it shows one image and one answer."""
    if path is None:
        return
    if path.suffix.lower() not in _FORMATS:
        raise ConfigError(
            f"--draw {short_repr(str(path))} is not an image file; give a name that ends with {', '.join(_FORMATS)}"
        )
    if images != 1 or not has_question:
        raise ConfigError("--draw needs one --image and a question; give both")


def draw(source: str | bytes, output: RequestOutput, path: Path) -> None:
    """Write the image with the elements of the first answer to a file. Each label has its own color.

    Raises:
        ConfigError: the file cannot be written.
    """
    from PIL import Image, ImageDraw

    from ..mm.media import gate
    from ..mm.media.policy import DecodeSpec, MediaPolicy
    from ..mm.parse import MediaSource, trusted_source
    from ..mm.types import ImageItem

    elements, policy = output.elements, MediaPolicy()
    if not any(element.box or element.points for element in elements):
        print("sensorium: note: the answer names no boxes or points; --draw writes the image as it is", file=sys.stderr)
    loaded = gate.load(MediaSource("image", 0, trusted_source(source)), policy)
    (item,) = gate.decode(loaded, DecodeSpec(), policy)
    assert isinstance(item, ImageItem)
    image = Image.fromarray(item.pixels.numpy())
    pen, labels = ImageDraw.Draw(image), list(dict.fromkeys(element.label for element in elements))
    width = max(2, max(image.size) // 400)
    for element in elements:
        color = _COLORS[labels.index(element.label) % len(_COLORS)]
        if len(element.points) > 1:
            pen.polygon(element.points, outline=color, width=width)
        elif element.box is not None:
            pen.rectangle(element.box, outline=color, width=width)
        for x, y in element.points[: element.box is None]:
            pen.ellipse((x - 2 * width, y - 2 * width, x + 2 * width, y + 2 * width), fill=color)
        if element.label and (element.box or element.points):
            corner = element.points[0] if element.box is None else (element.box[0] + width, element.box[1] + width)
            pen.text(corner, element.label.encode("latin-1", "replace").decode("latin-1"), fill=color)
    try:
        image.save(path)
    except OSError as error:
        raise ConfigError(
            f"--draw: {short_repr(str(path))} cannot be written ({error.strerror or error}); give another path"
        ) from None
