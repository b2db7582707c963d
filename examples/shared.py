"""Shared by the examples: the shipped model and media, and error handling. Not an example itself."""

import sys
from collections.abc import Callable
from pathlib import Path

from sensorium import SensoriumError

ASSETS = Path(__file__).resolve().parents[1] / "assets"


def run(main: Callable[[], list[str] | None]) -> None:
    """Run an example; print errors as one line each on stderr and exit with 2, like the `sensorium` command.

    `main` raises a SensoriumError, or returns one line for each input that failed.
    """
    try:
        failed = main() or []
    except SensoriumError as error:
        failed = [str(error)]
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    if failed:
        sys.exit(2)
