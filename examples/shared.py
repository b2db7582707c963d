"""What the examples share: the shipped model and media, and how an error is shown. No example itself."""

import sys
from collections.abc import Callable
from pathlib import Path

from sensorium import SensoriumError

ASSETS = Path(__file__).resolve().parents[1] / "assets"


def run(main: Callable[[], list[str] | None]) -> None:
    """What the caller can put right is one line on stderr and the exit code 2, as of `sensorium`.

    `main` raises it, or returns a line for each of several inputs that failed alone.
    """
    try:
        failed = main() or []
    except SensoriumError as error:
        failed = [str(error)]
    for line in failed:
        print(f"error: {line}", file=sys.stderr)
    if failed:
        sys.exit(2)
