"""Returns memory that the C library keeps to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim_heap() -> None:
    """Return free memory that lies between used blocks. glibc keeps it; with other C libraries this does nothing."""
    trim = libc_function("malloc_trim", ctypes.c_size_t)
    if trim is not None:
        trim(0)


@cache
def libc_function(name: str, *types: Any) -> Any:
    """Return a function of the C library with these types of arguments, or None if it has none of this name."""
    try:
        function = getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # TypeError: Windows
        return None
    if function is not None:
        function.argtypes = types
    return function
