"""`sensorium tune`: times launch configurations of the GPU's kernels, keeps what is faster in the user's file for the card."""

from __future__ import annotations

import argparse

EXAMPLE = "sensorium tune"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cuda or cuda:N (default: auto)")


def run(args: argparse.Namespace) -> int:
    from ..engine.tuning import tune

    kept = tune(args.device, print)
    print(f"kept in {kept}" if kept else "nothing is faster than what ships")
    return 0
