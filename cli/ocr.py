"""`sensorium ocr`: read the text in images and print it as text or JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .common import add_file_arguments, add_model_arguments, engine_options, positive_int, print_when_done

if TYPE_CHECKING:
    from ..pipelines.ocr import Page

EXAMPLE = "sensorium ocr receipt.png invoice.jpg --model Qwen/Qwen2.5-VL-3B-Instruct --json"
SHIPPED_MODEL = Path(__file__).resolve().parents[1] / "assets" / "tiny-vl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser, "an image")
    add_model_arguments(parser, str(SHIPPED_MODEL))
    parser.add_argument("--question", metavar="TEXT", help='the prompt beside each image (default: "Read the text.")')
    help_text = "maximum number of tokens per image (default: 1024)"
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, default=1024, help=help_text)


def run(args: argparse.Namespace) -> int:
    """Return 2 if an image could not be read; the other images are still read."""
    from ..engine.llm import LLM
    from ..pipelines.ocr import QUESTION, ocr_tasks
    from ..pipelines.tasks import as_completed

    llm = LLM(**engine_options(args))
    tasks = ocr_tasks(llm, args.files, question=args.question or QUESTION, max_tokens=args.max_tokens)
    return print_when_done(args, as_completed(llm, tasks), lambda page: (json_fields(page), page.text))


def json_fields(page: Page) -> dict[str, object]:
    return {"text": page.text, "finish_reason": page.finish_reason, "error": page.error}
