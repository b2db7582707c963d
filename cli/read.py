"""`sensorium read`: read PDFs and pictures, each page in the cheapest way that is enough."""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..callers.errors import ConfigError, ErrorInfo, InputError
from .common import add_model_arguments, engine_options, positive_int
from .output import exit_code, exit_on_signals, print_error, print_line, printable
from .sources import check_stdin_once, path_or_url, read_stdin
from .wording import message_of

if TYPE_CHECKING:
    from ..mm.media.policy import MediaPolicy
    from ..pipelines.documents.blocks import PageRecord, Way
    from ..pipelines.documents.inputs import OpenedDocument
    from ..pipelines.documents.manifest import Manifest
    from ..pipelines.documents.options import ReadOptions
    from ..pipelines.documents.output import DocumentFolder
    from ..pipelines.documents.page_task import PageReader
    from ..pipelines.documents.ways import ReaderKind
    from ..pipelines.files import NamedItem

EXAMPLE = "sensorium read scans/ report.pdf --output-dir out --format md --resume"
FORMATS = ("md", "json", "txt", "html", "hocr", "alto", "docling", "csv", "pdf")
_MODEL_USE = "the model that reads pages without a good text layer (default: the reader of the extra `documents`): "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "a PDF, picture, e-book, HTML, text or office file: a path, a folder, a pattern, a URL, or - for stdin"
    parser.add_argument("files", metavar="FILE", type=path_or_url, nargs="+", help=help_text)
    add_model_arguments(parser, default="", use=_MODEL_USE)
    parser.add_argument("--format", choices=FORMATS, default="md", help="format of the outputs (default: md)")
    parser.add_argument("--output-dir", metavar="DIR", type=Path, help="write one file per document into this folder")
    help_text = "with --output-dir: go on where an earlier run ended, beside other processes that read into the same folder"
    parser.add_argument("--resume", action="store_true", help=help_text)
    help_text = 'pages of each document, such as "3-7,12" or "10-" (default: all)'
    parser.add_argument("--pages", metavar="RANGES", help=help_text)
    help_text = "codec workers that inspect pages at a time (default: one for each processor, at most 8)"
    parser.add_argument("--jobs", metavar="N", type=positive_int, help=help_text)
    help_text = "auto uses the text layers that can be trusted, always every one, never none (default: auto)"
    help_text = "reader of printed lines: rapidocr, tesseract, or tesseract:deu+eng (default: auto, the one that is installed)"
    parser.add_argument("--reader", metavar="NAME", default="auto", help=help_text)
    help_text = "file with the calibration of confidences that --fit-calibration has written for the model or reader"
    parser.add_argument("--calibration", metavar="FILE", help=help_text)
    help_text = "measure the calibration on pages whose right text lies beside them (a.png, a.txt), and write it into this file"
    parser.add_argument("--fit-calibration", metavar="FILE", type=Path, help=help_text)
    parser.add_argument("--text-layer", choices=("auto", "always", "never"), default="auto", help=help_text)
    help_text = "write each page, with the boxes of its blocks over it, as a PNG into this folder"
    parser.add_argument("--draw", metavar="DIR", type=Path, help=help_text)
    parser.add_argument("--plan", action="store_true", help="print how each page would be read, and read nothing")
    help_text = "largest number of pages of a document (default: 5000)"
    parser.add_argument("--max-pages", metavar="N", type=positive_int, default=5000, help=help_text)
    parser.add_argument(
        "--question", metavar="TEXT", help='with --model: the prompt beside each page (default: "Read the text.")'
    )
    help_text = "with --model: maximum number of tokens per page (default: 4096)"
    parser.add_argument("--max-tokens", metavar="N", type=positive_int, help=help_text)


def run(args: argparse.Namespace) -> int:
    """Return 2 if a document or page could not be read; the others are still read."""
    if args.resume and args.output_dir is None:
        raise ConfigError("--resume needs --output-dir, where an earlier run wrote its records; give it")
    if args.format == "pdf" and args.output_dir is None and not args.plan:
        raise ConfigError("--format pdf needs --output-dir, as PDFs are not printed; give it")
    _check_model_options(args)
    options, items = _options(args), _items(args.files)
    if args.plan:
        return _print_plan(args, items, options)
    if args.fit_calibration is not None:
        return _fit_calibration(args, items, options)
    return _read(args, items, options)


def _items(words: Sequence[str]) -> list[NamedItem]:
    """Return the files that the words of the command line name.

    Raises:
        InputError: a folder or pattern has no file, or cannot be listed. ConfigError: stdin is a terminal or is named twice.
    """
    from ..pipelines.documents.inputs import documents_of
    from ..pipelines.files import NamedItem

    check_stdin_once(words)
    items = documents_of(NamedItem("-", read_stdin("image file")) if word == "-" else word for word in words)
    for item in items:
        if isinstance(item.item, InputError) and item.source in words:  # the error of a subfolder is one among its documents
            raise item.item
    return items


def _check_model_options(args: argparse.Namespace) -> None:
    """Raise ConfigError for an option of a model without a model."""
    for name in ("question", "max_tokens", "dtype", "device", "quantization", "revision", "offline"):
        if not args.model and getattr(args, name) not in (None, False, "auto"):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is for the model that reads pages; give --model, or leave {flag} out")


def _options(args: argparse.Namespace) -> ReadOptions:
    from ..pipelines.documents.options import ReadOptions
    from ..pipelines.ocr import QUESTION

    return ReadOptions(
        pages=args.pages,
        text_layer=args.text_layer,
        jobs=args.jobs,
        max_pages=args.max_pages,
        question=args.question or QUESTION,
        max_tokens=args.max_tokens or ReadOptions.max_tokens,
        reader=args.reader,
        calibration=args.calibration,
    )


def _read(args: argparse.Namespace, items: Sequence[NamedItem], options: ReadOptions) -> int:
    from ..mm.media.policy import DEFAULT_POLICY
    from ..pipelines.documents.inputs import read_policy
    from ..pipelines.documents.manifest import Manifest
    from ..pipelines.documents.output import DocumentFolder, output_names
    from ..pipelines.documents.read import DocumentReader

    policy, folder = read_policy(DEFAULT_POLICY, options), None
    if args.output_dir is not None:
        folder = DocumentFolder(args.output_dir, items, args.format, args.resume, policy)
    reader = _reader(args, options)
    errors, names = list[ErrorInfo](), [] if args.draw is None else output_names(items, "")
    path = None if folder is None else folder.manifest
    with Manifest(path) as manifest, exit_on_signals(manifest.give_back), _progress(manifest) as on_records:
        documents = DocumentReader(items, reader, options, policy, manifest, on_records)
        for index, document in _in_order(documents.documents(), in_order=folder is None):
            errors += _write(args, index, document, manifest, folder, len(items) > 1)
            if args.draw is not None:
                errors += _draw(args, document, manifest, policy, names[index])
        if folder is not None:
            folder.clean(manifest.owner)
    return exit_code(errors)


def _reader(args: argparse.Namespace, options: ReadOptions) -> PageReader:
    from ..pipelines.documents.readers import ModelReader, find_reader

    if not args.model:
        return find_reader(options)
    from ..engine.llm import LLM

    return ModelReader(LLM(**engine_options(args)).engine, options)


def _write(
    args: argparse.Namespace,
    index: int,
    document: OpenedDocument,
    manifest: Manifest,
    folder: DocumentFolder | None,
    is_one_of_several: bool,
) -> list[ErrorInfo]:
    """Write or print a document, and print the errors of its pages. Return them."""
    from ..pipelines.documents.projections import Projected, project
    from ..pipelines.documents.read import pages_of

    name, errors, doubts = printable(document.source), list[tuple[str, ErrorInfo]](), list[str]()
    if document.error is not None:
        errors.append((name, document.error))

    def pages() -> Iterator[PageRecord]:
        for page in pages_of(document, manifest):
            if page.error is not None:
                errors.append((f"{name}#page={page.number}", page.error))
            if page.doubt is not None:
                doubts.append(f"the text of {name}#page={page.number} is probably wrong: {page.doubt}")
            yield page

    projected = Projected(document.source, document.error, pages())
    if folder is None:
        if is_one_of_several and args.format != "json":
            print_line(f"{name}:")
        print_line("".join(project(projected, args.format)).rstrip("\n"))
    else:
        try:
            print_line(f"{name}: {printable(str(folder.write(index, projected, manifest.owner)))}")
        except InputError as failure:  # no searchable PDF can be made of it
            errors += [(name, failure.info)] if document.error is None else []
    for where, error in errors:
        print_error(f"{where}: {message_of(error, args)}")
    for doubt in doubts:
        print(f"sensorium: warning: {doubt}", file=sys.stderr)
    return [error for _, error in errors]


def _draw(
    args: argparse.Namespace, document: OpenedDocument, manifest: Manifest, policy: MediaPolicy, name: str
) -> list[ErrorInfo]:
    """Write the pages of a document with their boxes, and print the error if they cannot be opened. Return it."""
    from ..pipelines.documents.drawing import draw_pages
    from ..pipelines.documents.read import pages_of

    try:
        for path in draw_pages(document.item, pages_of(document, manifest), policy, args.draw, name):
            print(f"sensorium: {printable(str(path))}", file=sys.stderr)
    except InputError as error:
        print_error(f"{printable(document.source)}: {message_of(error.info, args)}")
        return [error.info]
    return []


def _in_order(documents: Iterator[tuple[int, OpenedDocument]], in_order: bool) -> Iterator[tuple[int, OpenedDocument]]:
    """Yield documents when they are done, or in their order."""
    if not in_order:
        yield from documents
        return
    waiting: dict[int, OpenedDocument] = {}
    index = 0
    for done, document in documents:
        waiting[done] = document
        while index in waiting:
            yield index, waiting.pop(index)
            index += 1


@contextmanager
def _progress(manifest: Manifest) -> Iterator[Callable[[OpenedDocument, Sequence[PageRecord]], object]]:
    """Show on stderr, if it is a terminal, a progress bar with pages, pages per second and the time left.

    The total is that of the documents that have been opened, without pages that earlier runs have read.
    """
    from tqdm import tqdm

    seen, lock = set[str](), threading.Lock()
    with tqdm(desc="Read", unit=" pages", total=0, disable=not sys.stderr.isatty()) as bar:

        def count(document: OpenedDocument, records: Sequence[PageRecord]) -> None:
            with lock:  # pages are finished in several threads
                if document.key not in seen:
                    seen.add(document.key)
                    bar.total += manifest.missing(document.key, document.ranges) + len(records)
                bar.update(len(records))

        yield count


def _fit_calibration(args: argparse.Namespace, items: Sequence[NamedItem], options: ReadOptions) -> int:
    from ..pipelines.documents.fit_calibration import fit_calibration

    raw = replace(options, calibration=None, text_layer="never")
    fitted = fit_calibration(items, _reader(args, raw), raw)
    fitted.write(args.fit_calibration)
    num_right, (before, after) = int(fitted.words[:, 1].sum()), fitted.errors
    print_line(f"{printable(str(args.fit_calibration))}: {num_right:,} of {len(fitted.words):,} words are right")
    print_line(f"expected calibration error: {before:.3f} before, {after:.3f} after, of pages that the fit has not seen")
    return 0


def _print_plan(args: argparse.Namespace, items: Sequence[NamedItem], options: ReadOptions) -> int:
    from ..pipelines.documents.model_answers import model_name
    from ..pipelines.documents.plan import plan_pages
    from ..pipelines.documents.readers import find_reader

    reader = find_reader(replace(options, calibration=None))
    kind: ReaderKind = "model" if args.model else reader.kind
    name = model_name(str(args.model)) if args.model else reader.name
    errors, ways = list[ErrorInfo](), Counter["Way"]()
    for page in plan_pages(items, options, kind):
        if page.error is not None:
            errors.append(page.error)
            print_error(f"{printable(page.source)}: {message_of(page.error, args)}")
            continue
        ways[page.way] += 1
        print_line(f"{printable(page.source)}: {page.way}: {page.reason}")
    print_line(", ".join(f"{number:,} {way}" for way, number in ways.most_common()) or "no pages")
    _print_seconds(ways, name, reader.recognizer is not None and options.text_layer == "auto")
    return exit_code(errors)


def _print_seconds(ways: Counter[Way], reader: str, are_layers_checked: bool) -> None:
    """Print how long reading will take, from the costs of earlier runs."""
    from ..pipelines.documents.costs import INSPECTED, kept_costs, seconds_of

    costs = kept_costs()
    seconds, unknown = seconds_of(ways, reader, costs, are_layers_checked)
    if are_layers_checked and ways["text_layer"]:
        print_line("text_layer: some lines are read as well; a page where most of them differ is read in full")
    if INSPECTED in costs and ways:
        left_out = f" without {' and '.join(unknown)}" if unknown else ""
        print_line(f"about {duration(seconds)}{left_out}, by earlier runs on this machine")
    for way in unknown:
        print_line(f"{way} by {reader} was not measured on this machine yet")


def duration(seconds: float) -> str:
    """Return seconds as a person says them: "0.4 s", "12 s", "3 min" or "2 h 5 min"."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
