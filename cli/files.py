"""What commands that run a model over files have in common: their arguments and how results are printed. Knows no model."""

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
from typing import Any, TypeVar

T = TypeVar("T")
Told = tuple[dict[str, Any], str]
_SHOWN = 40  # characters of a data: URL
_LONGEST = 4096  # of a path


def count(text: str) -> int:
    """A number of tokens, as an argument's type."""
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or above")


def path(text: str) -> str:
    """A file or URL, as an argument's type."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; give a file or URL")
    return text


def add_model(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    shown = " (default: the model that ships)" if default else ""
    parser.add_argument(
        "--model",
        metavar="DIR",
        default=default,
        required=default is None,
        help=f"folder of a checkpoint as the Hub ships it{shown}",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def add_files(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("files", metavar="FILE", type=path, nargs="+", help=f"{what}, file or URL; several are one batch")
    parser.add_argument("--json", action="store_true", help="print a JSON object per file, one a line")


def print_finished(args: argparse.Namespace, finished: Iterable[tuple[int, T]], told: Callable[[T], Told]) -> int:
    """Wait for the results and print them, one per file. Ctrl-C prints those that there are, and ends the process.

    Args:
        finished: (place among the files, result), in any order.
        told: what JSON says of a result, with its "finish_reason" and its "error" or None, and its text.

    Returns:
        The exit code, see `code_of`.
    """
    done: dict[int, T] = {}
    with ending_at_once(lambda: print_results(args, {place: told(done[place]) for place in sorted(done)})):
        for place, result in finished:
            done[place] = result
    return print_results(args, {place: told(done[place]) for place in sorted(done)})


def print_results(args: argparse.Namespace, results: Mapping[int, Told]) -> int:
    """Those of some files by their place, failures on stderr as well. See `print_finished`."""
    several = len(args.files) > 1
    for place, (known, text) in results.items():
        file = shown(args.files[place])
        if args.json:
            print(json.dumps({"file": file, **known}, ensure_ascii=False))
        elif known["error"] is None:
            print(f"{file}:\n{text}\n" if several and "\n" in text else f"{file}: {text}" if several else text)
        if known["error"] is not None:
            print(f"sensorium: error: {file}: {in_options(str(known['error']), args)}", file=sys.stderr)
        elif known["finish_reason"] == "length":
            warn_of_the_end(args, f"{file}: its text")
    return code_of(known["error"] for known, _ in results.values())


def warn_of_the_end(args: argparse.Namespace, what: str) -> None:
    """On stderr: `what` ends where no more tokens are allowed."""
    more = "; raise --max-tokens" if hasattr(args, "max_tokens") else ""
    print(f"sensorium: warning: {what} is cut off where no more tokens are allowed{more}", file=sys.stderr)


def code_of(errors: Iterable[str | None]) -> int:
    """The exit code after these: 1 where one is a bug of ours, else 2 where there is one, which its sender can put right."""
    from ..engine.failures import is_ours

    found = [error for error in errors if error is not None]
    return 1 if any(map(is_ours, found)) else 2 if found else 0


def in_options(text: str, args: argparse.Namespace) -> str:
    """A message that names arguments of LLM, as in "pass dtype= one of", with the options of this command line: "--dtype"."""
    for name in vars(args):
        option = f"--{name.replace('_', '-')}"
        text = re.sub(rf"(?<![\w/.-])(?<!--option ){name}= ?", f"{option} ", text)
        if "_" in name:  # a word of English has none
            text = re.sub(rf"(?<![\w/.-]){name}\b", option, text)
    return text


def shown(file: str) -> str:
    """A path or URL as it was given, but for the data in a data: URL and what no file's name is as long as."""
    most = _SHOWN if file[:5].lower() == "data:" else _LONGEST
    return file if len(file) <= most else f"{file[:most]}..."


@contextmanager
def ending_at_once(last: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C does `last` and ends the process with 130, whatever its other threads compute: a step can take minutes.

    Only the main thread can be interrupted; in any other nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            print(file=sys.stderr)  # the progress bar's line stays
            last()
            sys.stdout.flush()
        finally:
            os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
