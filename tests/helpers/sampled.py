"""Chooses the cases that `make test` runs: the same sample on every day and machine. `make test-all` runs all of them."""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Sequence

import pytest

PARTS = 20
VARIABLE = "SENSORIUM_TEST_PART"
_USUAL_PART = "7"  # fixed, so that a run that fails does so because of a change and not because of the day
_ALWAYS_ALL = 4  # a test with no more cases than this runs all of them
_STRIDE = 8


def chosen_part() -> str:
    """Return SENSORIUM_TEST_PART ("0" to "19", or "all") or, if it is not set, always the same part."""
    return os.environ.get(VARIABLE) or _USUAL_PART


def left_out(items: Sequence[pytest.Item], part: str) -> set[pytest.Item]:
    """Return the cases that do not belong to a part.

    Of tests marked `sampled` a part has the cases of one family in twenty, all of them, or one in twenty of the cases of a
    test that has no families. Of other tests with many cases it has every eighth one.
    """
    if part == "all":
        return set()
    cases: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    out = set()
    for item in items:
        if "sampled" in item.keywords:
            if zlib.crc32(_family(item).encode()) % PARTS != int(part):
                out.add(item)
        else:
            cases[item.nodeid.partition("[")[0], getattr(item, "originalname", item.name)].append(item)
    for several in cases.values():
        if len(several) > _ALWAYS_ALL:
            out.update(item for number, item in enumerate(several) if (number + int(part)) % _STRIDE)
    return out


def _family(item: pytest.Item) -> str:
    """Return the name of the case's family, or the case's own name."""
    callspec = getattr(item, "callspec", None)
    row = callspec.params.get("row") if callspec else None
    return row if isinstance(row, str) else getattr(row, "name", item.name)
