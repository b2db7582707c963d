"""Splits tests marked `sampled` into parts: `make test` runs one part, another each day."""

from __future__ import annotations

import os
import time
import zlib

PARTS = 3
VARIABLE = "SENSORIUM_TEST_PART"


def part_of_today() -> str:
    """Return SENSORIUM_TEST_PART ("0" to "2", or "all") or, if it is not set, the day's part."""
    return os.environ.get(VARIABLE) or str(int(time.time()) // 86_400 % PARTS)


def is_in_part(case: str) -> bool:
    """Return True if the part to run contains a test case, given by its name with parameters."""
    return part_of_today() in ("all", str(zlib.crc32(case.encode()) % PARTS))
