"""`sensorium ocr`: the text that is written in pictures, as text or JSON. Knows no model."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .files import add_files, add_model, count, print_finished

if TYPE_CHECKING:
    from ..pipelines.ocr import Page

EXAMPLE = "sensorium ocr receipt.png invoice.jpg --model Qwen2.5-VL-3B-Instruct --json"
SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "tiny-vl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_files(parser, "a picture")
    add_model(parser, str(SHIPPED))
    parser.add_argument("--question", metavar="TEXT", help="what the model is asked of each (default: to read the text)")
    parser.add_argument("--max-tokens", metavar="N", type=count, default=1024, help="longest answer (default: 1024)")


def run(args: argparse.Namespace) -> int:
    """2 if a picture could not be read; the others are all the same."""
    from ..engine.llm import LLM
    from ..pipelines.asking import finished
    from ..pipelines.ocr import QUESTION, pages

    llm = LLM(args.model, dtype=args.dtype, device=args.device)
    asked = pages(llm, args.files, question=args.question or QUESTION, max_tokens=args.max_tokens)
    return print_finished(args, finished(llm, asked), lambda page: (known(page), page.text))


def known(page: Page) -> dict[str, object]:
    return {"text": page.text, "finish_reason": page.finish_reason, "error": page.error}
