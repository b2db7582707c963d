"""Draw synthetic images and videos for tiny-vl: printed strings, receipts, moving shapes.

Everything comes from a numpy Generator, so a seed defines a data set. The fonts ship with matplotlib.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

UNIT = 16  # pixels covered by one merged vision token: patch 8 x merge 2
CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
PRINTED = CHARS + " .-"  # words on receipts
FACES = (  # in the order of the curriculum
    "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "STIXGeneral", "DejaVuSerif-Bold",
    "STIXGeneralBol", "cmr10", "cmtt10", "DejaVuSansMono-Bold", "cmb10",
)  # fmt: skip
UNSEEN_FACE = "cmss10"  # never trained on
COLOURS = {"red": (215, 40, 40), "green": (40, 160, 60), "blue": (45, 80, 220), "yellow": (225, 190, 30)}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
ITEMS = ("TEA", "COFFEE", "BREAD", "MILK", "APPLE", "SOUP", "CAKE", "RICE", "FISH", "EGGS", "SALT", "JAM", "WINE", "PIE")
CLIP_FRAMES, CLIP_SIZE = 8, 64
PROMPTS = {"text": "Read the text.", "receipt": "Read the receipt.", "clip": "What happens in the clip?"}


@dataclass(frozen=True)
class Sample:
    """One image `[h, w, 3]` or video `[frames, h, w, 3]` (uint8) with its answer.

    `boxes` are `(x0, x1, y0, y1, char, column, line)` in pixels, one per printed character: the trainer's
    auxiliary targets, unused elsewhere.
    """

    kind: str
    pixels: np.ndarray
    answer: str
    boxes: list[tuple[float, float, float, float, str, int, int]] = field(default_factory=list)


@functools.cache
def font(face: str, size: int) -> ImageFont.FreeTypeFont:
    """Load the TrueType font `face` from matplotlib's font folder at `size` pixels."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"), size)


def _colours(rng: np.random.Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose paper and ink colours at least 110 levels apart; one image in eight is white on dark."""
    paper, ink = rng.integers(190, 256, 3), rng.integers(0, 80, 3)
    if rng.random() < 0.125:
        paper, ink = ink, paper
    return tuple(int(v) for v in paper), tuple(int(v) for v in ink)


def _soil(image: Image.Image, rng: np.random.Generator, amount: float) -> np.ndarray:
    """Add light blur and noise."""
    if rng.random() < 0.4 * amount:
        image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.2, 0.8))))
    pixels = np.asarray(image).astype(np.float32)
    if rng.random() < 0.6 * amount:
        pixels = pixels + rng.normal(0, rng.uniform(1, 9), pixels.shape[:2]).astype(np.float32)[..., None]
    return np.clip(pixels, 0, 255).astype(np.uint8)


def text_size(lines: list[str], face: str, size: int) -> tuple[int, int]:
    """Return `(width, height)` in pixels of the printed lines, without margins."""
    f = font(face, size)
    return int(max(f.getlength(line) for line in lines)) + 1, round(size * 1.3) * (len(lines) - 1) + size


def draw_lines(
    lines: list[str], face: str, size: int, canvas: tuple[int, int], rng: np.random.Generator, kind: str, soil: float = 1.0
) -> Sample:
    """Print `lines` at a random position of a `canvas` of `(width, height)` pixels."""
    f, (width, height) = font(face, size), text_size(lines, face, size)
    paper, ink = _colours(rng)
    image = Image.new("RGB", canvas, paper)
    left = 2 + int(rng.integers(0, max(1, canvas[0] - width - 3)))
    top = 2 + int(rng.integers(0, max(1, canvas[1] - height - 3)))
    draw, boxes = ImageDraw.Draw(image), []
    for row, line in enumerate(lines):
        base = top + round(size * 1.3) * row + round(size * 0.82)
        draw.text((left, base), line, font=f, fill=ink, anchor="ls")
        edges = [left + f.getlength(line[:i]) for i in range(len(line) + 1)]
        boxes += [(edges[i], edges[i + 1], base - 0.72 * size, float(base), c, i, row) for i, c in enumerate(line)]
    return Sample(kind, _soil(image, rng, soil), "\n".join(lines), boxes)


def random_string(rng: np.random.Generator, length: int) -> str:
    return "".join(CHARS[i] for i in rng.integers(0, len(CHARS), length))


def receipt_lines(rng: np.random.Generator, count: int) -> list[str]:
    """Return the lines of a receipt: shop, items with prices, total; `count` lines of at most 12 characters."""

    def price() -> str:
        return f"{rng.integers(0, 30)}.{rng.integers(0, 100):02d}"

    def name() -> str:
        return str(rng.choice(ITEMS)) if rng.random() < 0.5 else random_string(rng, int(rng.integers(2, 7)))

    lines = [f"{name()} {rng.integers(1, 1000)}"] + [f"{name()} {price()}" for _ in range(count - 2)]
    return lines + [f"TOTAL {price()}"]


def clip(rng: np.random.Generator, frames: int = CLIP_FRAMES, size: int = CLIP_SIZE) -> Sample:
    """Draw a coloured shape that crosses a plain background in one of four directions."""
    colour, shape, direction = str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)), str(rng.choice(list(DIRECTIONS)))
    radius = int(rng.integers(6, 11))
    ground = tuple(int(v) for v in (rng.integers(200, 256, 3) if rng.random() < 0.7 else rng.integers(0, 50, 3)))
    travel = float(rng.uniform(0.45, 0.9)) * (size - 2 * radius)
    start, across = rng.uniform(radius, size - radius - travel), rng.uniform(radius, size - radius)
    dx, dy = DIRECTIONS[direction]
    out = np.empty((frames, size, size, 3), np.uint8)
    for i in range(frames):
        along = start + travel * i / (frames - 1)
        along = size - along if dx + dy < 0 else along
        x, y = (along, across) if dx else (across, along)
        image = Image.new("RGB", (size, size), ground)
        draw, fill = ImageDraw.Draw(image), COLOURS[colour]
        if shape == "circle":
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        elif shape == "square":
            draw.rectangle((x - radius, y - radius, x + radius, y + radius), fill=fill)
        else:
            draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
        out[i] = _soil(image, rng, 0.5)
    return Sample("clip", out, f"A {colour} {shape} moves {direction}.")


def held_out(kind: str, count: int, seed: int = 10_000_019) -> list[Sample]:
    """Return the fixed evaluation sets. `text`: 4-12 characters at 18-40 px, the last fifth in the unseen font."""
    rng, out = np.random.default_rng([seed, ("text", "receipt", "clip").index(kind)]), []
    for i in range(count):
        if kind == "clip":
            out.append(clip(rng))
            continue
        if kind == "text":
            lines, size = [random_string(rng, int(rng.integers(4, 13)))], int(rng.integers(18, 41))
            face = UNSEEN_FACE if i >= count - count // 5 else FACES[int(rng.integers(len(FACES)))]
        else:
            lines, size = receipt_lines(rng, int(rng.integers(2, 7))), int(rng.integers(16, 25))
            face = FACES[int(rng.integers(len(FACES)))]
        width, height = text_size(lines, face, size)
        canvas = (width + int(rng.integers(6, 24)), height + int(rng.integers(6, 20)))
        out.append(draw_lines(lines, face, size, canvas, rng, kind))
    return out
