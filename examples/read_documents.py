"""Read documents page by page, with and without a text layer: `python examples/read_documents.py [--model DIR] [FILE ...]`.

The shipped model reads short printed lines; pages with a text layer that can be trusted need no model at all.
"""

import argparse
from pathlib import Path

from pdf_text_layer import small_pdf
from sensorium import LLM
from shared import ASSETS, run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    args = parser.parse_args()

    files = args.files or [small_pdf(), ASSETS / "media" / "line1.png"]
    errors = []
    for document in LLM(args.model).read(files):
        if document.error:
            errors.append(f"{document.source}: {document.error}")
        for page in document.pages:
            print(f"page {page.number}, {page.way} ({page.reason}): {page.error or page.text}")
            errors += [f"{document.source}, page {page.number}: {page.error}"] if page.error else []
    return errors


if __name__ == "__main__":
    run(main)
