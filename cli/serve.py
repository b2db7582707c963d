"""`sensorium serve`: serve a model over HTTP, with the endpoints of the OpenAI API."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from typing import Any

from ..callers.errors import ConfigError, SensoriumError
from .common import add_engine_arguments, engine_arguments, option_help
from .output import exit_code
from .wording import message_of

_SEVERAL = ("api_key", "allowed_origins", "served_model_name")
"""Options whose flag may be given several times."""
EXAMPLE = "sensorium serve Qwen/Qwen2.5-VL-3B-Instruct --port 8000 --max-model-len 8192"


class _Adapters(argparse.Action):
    """Collects adapters, and notes which of its two flags was given, for errors."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.adapters = [*(namespace.adapters or ()), *values]
        namespace.spellings = {"adapters": option_string}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from ..engine.engine_args import parse_value
    from ..server.config import ServerConfig

    help_text = "folder of a checkpoint, a GGUF file, or a model's name on the Hub (ORG/NAME)"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=help_text)
    parser.add_argument("--model", dest="named_model", metavar="MODEL", help="the same, as for other commands")
    help_text = "YAML file of options, as NAME: VALUE; flags take precedence"
    parser.add_argument("--config", metavar="FILE", help=help_text)
    server = parser.add_argument_group("server", "docs/server.md describes them; a value is JSON or text")
    texts = option_help(ServerConfig)
    for field in dataclasses.fields(ServerConfig):
        convert = str if "str" in str(field.type) else parse_value
        several: dict[str, Any] = {"action": "append"} if field.name in _SEVERAL else {}
        flags = [f"--{field.name.replace('_', '-')}"]
        if field.name == "adapters":
            flags, several = [*flags, "--lora-modules"], {"action": _Adapters, "nargs": "+"}
        server.add_argument(*flags, metavar="VALUE", type=convert, help=texts.get(field.name), **several)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. Return 0 after the last response."""
    from ..server.config import ServerConfig, read_config
    from ..server.logs import json_line
    from ..server.run import serve

    if args.model is not None and args.named_model is not None:
        raise ConfigError(f"both {args.model} and --model {args.named_model} name the model; give one of them")
    options = {} if args.config is None else read_config(args.config)
    server_options = {field.name: getattr(args, field.name) for field in dataclasses.fields(ServerConfig)}
    named = {
        name: value for name, value in {"model": args.model or args.named_model, **server_options}.items() if value is not None
    }
    options = options | named | engine_arguments(args)
    try:
        serve(options)
    except SensoriumError as error:
        if options.get("log_format", os.environ.get("SENSORIUM_LOG_FORMAT")) != "json":
            raise
        print(json_line(message_of(error.info, args), logging.ERROR), file=sys.stderr)
        return exit_code([error.info])
    return 0
