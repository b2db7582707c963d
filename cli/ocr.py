"""`sensorium ocr`: read the text in images and PDFs and print it as text or JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ..mm.errors import InputError
from .common import (
    add_chat_template,
    add_file_arguments,
    add_model_arguments,
    check_chat_template,
    engine_options,
    positive_int,
)
from .output import Report, print_results
from .sources import check_files, read_sources, split_pdfs

if TYPE_CHECKING:
    from ..pipelines.ocr import Page

EXAMPLE = "sensorium ocr receipt.png invoice.jpg --model Qwen/Qwen2.5-VL-3B-Instruct --json"
SHIPPED_READS = "the shipped model reads only printed capitals and digits in a few short lines; pass --model for other images"
SHIPPED_MODEL = Path(__file__).resolve().parents[1] / "assets" / "tiny-vl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_file_arguments(parser, "an image or a PDF")
    add_model_arguments(parser, str(SHIPPED_MODEL))
    parser.add_argument("--question", metavar="TEXT", help='the prompt beside each image (default: "Read the text.")')
    add_chat_template(parser)
    help_text = "maximum number of tokens per image (default: 1024)"
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, default=1024, help=help_text)


def run(args: argparse.Namespace) -> int:
    """Return 2 if an image or PDF could not be read; the others are still read."""
    from ..engine.llm import LLM
    from ..pipelines.ocr import QUESTION, ocr_tasks
    from ..pipelines.tasks import as_completed

    sources = read_sources(args.files, "image", ("pdf",))
    if not args.json:  # prints an object for each file
        check_files(sources, every=False)
    check_chat_template(args)
    names, items = zip(*split_pdfs(sources), strict=True)
    llm = LLM(**engine_options(args))
    if args.model == str(SHIPPED_MODEL):
        print(f"sensorium: note: {SHIPPED_READS}", file=sys.stderr)
    options = {"question": args.question or QUESTION, "max_tokens": args.max_tokens, "chat_template": args.chat_template}
    failed = [(i, item) for i, item in enumerate(items) if isinstance(item, InputError)]
    read = [i for i, item in enumerate(items) if not isinstance(item, InputError)]
    tasks = ocr_tasks(llm, [items[i] for i in read], **options)
    done = ((read[i], page) for i, page in as_completed(llm, tasks))
    results: Iterable[tuple[int, Page | InputError]] = chain(failed, done)
    return print_results(args, names, results, _report)


def _report(result: Page | InputError) -> Report:
    if isinstance(result, InputError):
        none = {"text": "", "finish_reason": "error", "avg_logprob": None, "doubt": None}
        return {**none, "error": result.info}, ""
    return json_fields(result), result.text


def json_fields(page: Page) -> dict[str, object]:
    fields = {"text": page.text, "finish_reason": page.finish_reason, "avg_logprob": page.avg_logprob, "doubt": page.doubt}
    return {**fields, "error": page.error}
