"""Arguments, output and exit codes that commands share."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, TypeVar

from ..mm.errors import ErrorInfo

T = TypeVar("T")
Report = tuple[dict[str, Any], str]
"""A result's JSON fields, among them "finish_reason" and "error" (ErrorInfo or None), and its text."""
_MAX_DATA_URL = 40  # characters shown of a data: URL
_MAX_PATH = 4096  # characters shown of a path
_INTERNAL = {"internal", "engine_dead"}  # error codes that are sensorium's fault, not the caller's


def positive_int(text: str) -> int:
    """Parse an argument that is a number of tokens."""
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or above")


def path_or_url(text: str) -> str:
    """Parse an argument that is a path or URL."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give a file or URL")
    return text


def add_model_name(parser: argparse.ArgumentParser, default: str | None = None, required: bool = False, use: str = "") -> None:
    """Add --model, which `use` describes further, --revision and --offline."""
    note = "; default: the shipped model" if default else ""
    help_text = f"{use}folder of a checkpoint, or a model's name on the Hub (ORG/NAME{note})"
    parser.add_argument("--model", metavar="MODEL", default=default, required=required, help=help_text)
    add_revision(parser)
    help_text = "take a model that is given by name from the cache only, as with HF_HUB_OFFLINE=1"
    parser.add_argument("--offline", action="store_true", help=help_text)


def add_revision(parser: argparse.ArgumentParser) -> None:
    help_text = "branch, tag or commit of a model that is given by name (default: main)"
    parser.add_argument("--revision", metavar="NAME", help=help_text)


def add_model_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    add_model_name(parser, default, required=default is None)
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of LLM that `add_model_arguments` parsed."""
    return {name: getattr(args, name) for name in ("model", "revision", "offline", "dtype", "device")}


def add_file_arguments(parser: argparse.ArgumentParser, item: str) -> None:
    help_text = f"{item}, as a path or URL; several files run as one batch"
    parser.add_argument("files", metavar="FILE", type=path_or_url, nargs="+", help=help_text)
    parser.add_argument("--json", action="store_true", help="print one JSON object per file, one on each line")


def print_when_done(args: argparse.Namespace, results: Iterable[tuple[int, T]], report: Callable[[T], Report]) -> int:
    """Wait for all results, then print one per file. Ctrl-C prints the results so far and ends the process.

    Args:
        results: (index of the file, result), in any order.

    Returns:
        The exit code; see `exit_code`.
    """
    done: dict[int, T] = {}

    def print_done() -> int:
        return print_reports(args, {index: report(done[index]) for index in sorted(done)})

    with exit_on_interrupt(print_done):
        for index, result in results:
            done[index] = result
    return print_done()


def print_reports(args: argparse.Namespace, reports: Mapping[int, Report]) -> int:
    """Print reports by the index of their file, and errors also on stderr. Return the exit code."""
    several = len(args.files) > 1
    for index, (fields, text) in reports.items():
        name, error = display_name(args.files[index]), fields["error"]
        if args.json:
            print(json.dumps({"file": name, **fields}, ensure_ascii=False, default=asdict))
        elif error is None:
            print(f"{name}:\n{text}\n" if several and "\n" in text else f"{name}: {text}" if several else text)
        if error is not None:
            print(f"sensorium: error: {name}: {with_option_names(error.message, args)}", file=sys.stderr)
        elif fields["finish_reason"] == "length":
            warn_truncated(args, f"the text of {name}")
    return exit_code(fields["error"] for fields, _ in reports.values())


def warn_truncated(args: argparse.Namespace, what: str) -> None:
    """Warn on stderr that `what` stopped at the token limit."""
    advice = "; raise --max-tokens" if hasattr(args, "max_tokens") else ""
    print(f"sensorium: warning: {what} was cut off at the token limit{advice}", file=sys.stderr)


def exit_code(errors: Iterable[ErrorInfo | None]) -> int:
    """Return 0 if there is no error, 1 if an error is sensorium's fault, else 2."""
    codes = {error.code for error in errors if error is not None}
    return 1 if codes & _INTERNAL else 2 if codes else 0


def with_option_names(text: str, args: argparse.Namespace) -> str:
    """Replace LLM's argument names in a message by command-line options: "pass dtype= one of" gives "pass --dtype one of"."""
    for name in vars(args):
        option = f"--{name.replace('_', '-')}"
        text = re.sub(rf"(?<![\w/.-])(?<!--option ){name}= ?", f"{option} ", text)
        if "_" in name:  # a name without underscores may be an English word
            text = re.sub(rf"(?<![\w/.-]){name}\b", option, text)
    return text


def display_name(file: str) -> str:
    """Return a path or URL as it was given; a data: URL or an overlong path is cut."""
    limit = _MAX_DATA_URL if file[:5].lower() == "data:" else _MAX_PATH
    return file if len(file) <= limit else f"{file[:limit]}..."


@contextmanager
def exit_on_interrupt(before_exit: Callable[[], object]) -> Iterator[None]:
    """Make Ctrl-C call `before_exit` and exit with code 130, without waiting for other threads: a step can take minutes.

    It does nothing outside the main thread, because only the main thread receives interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            print(file=sys.stderr)  # end the progress bar's line
            before_exit()
            sys.stdout.flush()
        finally:
            os._exit(130)

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
