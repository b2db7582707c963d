"""Read PDF pages with their text layers as drafts: same text, fewer steps: `python examples/pdf_text_layer.py [PDF ...]`.

Scanned pages have no text layer, so that nothing is drafted, or a bad one, of which little is accepted. The shipped model
reads short printed lines; see `ocr.py` for models that read documents.
"""

import argparse
from pathlib import Path

from sensorium import LLM, pdf_pages
from shared import ASSETS, run

LINES = ("TOTAL 12.50", "COFFEE 3.20")


def small_pdf() -> bytes:
    """Return a PDF with a page for each of LINES."""
    kids = " ".join(f"{3 + 2 * i} 0 R" for i in range(len(LINES)))
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(LINES)} >>"]
    font = "<< /Font << /F << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    for i, line in enumerate(LINES):
        shown = f"BT /F 20 Tf 12 14 Td ({line}) Tj ET"
        page = f"/MediaBox [0 0 180 42] /Contents {4 + 2 * i} 0 R /Resources {font}"
        objects.append(f"<< /Type /Page /Parent 2 0 R {page} >>")
        objects.append(f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream")
    body, places = "%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(body))
        body += f"{number} 0 obj\n{content}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    size = len(objects) + 1
    body += f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R >>\n"
    return f"{body}startxref\n{body.index('xref')}\n%%EOF\n".encode("ascii")


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--question", default="Read the text.")
    parser.add_argument("files", nargs="*", type=Path, metavar="PDF")
    args = parser.parse_args()

    pages = [page for file in args.files or [small_pdf()] for page in pdf_pages(file)]
    texts = []
    for config in ({"num_speculative_tokens": 0}, None):  # without drafts, and with the text layer, the default
        with LLM(args.model, speculative_config=config) as llm:
            texts.append(llm.ocr(pages, question=args.question))
            steps, drafts = llm.stats.steps, llm.stats.drafts
        drafted, accepted = sum(one.num_drafted for one in drafts), sum(one.num_accepted for one in drafts)
        print(f"{steps} steps, {accepted} of {drafted} drafted tokens accepted")
    errors = []
    for number, (plain, page) in enumerate(zip(*texts, strict=True), start=1):
        if page.error or page.text != plain.text:
            errors.append(f"page {number}: {page.error or 'the texts differ'}")
        else:
            print(page.text)
    return errors


if __name__ == "__main__":
    run(main)
