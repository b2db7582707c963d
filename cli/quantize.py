"""`sensorium quantize`: write a checkpoint with the decoder's weights in 4 bits, rounded to nearest or scaled by AWQ."""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from ..callers.errors import ConfigError
from .common import positive_int

EXAMPLE = "sensorium quantize Qwen/Qwen2.5-VL-3B-Instruct qwen-w4 --group-size 64"
_SAMPLES = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or its name on the Hub")
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must not exist")
    parser.add_argument("--bits", type=int, choices=[4], default=4, help="bits of a weight (default: 4)")
    groups = "inputs that share a scale (default: 128)"
    parser.add_argument("--group-size", type=int, choices=[32, 64, 128], default=128, help=groups)
    method = "rtn rounds to nearest; awq first scales the weights by the activations of calibration prompts (default: rtn)"
    parser.add_argument("--method", choices=["rtn", "awq"], default="rtn", help=method)
    samples = f"awq: calibration prompts (default: {_SAMPLES})"
    parser.add_argument("--samples", metavar="N", type=positive_int, help=samples)
    prompts = (
        "awq: a file with a prompt per line: text, or JSON: a string or a list of chat messages; default: the model writes them"
    )
    parser.add_argument("--calibration", metavar="FILE", type=Path, help=prompts)


def run(args: argparse.Namespace) -> int:
    """Print the written folder."""
    from ..engine.setup.quantize import quantize_checkpoint
    from ..pipelines.calibration import run_prompts

    option = next((name for name in ("samples", "calibration") if getattr(args, name) is not None), None)
    if option is not None and args.method != "awq":
        raise ConfigError(f"--{option} is for --method awq; give both, or leave it out", param=option)
    samples = args.samples or _SAMPLES
    prompts = None if args.calibration is None else read_prompts(_read_text(args.calibration))
    calibrate = partial(run_prompts, args.model, samples, prompts) if args.method == "awq" else None
    if calibrate is not None and prompts is None:
        print(f"calibrating with {samples} texts that the model writes; --calibration takes others", file=sys.stderr)
    print(quantize_checkpoint(args.model, args.out, args.group_size, lambda line: print(line, file=sys.stderr), calibrate))
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the calibration file {path} cannot be read: {error}", param="calibration") from None


def read_prompts(text: str) -> list[Any]:
    """Parse one prompt per line: JSON after a quote or a bracket, otherwise plain text. Empty lines are left out."""
    prompts = []
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        try:
            prompts += [json.loads(line) if line[0] in '"[' else line] if line else []
        except ValueError as error:
            raise ConfigError(f"line {number} of the calibration file is not JSON: {error}", param="calibration") from None
    return prompts
