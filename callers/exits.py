"""The end of a process."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import NoReturn


def end_process(code: int) -> NoReturn:
    """End this process with an exit code, after the functions of `atexit`, once its streams and logs are written.

    The code is 1 instead of 0 if they cannot be written. Work that waits in threads is not done. The interpreter's own end,
    which takes every module and object apart, takes seconds with torch.
    """
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (BrokenPipeError, ValueError):  # its reader is gone, or it is closed
            continue
        except OSError:
            code = code or 1
    os._exit(code)
