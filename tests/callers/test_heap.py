"""Free memory between used blocks is returned to the system."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
from sensorium.callers.heap import trim_heap

has_trim = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


def resident() -> int:
    """Return the bytes of memory that this process occupies."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not has_trim, reason="only glibc can return memory between used blocks")
def test_holes_are_returned() -> None:
    blocks = [bytearray(b"\1" * 40_000) for _ in range(3000)]
    del blocks[::2]
    before = resident()
    trim_heap()
    assert before - resident() > 40 << 20  # of 60 MB that are free
    assert all(block[-1] == 1 for block in blocks)
