"""`EngineArgs`: the options of `LLM`, and vLLM's engine arguments, as one object for `LLM.from_engine_args`."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import MISSING, dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any, Unpack

from ..callers.errors import short_repr
from .config import EngineConfig
from .transfer_config import is_address
from .vllm_args import NAMES

if TYPE_CHECKING:
    from .option_types import ConfigOptions

    @dataclass(init=False)
    class _Options:
        def __init__(self, model: str | os.PathLike[str], **options: Unpack[ConfigOptions]) -> None: ...

else:
    _own = [option.name for option in fields(EngineConfig)]
    _names = [*_own[1:], *sorted(NAMES.difference(_own))]
    _Options = make_dataclass("_Options", [(_own[0], str), *((name, Any, None) for name in _names)])


class EngineArgs(_Options):
    """Options for `LLM(**vars(args))`. None means the default; values are checked when the engine is made."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an argument per option to a parser. Values are JSON or texts."""
        for option in fields(cls):
            required = option.default is MISSING
            value: dict[str, Any] = {"type": parse_value} if required else {"type": parse_value, "nargs": "?", "const": True}
            parser.add_argument(f"--{option.name.replace('_', '-')}", required=required, **value)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """Return the options among parsed arguments."""
        return cls(**{option.name: getattr(args, option.name) for option in fields(cls) if hasattr(args, option.name)})


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` for `AsyncLLM`."""


def parse_value(text: str) -> Any:
    """Parse the value of an option: JSON, or plain text.

    A text that begins like an object or a list must be JSON, unless it is an address such as [::1]:9002.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        if text[:1] in ("{", "[") and not is_address(text):
            raise argparse.ArgumentTypeError(f"{short_repr(text)} is not JSON ({error})") from None
        return text
