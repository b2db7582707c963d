"""`sensorium`: finds the command, and turns failures into one line and an exit code. Knows no model.

Exit codes: 0 done, 1 a failure of ours or of the machine, 2 something the caller can put right, 130 interrupted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from ..mm.errors import SensoriumError
from .files import in_options

COMMANDS = {
    "chat": "ask a model about pictures, clips and sounds",
    "demo": "read the shipped pictures and clip with the shipped model",
    "doctor": "versions, device, kernels in use, and what is missing",
    "ocr": "read the text in pictures",
    "transcribe": "write down what is said in sounds",
    "tune": "time the kernels' launch configurations on this GPU and keep the best, minutes",
}
"""Command -> what it does; each is a module beside this one with `EXAMPLE`, `add_arguments` and `run`."""
_EXAMPLE = 'example: sensorium chat --model Qwen2.5-VL-3B-Instruct --image a.png "What is this?"'


class Parser(argparse.ArgumentParser):
    """Errors in one line; examples as they are typed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"sensorium: error: {message}; see `{self.prog} --help`\n")


class Lines(logging.Formatter):
    """Of a log, in the words of a command line."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__("sensorium: %(message)s")
        self._args = args

    def formatMessage(self, record: logging.LogRecord) -> str:
        return in_options(super().formatMessage(record), self._args)


def build_parser(command: str | None) -> Parser:
    """All commands by name, and the options of `command` alone: the others are not imported."""
    parser = Parser("sensorium", description="Pictures, clips and sounds in, text out.", epilog=_EXAMPLE)
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of a failure")
        if name == command:
            module = _module(name)
            sub.epilog = f"example: {module.EXAMPLE}"
            module.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return the exit code; argparse exits by itself."""
    words = list(sys.argv[1:] if argv is None else argv)
    args, unknown = build_parser(next((word for word in words if word in COMMANDS), None)).parse_known_args(words)
    if unknown:  # as the command's own parser says it, which knows where its help is
        Parser(f"sensorium {args.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        with _logged(args):
            code = int(_module(args.command).run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.debug:
            raise
        known = isinstance(error, SensoriumError)
        text = " ".join(str(error).split()) or "no message"
        told = in_options(text, args) if known else f"{type(error).__name__}: {text} (--debug shows where)"
        print(f"sensorium: error: {told}", file=sys.stderr)
        return 2 if known else 1


@contextmanager
def _logged(args: argparse.Namespace) -> Iterator[None]:
    """What the library logs, on stderr.

    Without --debug in one line each, and nothing that comes with a traceback: a result says the same in one line.
    """
    handler, logger = logging.StreamHandler(), logging.getLogger(__name__.partition(".")[0])
    handler.setFormatter(Lines(args))
    if not args.debug:
        handler.addFilter(lambda record: not record.exc_info)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _module(command: str) -> Any:
    return import_module(f".{command}", __package__)


def _version() -> str:
    return f"sensorium {import_module('..', __package__).__version__}"
