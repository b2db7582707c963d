"""What commands that run a model over files have in common: their arguments and how results are printed. Knows no model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def add_model(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    shown = " (default: the model that ships)" if default else ""
    parser.add_argument(
        "--model",
        metavar="DIR",
        default=default,
        required=default is None,
        help=f"folder of a checkpoint as the Hub ships it{shown}",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16 (default: auto)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")


def add_files(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("files", metavar="FILE", type=media, nargs="+", help=f"{what}, file or URL; several are one batch")
    parser.add_argument("--json", action="store_true", help="print a JSON object per file, one a line")


def media(text: str) -> str | Path:
    """A path, which is the caller's own, or a URL, which obeys the media policy."""
    return text if "://" in text[:16] else Path(text)


def print_results(args: argparse.Namespace, results: Sequence[tuple[dict[str, Any], str]]) -> int:
    """A result per file: what JSON says of it, with its "error" or None, and its text. Failures go to stderr as well.

    Returns:
        The exit code: 2 where a file failed, which its sender can put right, else 0.
    """
    several = len(args.files) > 1
    for file, (known, text) in zip(args.files, results, strict=True):
        if args.json:
            print(json.dumps({"file": str(file), **known}, ensure_ascii=False))
        elif known["error"] is None:
            print(f"{file}:\n{text}\n" if several and "\n" in text else f"{file}: {text}" if several else text)
        if known["error"] is not None:
            print(f"sensorium: error: {file}: {known['error']}", file=sys.stderr)
    return 2 if any(known["error"] is not None for known, _ in results) else 0
