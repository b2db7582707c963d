"""`sensorium quantize`: write a checkpoint with the decoder's weights in 4 bits, rounded to nearest."""

from __future__ import annotations

import argparse
import sys

EXAMPLE = "sensorium quantize Qwen/Qwen2.5-VL-3B-Instruct qwen-w4 --group-size 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a checkpoint's folder, or its name on the Hub")
    parser.add_argument("out", metavar="OUT", help="the folder to write, which must not exist")
    parser.add_argument("--bits", type=int, choices=[4], default=4, help="bits of a weight (default: 4)")
    groups = "inputs that share a scale (default: 128)"
    parser.add_argument("--group-size", type=int, choices=[32, 64, 128], default=128, help=groups)


def run(args: argparse.Namespace) -> int:
    """Print the written folder."""
    from ..engine.setup.quantize import quantize_checkpoint

    print(quantize_checkpoint(args.model, args.out, args.group_size, lambda line: print(line, file=sys.stderr)))
    return 0
