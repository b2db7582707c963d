"""`sensorium ocr`: read the text in images and PDFs and print it as text or JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .common import (
    add_chat_template,
    add_file_arguments,
    add_model_arguments,
    check_chat_template,
    engine_options,
    positive_int,
)
from .output import print_results
from .sources import check_files, read_sources

if TYPE_CHECKING:
    from ..pipelines.ocr import Page

T = TypeVar("T")
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
    from ..pipelines.files import NamedItem, images_and_pages
    from ..pipelines.ocr import QUESTION, OcrOptions, ocr_tasks
    from ..pipelines.run import as_completed

    sources = read_sources(args.files, "image", ("pdf",))
    if not args.json:  # prints an object for each file
        check_files(sources, every=False)
    check_chat_template(args)
    items = list(images_and_pages(NamedItem(source.name, source.item) for source in sources))
    llm = LLM(**engine_options(args))
    if args.model == str(SHIPPED_MODEL):
        print(f"sensorium: note: {SHIPPED_READS}", file=sys.stderr)
    options = OcrOptions(args.question or QUESTION, args.max_tokens, chat_template=args.chat_template)
    names = [item.source for item in items]
    pages = in_page_order(names, as_completed(llm.engine, ocr_tasks(llm.engine, items, options)))
    return print_results(args, names, pages, lambda page: (json_fields(page), page.text))


def in_page_order(names: Sequence[str], results: Iterable[tuple[int, T]]) -> Iterator[tuple[int, T]]:
    """Yield results of pages in the order of the pages of their document; documents and images when they are done.

    Args:
        names: of all results; those of a document's pages follow each other and end with "#page=N".
        results: (index of the name, result), in any order.
    """
    waiting, yielded = dict[int, T](), set[int]()
    for index, result in results:
        waiting[index] = result
        while index in waiting and (_starts(names, index) or index - 1 in yielded):
            yield index, waiting.pop(index)
            yielded.add(index)
            index += 1


def _starts(names: Sequence[str], index: int) -> bool:
    """Return whether a name is that of an image or of the first page of a document."""
    document, page, _ = names[index].rpartition("#page=")
    return not (page and index and names[index - 1].rpartition("#page=")[:2] == (document, page))


def json_fields(page: Page) -> dict[str, object]:
    fields = {"text": page.text, "finish_reason": page.finish_reason, "avg_logprob": page.avg_logprob, "doubt": page.doubt}
    return {**fields, "error": page.error}
