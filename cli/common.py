"""Arguments that commands share."""

from __future__ import annotations

import argparse
import inspect
import re
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from .sources import path_or_url


def positive_int(text: str) -> int:
    """Parse an argument that is a number of tokens."""
    with suppress(ValueError):
        if int(text) >= 1:
            return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or above")


def new_file(text: str) -> Path:
    """Parse an argument that is a file to write, whose folder must exist."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"the folder of {text!r} does not exist; create it, or give another path")
    return Path(text)


def json_or_text(text: str) -> Any:
    """Parse an argument that is JSON or plain text."""
    from ..engine.engine_args import parse_value

    return parse_value(text)


def template_or_path(text: str) -> str | Path:
    """Parse an argument that is a chat template: Jinja source has braces, a path has none."""
    return text if "{" in text else Path(text)


def add_model_name(parser: argparse.ArgumentParser, default: str | None = None, required: bool = False, use: str = "") -> None:
    """Add --model, which `use` describes further, --revision and --offline."""
    note = "; default: the shipped model" if default else ""
    help_text = f"{use}folder of a checkpoint, a GGUF file, or a model's name on the Hub (ORG/NAME{note})"
    parser.add_argument("--model", metavar="MODEL", default=default, required=required, help=help_text)
    add_revision(parser)
    help_text = "take a model that is given by name from the cache only, as with HF_HUB_OFFLINE=1"
    parser.add_argument("--offline", action="store_true", help=help_text)


def add_revision(parser: argparse.ArgumentParser) -> None:
    help_text = "branch, tag or commit of a model that is given by name (default: main)"
    parser.add_argument("--revision", metavar="NAME", help=help_text)


def add_model_arguments(parser: argparse.ArgumentParser, default: str | None = None, use: str = "") -> None:
    add_model_name(parser, default, required=default is None, use=use)
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    help_text = "int8, fp8, int4, or JSON with options: quantise weights while they are loaded (default: as stored)"
    parser.add_argument("--quantization", metavar="METHOD", type=json_or_text, help=help_text)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of LLM that `add_model_arguments` parsed."""
    return {name: getattr(args, name) for name in ("model", "revision", "offline", "dtype", "device", "quantization")}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option of LLM that is not an argument of the parser yet. The help leaves out vLLM's own names."""
    from ..engine.config import EngineConfig
    from ..engine.engine_args import EngineArgs, parse_value

    text = (
        "the options of LLM; a value is JSON or text, and true if there is none. "
        "The names of vLLM's engine arguments are accepted, too (docs/coming-from-vllm.md)"
    )
    engine, texts = parser.add_argument_group("engine", text), option_help(EngineConfig)
    texts["chat_template"] = "Jinja template, or the path of a file that holds it."
    taken = {action.dest for action in parser._actions}
    options = dict.fromkeys([*(field.name for field in fields(EngineArgs)[1:]), "chat_template"])
    names = [name for name in options if name not in taken]
    for name in names:
        flag, shown = f"--{name.replace('_', '-')}", texts.get(name, argparse.SUPPRESS)
        convert = template_or_path if name == "chat_template" else parse_value
        engine.add_argument(flag, metavar="VALUE", type=convert, nargs="?", const=True, help=shown)
    parser.set_defaults(engine_names=names)


def option_help(options: type) -> dict[str, str]:
    """Return the first sentence about each option in the docstring of a class of options, for argparse."""
    args = inspect.cleandoc(options.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    sentences: dict[str, str] = {}
    for names, text in re.findall(r"^    ([a-z][\w, ]*): (.*(?:\n {8}.*)*)", args, re.MULTILINE):
        sentence = re.split(r"(?<=\.) (?=[A-Z`])", " ".join(text.split()))[0].replace("%", "%%")
        sentences |= dict.fromkeys(names.split(", "), sentence)
    return sentences


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of LLM that were given as flags of `add_engine_arguments`."""
    return {name: getattr(args, name) for name in args.engine_names if getattr(args, name) is not None}


def add_file_arguments(parser: argparse.ArgumentParser, item: str, count: str = "+") -> None:
    help_text = f"{item}: a path, a folder, a pattern, a URL, or - for stdin; several files run as one batch"
    parser.add_argument("files", metavar="FILE", type=path_or_url, nargs=count, help=help_text)
    parser.add_argument("--json", action="store_true", help="print one JSON object per file, one on each line")


def check_chat_template(args: argparse.Namespace) -> None:
    """Raise InputError if the chat template that `add_chat_template` parsed cannot be read or compiled."""
    from ..engine.frontend.arguments import read_chat_template

    if args.chat_template is not None:
        read_chat_template(args.chat_template)


def add_chat_template(parser: argparse.ArgumentParser) -> None:
    help_text = "Jinja template, or the path of a file that holds it (default: the checkpoint's)"
    parser.add_argument("--chat-template", metavar="FILE", type=template_or_path, help=help_text)
