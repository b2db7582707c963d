"""Read the text in images, in one batch: `python examples/ocr.py [--model DIR] [IMAGE ...]`."""

import argparse
from pathlib import Path

from sensorium import LLM
from shared import ASSETS, run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--question", default="Read the text.")
    parser.add_argument("images", nargs="*", type=Path, default=sorted((ASSETS / "media").glob("line*.png")))
    args = parser.parse_args()

    pages = LLM(args.model).ocr(args.images, question=args.question)
    found = list(zip(args.images, pages, strict=True))
    for path, page in found:
        if not page.error:
            print(f"{path.name}: {page.text}")
    return [f"{path.name}: {page.error}" for path, page in found if page.error]


if __name__ == "__main__":
    run(main)
