"""Returns memory that the C library keeps to the operating system."""

from __future__ import annotations

import ctypes
import sys


def trim_heap() -> None:
    """Return free memory that lies between used blocks. glibc keeps it; on other systems this does nothing."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
