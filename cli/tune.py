"""`sensorium tune`: find the fastest launch configurations of the kernels on this GPU and store them for the user."""

from __future__ import annotations

import argparse

EXAMPLE = "sensorium tune"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cuda or cuda:N (default: auto)")


def run(args: argparse.Namespace) -> int:
    from ..engine.setup.tuning import tune

    path = tune(args.device, print)
    print(f"written to {path}" if path else "no configuration is faster than the shipped ones")
    return 0
