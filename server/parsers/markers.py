"""Cuts a text that arrives in chunks at markers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Protocol


class MarkerSet:
    """Markers to look for. Of two that begin at the same place, the longer one counts."""

    def __init__(self, markers: frozenset[str]) -> None:
        longest_first = sorted(markers, key=lambda marker: (-len(marker), marker))
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._prefixes = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
        self.longest = max(map(len, markers), default=0)

    def undecided_from(self, text: str, start: int) -> int:
        """Return where the longest end of a text begins that more text may turn into a marker."""
        sizes = range(min(self.longest - 1, len(text) - start), 0, -1)
        return len(text) - next((size for size in sizes if text[-size:] in self._prefixes), 0)


@lru_cache(maxsize=64)  # a set of a vocabulary with a thousand special tokens takes milliseconds
def marker_set(markers: frozenset[str]) -> MarkerSet:
    return MarkerSet(markers)


def markers_of(*groups: Iterable[str]) -> MarkerSet:
    """Return the set of the markers of all groups."""
    return marker_set(frozenset(marker for group in groups for marker in group if marker))


class Reader(Protocol):
    """Takes the text between markers, which may come in parts, and the markers.

    `markers` are those of its state. A state that a text leads to has no markers that the state before lacks; then it makes no
    difference how the text is cut.
    """

    markers: MarkerSet

    def on_text(self, text: str) -> None: ...

    def on_marker(self, marker: str) -> None: ...


class Scanner:
    """Keeps the end of a text that may be the beginning of a marker."""

    def __init__(self) -> None:
        self._tail = ""

    def scan(self, text: str, reader: Reader, is_last: bool = False) -> None:
        """Give a chunk to the reader. `is_last`: no more text comes."""
        text, start = self._tail + text, 0
        while True:
            markers = reader.markers
            undecided = len(text) if is_last else markers.undecided_from(text, start)
            match = markers.pattern.search(text, start)
            if match is not None and match.start() >= undecided:  # it may become a longer one
                match = None
            end = undecided if match is None else match.start()
            if end > start:
                reader.on_text(text[start:end])
                start = end
                if reader.markers is not markers:
                    continue
            if match is None:
                break
            start = match.end()
            reader.on_marker(match[0])
        self._tail = text[start:]
