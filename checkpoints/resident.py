"""Takes memory that a process no longer needs out of its resident set, where the C library can."""

from __future__ import annotations

import ctypes
import mmap

from ..callers.heap import libc_function

_SIZE, _INT = ctypes.c_size_t, ctypes.c_int


def drop(address: int, size: int) -> None:
    """Drop the whole pages between two addresses of a mapped file. If they are read again, they come from the file."""
    function = libc_function("madvise", ctypes.c_void_p, _SIZE, _INT)
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if function is not None and hasattr(mmap, "MADV_DONTNEED") and first < last:
        function(first, last - first, mmap.MADV_DONTNEED)
