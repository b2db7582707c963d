"""`sensorium bench`: measure a server, a model in this process, or the start of a model."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

EXAMPLE = "sensorium bench serve --dataset-name random-mm --num-prompts 100 --request-rate 1 2 4 --plot rates.png"
_MODES = {
    "serve": "send requests to a server and measure latencies at one or several request rates",
    "offline": "measure the throughput of a model in this process",
    "startup": "measure the time from the start of a process to the first token",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_subparsers(dest="mode", metavar="MODE", required=True)
    for name, text in _MODES.items():
        sub = modes.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        sub.epilog = f"example: {_module(name).EXAMPLE}"
        _module(name).add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    return int(_module(args.mode).run(args))


def _module(mode: str) -> Any:
    return import_module(f".{mode}", __name__)
