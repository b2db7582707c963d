"""The text in pictures, all in one batch: `python examples/ocr.py [--model DIR] [PICTURE ...]`."""

import argparse
from pathlib import Path

from sensorium import LLM
from shared import ASSETS, run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--question", default="Read the text.")
    parser.add_argument("pictures", nargs="*", type=Path, default=sorted((ASSETS / "media").glob("line*.png")))
    args = parser.parse_args()

    pages = LLM(args.model).ocr(args.pictures, question=args.question)
    found = list(zip(args.pictures, pages, strict=True))
    for path, page in found:
        if not page.error:
            print(f"{path.name}: {page.text}")
    return [f"{path.name}: {page.error}" for path, page in found if page.error]  # a broken picture fails alone


if __name__ == "__main__":
    run(main)
