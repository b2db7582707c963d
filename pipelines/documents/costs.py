"""Seconds that pages take, by the way they are read, measured in earlier runs on this machine and kept in the user's cache."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from .blocks import Way

_MOST_PAGES = 256  # that a cost is the mean of: later runs outweigh earlier ones
_LARGEST = 1 << 20  # bytes of the file
INSPECTED = "inspected"
"""Name of the cost of looking at a page, which is all that blank pages take, and text layers that are not checked."""


@dataclass(frozen=True)
class Cost:
    """Seconds of so many pages."""

    seconds: float
    pages: int

    @property
    def per_page(self) -> float:
        return self.seconds / self.pages


@dataclass
class CostClock:
    """Measures the pages of a run. Thread-safe.

    Pages that are read at the same time share the seconds, so that the sum is that of the clock on the wall.
    """

    costs: dict[str, Cost] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _active: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def measuring(self, name: str, pages: int) -> Iterator[None]:
        """Count the seconds of the block for these pages, if it raises nothing."""
        began = time.monotonic()
        with self._lock:
            self._active[name] += 1
            active = self._active[name]
        try:
            yield
            with self._lock:
                seconds = (time.monotonic() - began) / max(active, self._active[name])
                before = self.costs.get(name, Cost(0.0, 0))
                self.costs[name] = Cost(before.seconds + seconds, before.pages + pages)
        finally:
            with self._lock:
                self._active[name] -= 1


def cost_of(way: Way, reader: str) -> str:
    """Return the name of the cost of a way with a reader."""
    return f"{way} {reader}"


def seconds_of(
    ways: Mapping[Way, int], reader: str, costs: Mapping[str, Cost], are_layers_checked: bool = False
) -> tuple[float, list[Way]]:
    """Return the seconds that pages will take, and the ways whose costs are not known, which are left out.

    Args:
        are_layers_checked: sampled lines of text layers are read.
    """
    read: tuple[Way, ...] = ("draft", "reading", *(("text_layer",) if are_layers_checked else ()))
    seconds, unknown = 0.0, list[Way]()
    looked = costs.get(INSPECTED)
    for way, pages in ways.items():
        seconds += looked.per_page * pages if looked is not None else 0.0
        if way in read and pages:
            cost = costs.get(cost_of(way, reader))
            if cost is None:
                unknown.append(way)
            else:
                seconds += cost.per_page * pages
    return seconds, unknown


def kept_costs() -> dict[str, Cost]:
    """Return the costs of earlier runs; none if the file is missing or broken, whatever is in it, or there is no home."""
    with suppress(Exception):
        with _path().open("rb") as file:
            content = json.loads(file.read(_LARGEST))
        pairs = ((str(name), float(seconds), int(pages)) for name, (seconds, pages) in content["costs"].items())
        return {name: Cost(seconds, pages) for name, seconds, pages in pairs if 0 <= seconds < inf and pages > 0}
    return {}


def keep_costs(costs: Mapping[str, Cost]) -> None:
    """Add the costs of a run to those of earlier ones. If the file cannot be written, they are not kept."""
    with suppress(Exception):  # the reading has ended well
        _keep(costs)


def _keep(costs: Mapping[str, Cost]) -> None:
    if not costs:
        return
    kept = kept_costs()
    for name, cost in costs.items():
        before = kept.get(name, Cost(0.0, 0))
        seconds, pages = before.seconds + cost.seconds, before.pages + cost.pages
        share = min(1.0, _MOST_PAGES / pages)
        kept[name] = Cost(seconds * share, max(1, round(pages * share)))
    path = _path()
    part = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        values = {name: [round(cost.seconds, 6), cost.pages] for name, cost in sorted(kept.items())}
        part.write_text(f"{json.dumps({'costs': values}, indent=1)}\n", "utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _path() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "sensorium" / "documents" / "costs.json"
