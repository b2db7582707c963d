"""`sensorium`: run a command, and turn errors into one line and an exit code.

Exit codes: 0 success, 1 an error in sensorium or the machine, 2 an error that the caller can fix, 130 interrupted,
141 stdout was closed by its reader.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn

from ..callers.errors import SensoriumError, one_line, suggestion
from ..callers.wording import in_python
from .output import exit_code, exit_on_signals
from .wording import message_of

COMMANDS = {
    "bench": "measure a server, a model in this process, or the start of a model",
    "chat": "ask a model about images, videos and audio",
    "demo": "read the shipped images, video and speech with the shipped models",
    "doctor": "print versions, the device, the kernels in use, and problems such as missing packages",
    "list": "list the models in the Hub's cache",
    "ocr": "read the text in images and PDFs",
    "pull": "download a model from the Hugging Face Hub into its cache, or update it to the newest commit",
    "quantize": "write a checkpoint with the weights of the decoder in 4 bits",
    "read": "read PDFs and pictures, each page in the cheapest way that is enough, into Markdown, JSON and other formats",
    "serve": "serve a model over HTTP, with the endpoints of the OpenAI API",
    "transcribe": "transcribe audio files",
    "tune": "find the fastest launch configurations of the kernels on this GPU (takes minutes)",
}
"""Help text by command. Each command is a module of this package with `EXAMPLE`, `add_arguments` and `run`."""
_EXAMPLE = 'example: sensorium chat --model Qwen/Qwen2.5-VL-3B-Instruct --image a.png "What is this?"'


class Parser(argparse.ArgumentParser):
    """Prints errors on one line and keeps the line breaks of examples."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": argparse.RawDescriptionHelpFormatter} | options)

    def error(self, message: str) -> NoReturn:
        if "required: --model" in message:
            message += f", a folder or a name on the Hub. {self.epilog}. `sensorium list` shows the models in the cache"
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        near = in_python(suggestion(choice[1], re.findall(r"[\w-]+", choice[2]))) if choice else ""
        message += f"; {near}" if near else ""
        see = " See" if message.endswith("?") else "; see"
        self.exit(2, f"sensorium: error: {message}{see} `{self.prog} --help`\n")


def build_parser(command: str | None) -> Parser:
    """Return a parser with all commands, and the options of `command` only; the other commands are not imported."""
    parser = Parser("sensorium", description="Images, videos and audio in, text out.", epilog=_EXAMPLE)
    parser.add_argument("--version", action="version", version=_version())
    parser.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of a failure")
        if name == command:
            module = _module(name)
            sub.epilog = f"example: {module.EXAMPLE}"
            module.add_arguments(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code; argparse itself may exit. `argv` does not include the program's name."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller has closed it
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    with exit_on_signals():  # a module that is interrupted while it is imported may swallow KeyboardInterrupt
        return _run(_parse(list(sys.argv[1:] if argv is None else argv)))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line. A wrong one exits with 2."""
    parser = build_parser(next((word for word in words if word in COMMANDS), None))
    args, unknown = parser.parse_known_args(words)
    if unknown:  # the command's own parser names the right --help
        advice = next(filter(None, (nearest_option(word, [*options_of(parser)]) for word in unknown)), "")
        reason = f"unrecognized arguments: {' '.join(unknown)}"
        Parser(f"sensorium {args.command or ''}".rstrip()).error(f"{reason}; {advice}" if advice else reason)
    if args.command is None:
        parser.error("the following arguments are required: COMMAND")
    return args


def _run(args: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    try:
        with _log_to_stderr(args):
            code = int(_module(args.command).run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if args.debug:
            raise
        text = one_line(str(error)) or "no message"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what it still holds cannot be written
            message, code = f"the disk is full: {text}; free some space and run the command again", 2
        elif isinstance(error, SensoriumError):
            message, code = message_of(error.info, args), exit_code([error.info])
        else:
            message, code = f"{type(error).__name__}: {text} (--debug shows where)", 1
        print(f"sensorium: error: {message}", file=sys.stderr)
        return code


def options_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the names of a parser's options and of those of its commands, as LLM would have them."""
    for action in parser._actions:
        yield from (option[2:].replace("-", "_") for option in action.option_strings if option.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from options_of(sub)


def nearest_option(word: str, options: Sequence[str]) -> str:
    """Return a suggestion if an unknown word is an option that is similar to a known one, else ""."""
    name = word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""
    return re.sub(r"(?<=did you mean )\w+", lambda near: f"--{near[0].replace('_', '-')}", in_python(suggestion(name, options)))


@contextmanager
def _log_to_stderr(args: argparse.Namespace) -> Iterator[None]:
    """Print the library's log on stderr, one line per record.

    Without --debug, records with a traceback are left out: the result reports the same error on one line.
    """
    handler, logger = logging.StreamHandler(), logging.getLogger(__name__.partition(".")[0])
    handler.setFormatter(logging.Formatter("sensorium: %(message)s"))
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


if __name__ == "__main__":
    sys.exit(main())
