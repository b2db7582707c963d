"""Takes memory that a process no longer needs out of its resident set, where the C library can."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

_SIZE, _INT = ctypes.c_size_t, ctypes.c_int


def drop(address: int, size: int) -> None:
    """Drop the whole pages between two addresses of a mapped file. If they are read again, they come from the file."""
    function = _function("madvise", ctypes.c_void_p, _SIZE, _INT)
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if function is not None and hasattr(mmap, "MADV_DONTNEED") and first < last:
        function(first, last - first, mmap.MADV_DONTNEED)


def release_freed() -> None:
    """Give freed memory back to the system.

    glibc keeps freed blocks that lie between others: without this, all originals of up to 32 MB of packed weights stay
    resident.
    """
    function = _function("malloc_trim", _SIZE)
    if function is not None:
        function(0)


@cache
def _function(name: str, *types: Any) -> Any:
    """Return a function of the C library, or None if it has none of this name."""
    try:
        found = getattr(ctypes.CDLL(None), name, None)
    except (OSError, TypeError):  # TypeError: Windows
        return None
    if found is not None:
        found.argtypes = types
    return found
