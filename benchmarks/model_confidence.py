"""Fits and checks a calibration of a model's confidences: `python -m benchmarks.model_confidence --write`.

The model is the shipped tiny-vl, which reads printed capitals. Any other model is calibrated in the same way, with
`sensorium read PAGES --model MODEL --fit-calibration FILE`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

from training.data import FACES, UNIT, draw_lines, receipt_lines, text_size

from .confidence import ReadPicture, tables
from .throughput import machine, put

SECTION = "Confidences of a model"
NOTE = (
    "tiny-vl reads receipts of two to six lines of capitals and digits, which are clean, or blurred and noisy. Its "
    "calibration was fitted to {fit} pages of both kinds, as `sensorium read --fit-calibration` does, and checked on {check} "
    "other pages. A word is right if the alignment of the answer with the page's text (difflib) has an equal word there. "
    "The score of a word is the product of the probabilities of its tokens, and its confidence is the calibrated score. The "
    "columns are those of the section above. A calibration holds for its model, prompt and kind of pages."
)
CONDITIONS = ("clean", "noisy")
QUESTION = "Read the receipt."
MODEL = Path(__file__).parents[1] / "assets" / "tiny-vl"


def draw_page(rng: np.random.Generator, condition: str) -> tuple[Image.Image, str]:
    """Return a receipt and its text."""
    lines, size = receipt_lines(rng, int(rng.integers(2, 7))), int(rng.integers(16, 25))
    face = FACES[int(rng.integers(len(FACES)))]
    width, height = text_size(lines, face, size)
    canvas = tuple(-(-(side + int(rng.integers(6, 20))) // UNIT) * UNIT for side in (width, height))
    pixels = draw_lines(lines, face, size, (canvas[0], canvas[1]), rng, "receipt").pixels
    if condition == "noisy":
        blurred = Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(float(rng.uniform(0.6, 1.6))))
        noise = rng.normal(0, rng.uniform(5, 40), pixels.shape)
        pixels = (np.asarray(blurred) + noise).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels), "\n".join(lines)


def write_pages(folder: Path, condition: str, count: int, seed: int) -> None:
    """Write pages and their texts as `fit_calibration` reads them."""
    for number in range(count):
        picture, text = draw_page(np.random.default_rng([seed, CONDITIONS.index(condition), number]), condition)
        picture.save(folder / f"{condition}-{number:04}.png")
        (folder / f"{condition}-{number:04}.txt").write_text(text, "utf-8")


def measure(num_fit: int, num_check: int, seed: int) -> list[str]:
    """Return the tables."""
    from sensorium import LLM
    from sensorium.pipelines.documents.fit_calibration import fit_calibration, scored_pages
    from sensorium.pipelines.documents.inputs import documents_of
    from sensorium.pipelines.documents.options import ReadOptions
    from sensorium.pipelines.documents.readers import ModelReader

    options = ReadOptions(question=QUESTION, max_tokens=96, text_layer="never")
    with LLM(str(MODEL)) as llm, tempfile.TemporaryDirectory() as name:
        reader = ModelReader(llm.engine, options)
        for condition in CONDITIONS:
            write_pages(folder_of(name, "fit"), condition, num_fit // 2, seed)
            write_pages(folder_of(name, condition), condition, num_check // 2, seed + 1)
        fitted = fit_calibration(documents_of([folder_of(name, "fit")]), reader, options)

        def checked() -> Iterator[ReadPicture]:
            for condition in CONDITIONS:
                for page in scored_pages(documents_of([folder_of(name, condition)]), reader, options):
                    yield ReadPicture(condition, (tuple((score, bool(right)) for score, right in page.tolist()),))

        return tables(list(checked()), fitted.calibration, CONDITIONS, kinds=("page",))


def folder_of(root: str, name: str) -> Path:
    """Return a folder, which is made if it is not there."""
    (folder := Path(root, name)).mkdir(exist_ok=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=240, help="pages of the fit")
    parser.add_argument("--check", type=int, default=240, help="pages of the table")
    parser.add_argument("--seed", type=int, default=36)
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    args = parser.parse_args()
    lines = measure(args.pages, args.check, args.seed)
    print("\n".join(lines))
    if args.write:
        put(SECTION, "\n".join([machine(), "", NOTE.format(fit=args.pages, check=args.check), "", *lines]))


if __name__ == "__main__":
    main()
