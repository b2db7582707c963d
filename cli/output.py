"""Output of commands: results as they are done, errors and warnings on stderr, exit codes, and the end by a signal."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from typing import Any, TypeVar

from ..callers.errors import ErrorInfo
from .wording import message_of

T = TypeVar("T")
Report = tuple[dict[str, Any], str]
"""A result's JSON fields, among them "finish_reason", "error" (ErrorInfo or None) and "doubt", and its text."""
_INTERNAL = {"internal", "engine_dead"}  # error codes that are sensorium's fault, not the caller's
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def print_results(
    args: argparse.Namespace, names: Sequence[str], results: Iterable[tuple[int, T]], report: Callable[[T], Report]
) -> int:
    """Print each file's result when it is done, with errors and warnings on stderr, and return the exit code.

    Args:
        results: (index of the file, result), in any order.
    """
    errors: list[ErrorInfo | None] = []
    with exit_on_signals():
        for index, result in results:
            fields, text = report(result)
            errors.append(fields["error"])
            _print_report(args, names[index], fields, text, several=len(names) > 1)
    return exit_code(errors)


def _print_report(args: argparse.Namespace, name: str, fields: dict[str, Any], text: str, several: bool) -> None:
    error, doubt = fields["error"], fields.get("doubt")
    shown = printable(name)
    if args.json:
        print_line(to_json({"file": name, **fields}, args))
    elif error is None or text:
        print_line(f"{shown}:\n{text}\n" if several and "\n" in text else f"{shown}: {text}" if several else text)
    if error is not None:
        print_error(f"{shown}: {message_of(error, args)}")
    elif fields["finish_reason"] == "length":
        warn_truncated(args, f"the text of {shown}")
    if doubt is not None:
        print(f"sensorium: warning: the text of {shown} is probably wrong: {doubt}", file=sys.stderr)


def printable(name: str) -> str:
    """Return a file's name on one line."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def print_line(text: str) -> None:
    """Print a line at once, above a progress bar. Bytes of a file's name that are not UTF-8 are escaped, as JSON does it."""
    from tqdm import tqdm

    tqdm.write(text.encode("utf-8", "backslashreplace").decode())
    sys.stdout.flush()


def to_json(fields: dict[str, Any], args: argparse.Namespace) -> str:
    def plain(value: Any) -> dict[str, Any]:
        values = {field.name: getattr(value, field.name) for field in dataclass_fields(value)}
        if isinstance(value, ErrorInfo):
            values = {"code": values["code"], "message": message_of(value, args), **values}
            del values["text"]
        return values

    return json.dumps(fields, ensure_ascii=False, default=plain)


def print_error(message: str) -> None:
    print(f"sensorium: error: {message}", file=sys.stderr)


def warn_truncated(args: argparse.Namespace, what: str) -> None:
    """Warn on stderr that `what` stopped at the token limit."""
    advice = "; raise --max-tokens" if getattr(args, "max_tokens", None) else ""
    print(f"sensorium: warning: {what} was cut off at the token limit{advice}", file=sys.stderr)


def exit_code(errors: Iterable[ErrorInfo | None]) -> int:
    """Return 0 if there is no error, 1 if an error is sensorium's fault, else 2."""
    codes = {error.code for error in errors if error is not None}
    return 1 if codes & _INTERNAL else 2 if codes else 0


@contextmanager
def exit_on_signals(before_exit: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Make Ctrl-C and SIGTERM call `before_exit` and exit at once with 130 or 143, because a step can take minutes.

    It does nothing outside the main thread, because only the main thread receives signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: object) -> None:
        for ignored in _SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        try:
            print(file=sys.stderr)  # end the progress bar's line
            before_exit()
            sys.stdout.flush()
        finally:
            os._exit(128 + number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
