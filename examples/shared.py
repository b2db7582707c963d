"""What the examples share: the shipped model and media, and how an error is shown. No example itself."""

import sys
from collections.abc import Callable
from pathlib import Path

from sensorium import SensoriumError

ASSETS = Path(__file__).resolve().parents[1] / "assets"


def run(main: Callable[[], object]) -> None:
    """What the caller can put right is one line on stderr and the exit code 2, as of `sensorium`."""
    try:
        main()
    except SensoriumError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
