"""`python -m sensorium` and the command `sensorium` run the command line."""

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Ctrl-C and SIGTERM end it with 130 and 143 from here on, also while modules are imported."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: os._exit(128 + received))
    from .callers.exits import end_process
    from .cli.main import main as run

    end_process(run())


if __name__ == "__main__":
    main()
