"""Read the text in images and the pages of PDFs, in one batch: `python examples/ocr.py [--model DIR] [FILE ...]`.

The shipped model reads short printed lines. Models for documents, and the prompt of their model cards:

| model | question |
|---|---|
| Qwen/Qwen2.5-VL-3B-Instruct, Qwen/Qwen3-VL-2B-Instruct | `Read the text.` |
| PaddlePaddle/PaddleOCR-VL | `OCR:` |
| deepseek-ai/DeepSeek-OCR | `Free OCR. ` (with the space) |
| stepfun-ai/GOT-OCR-2.0-hf | `OCR: ` (with the space) |
| zai-org/GLM-OCR | `Text Recognition:` |
| allenai/olmOCR-2-7B-1025 | `olmocr`, the name of its prompt |
| ibm-granite/granite-docling-258M | `docling`, the name of its prompt |
| rednote-hilab/dots.ocr | `dots-layout`, the name of its prompt |
| opendatalab/MinerU2.5-2509-1.2B | `mineru-layout` and other names, for pages of 1036 x 1036 pixels |
| tencent/HunyuanOCR | `hunyuan-spotting`, the name of its prompt |
"""

import argparse
from pathlib import Path

from sensorium import LLM, pdf_pages
from shared import ASSETS, run


def main() -> list[str]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(ASSETS / "tiny-vl"))
    parser.add_argument("--question", default="Read the text.")
    parser.add_argument("images", nargs="*", type=Path, default=sorted((ASSETS / "media").glob("line*.png")))
    args = parser.parse_args()

    images = [(path.name, path) for path in args.images if path.suffix != ".pdf"]
    images += [
        (f"{path.name}, page {one.number}", one) for path in args.images if path.suffix == ".pdf" for one in pdf_pages(path)
    ]
    pages = LLM(args.model).ocr([image for _, image in images], question=args.question)
    found = [(name, page) for (name, _), page in zip(images, pages, strict=True)]
    for name, page in found:
        if not page.error:
            print(f"{name}: {page.text}")
    return [f"{name}: {page.error}" for name, page in found if page.error]


if __name__ == "__main__":
    run(main)
