"""Measure character error rates of reading without a downloaded model: `python -m benchmarks.reading_tiers --write`.

Needs the extra `documents` and the fonts DejaVu and Liberation (Debian: fonts-dejavu, fonts-liberation). tesseract runs beside
them if it is in PATH, or else if the package tesserocr is installed (TESSDATA_PREFIX names the folder of its data), with the
languages eng, deu and fra that it has.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .confidence import CONDITIONS, FONTS, HEIGHT, OVERSAMPLING, WIDTH, WORDS, in_condition
from .documents import distance
from .throughput import machine, put

SECTION = "What reads documents without a model"
NOTE = (
    "Character error rate in percent, without spaces: the edit distance between what a page says and what was read, in reading "
    "order, over the number of characters. Every cell has {count} pages of half an A4 sheet at 150 dpi, rendered from seeded "
    "words in five fonts that the calibration of confidences does not use, 15 to 24 pixels high. Clean, scanned and "
    "photographed pages are made as for the confidences above, from other seeds. sensorium reads with RapidOCR, straightens "
    "pages, and puts lines, columns and tables in order; the row RapidOCR has its lines in its own order. The text layer is "
    "that of PDFs with the same texts, which scans and photographs do not have."
)
PAGE_FONTS = (
    *("liberation/LiberationSerif-Regular.ttf", "liberation/LiberationSansNarrow-Regular.ttf"),
    *("dejavu/DejaVuSansMono.ttf", "dejavu/DejaVuSerifCondensed.ttf", "liberation/LiberationSerif-Bold.ttf"),
)
LAYOUTS = ("English", "German", "French", "two columns", "table")
_LANGUAGES = {"English": "en", "German": "de", "French": "fr", "two columns": "en", "table": "en"}
_MARGIN, _GAP = 50, 60  # pixels around the page and between columns


@dataclass(frozen=True)
class TruePage:
    """A page: its lines with places in pixels, in reading order, and the font with its size in pixels."""

    lines: tuple[tuple[str, float, float], ...]
    font: str
    size: int

    @property
    def text(self) -> str:
        return "".join(text for text, _, _ in self.lines)


def page_of(layout: str, seed: str, font: str) -> TruePage:
    """Return a page with a layout of `LAYOUTS`."""
    from PIL import ImageFont

    rng = random.Random(seed)
    size, words = rng.randint(15, 24), WORDS[_LANGUAGES[layout]].split()
    face = ImageFont.truetype(str(FONTS / font), size)
    lines, top, step = list[tuple[str, float, float]](), 40.0, 1.45 * size
    if layout == "table":
        columns = [_MARGIN + column * (WIDTH - 2 * _MARGIN) / 4 for column in range(4)]
        rows = [[word.strip(";.,?").capitalize() for word in rng.sample(words, 4)]]
        rows += [
            [rng.choice(words).strip(";.,?"), *(f"{rng.randint(100, 99999) / 100:.2f}" for _ in range(3))] for _ in range(9)
        ]
        return TruePage(
            tuple(
                (text, x, top + row * step) for row, texts in enumerate(rows) for text, x in zip(texts, columns, strict=True)
            ),
            font,
            size,
        )
    count = 2 if layout == "two columns" else 1
    width = (WIDTH - 2 * _MARGIN - _GAP * (count - 1)) / count
    for column in range(count):
        for row in range(int((HEIGHT - 80) / step)):
            text = rng.choice(words)
            while face.getlength(longer := f"{text} {rng.choice(words)}") <= width:
                text = longer
            lines.append((text, _MARGIN + column * (width + _GAP), top + row * step))
    return TruePage(tuple(lines), font, size)


def drawn(page: TruePage) -> Any:
    """Return a page as a grey picture, `OVERSAMPLING` times as large as WIDTH x HEIGHT."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("L", (WIDTH * OVERSAMPLING, HEIGHT * OVERSAMPLING), 252)
    face = ImageFont.truetype(str(FONTS / page.font), page.size * OVERSAMPLING)
    for text, x, y in page.lines:
        ImageDraw.Draw(picture).text((x * OVERSAMPLING, y * OVERSAMPLING), text, font=face, fill=20)
    return picture


Reader = Callable[[NDArray[np.uint8]], str]
"""Returns the text of a picture, uint8 `[height, width, 3]`."""


def sensorium_reader() -> Reader:
    from io import BytesIO

    from PIL import Image
    from sensorium.mm.media.page_facts import page_facts
    from sensorium.mm.media.policy import MediaPolicy
    from sensorium.pipelines.documents.lines_reader import LinesReader
    from sensorium.pipelines.documents.page_task import PageTask
    from sensorium.pipelines.documents.stop import StopSignal

    reader, policy = LinesReader(), MediaPolicy()

    def read(pixels: NDArray[np.uint8]) -> str:
        file = BytesIO()
        Image.fromarray(pixels).save(file, "PNG")
        (facts,) = page_facts(file.getvalue(), [1], policy)
        (record,) = reader.read([PageTask(file.getvalue(), 1, facts, "reading", "", 1.0)], policy, StopSignal())
        return "\n".join(block.text for block in record.blocks)

    return read


def rapidocr_reader() -> Reader:
    from rapidocr import RapidOCR

    engine = RapidOCR(params={"Global.log_level": "error"})
    return lambda pixels: "\n".join(engine(pixels[..., ::-1]).txts or ())


def tesseract_reader() -> Reader | None:
    """Return tesseract as a reader, None if neither its program nor tesserocr is installed."""
    program = shutil.which("tesseract")
    if program is None:
        return tesserocr_reader()
    from PIL import Image

    installed = subprocess.run([program, "--list-langs"], capture_output=True, text=True, check=True).stdout.split()
    languages = joined_languages(installed)

    def read(pixels: NDArray[np.uint8]) -> str:
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            Image.fromarray(pixels).save(file.name)
            command = [program, file.name, "stdout", "-l", languages]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    return read


def tesserocr_reader() -> Reader | None:
    """Return the library of tesseract as a reader, None if tesserocr is not installed or has no data of a language."""
    try:
        import tesserocr
    except ImportError:
        return None
    from PIL import Image

    folder, installed = tesserocr.get_languages()
    languages = joined_languages(installed)
    if not languages:
        return None
    engine = tesserocr.PyTessBaseAPI(path=folder, lang=languages, psm=tesserocr.PSM.AUTO)  # as the program reads

    def read(pixels: NDArray[np.uint8]) -> str:
        engine.SetImage(Image.fromarray(pixels))
        return str(engine.GetUTF8Text())

    return read


def joined_languages(installed: Sequence[str]) -> str:
    """Return the languages of the pages that tesseract has data of, as it takes them."""
    return "+".join(name for name in ("eng", "deu", "fra") if name in installed)


def layer_text(page: TruePage) -> str:
    """Return what the text layer of a PDF with this page says."""
    from io import BytesIO

    from reportlab.pdfbase import pdfmetrics
    from reportlab.pdfbase.ttfonts import TTFont
    from reportlab.pdfgen.canvas import Canvas
    from sensorium.mm.media.page_facts import page_facts
    from sensorium.mm.media.policy import MediaPolicy
    from sensorium.pipelines.documents.page_blocks import page_blocks
    from sensorium.pipelines.documents.text_blocks import text_order

    name, file = Path(page.font).stem, BytesIO()
    pdfmetrics.registerFont(TTFont(name, str(FONTS / page.font)))
    canvas = Canvas(file, (WIDTH, HEIGHT), invariant=1)
    canvas.setFont(name, page.size)
    for text, x, y in page.lines:
        canvas.drawString(x, HEIGHT - y - page.size, text)
    canvas.save()
    (facts,) = page_facts(file.getvalue(), [1], MediaPolicy())
    blocks = page_blocks(facts.lines, [()] * len(facts.lines), text_order, facts.rules)
    return "\n".join(block.text for block in blocks)


def errors(page: TruePage, text: str) -> tuple[int, int]:
    """Return the edit distance between a page and what was read, and the number of the page's characters, without spaces.

    Hyphens that join a word over two lines do not occur in these pages.
    """
    truth = "".join(page.text.split())
    return distance(truth, "".join(text.split())), len(truth)


def rate(pairs: Sequence[tuple[int, int]]) -> str:
    return f"{100 * sum(count for count, _ in pairs) / sum(length for _, length in pairs):.1f}"


def pages(layout: str, count: int, seed: int) -> Iterator[TruePage]:
    for number in range(count):
        yield page_of(layout, f"{seed} {layout} {number}", PAGE_FONTS[number % len(PAGE_FONTS)])


def measure(count: int, seed: int) -> list[str]:
    """Return the rows of the table."""
    candidates = {"sensorium": sensorium_reader(), "RapidOCR": rapidocr_reader(), "tesseract": tesseract_reader()}
    readers = {name: reader for name, reader in candidates.items() if reader is not None}
    lines = [f"| reader | pages | {' | '.join(LAYOUTS)} | all |", "|---|---|" + "---|" * (len(LAYOUTS) + 1)]
    layers = [[errors(page, layer_text(page)) for page in pages(layout, count, seed)] for layout in LAYOUTS]
    lines.append(_row("text layer", "born digital", layers))
    for condition in CONDITIONS:
        found: dict[str, list[list[tuple[int, int]]]] = {name: [[] for _ in LAYOUTS] for name in readers}
        for index, layout in enumerate(LAYOUTS):
            for number, page in enumerate(pages(layout, count, seed)):
                pixels, _ = in_condition(random.Random(f"{seed} {condition} {layout} {number}"), condition, drawn(page))
                for name, reader in readers.items():
                    found[name][index].append(errors(page, reader(pixels)))
        lines += [_row(name, condition, rates) for name, rates in found.items()]
    if "tesseract" not in readers:
        lines += ["", "tesseract is not installed here."]
    return lines


def _row(name: str, condition: str, rates: Sequence[Sequence[tuple[int, int]]]) -> str:
    every = [pair for pairs in rates for pair in pairs]
    return f"| {name} | {condition} | {' | '.join(map(rate, rates))} | {rate(every)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=10, help="pages of each layout and condition")
    parser.add_argument("--seed", type=int, default=360)
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    args = parser.parse_args()
    lines = measure(args.pages, args.seed)
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE.format(count=args.pages), "", *lines]))


if __name__ == "__main__":
    main()
