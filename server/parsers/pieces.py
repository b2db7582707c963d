"""Pieces of an answer, and the search for markers in a text that arrives in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """A tool call. `arguments` is JSON text; further pieces may continue it."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Arguments:
    """More text of the last call's arguments."""

    text: str


Piece = Content | Reasoning | Call | Arguments


def find_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return place and text of the first marker; of two at one place, the longer one."""
    hits = ((text.find(marker), -len(marker), marker) for marker in markers)
    found = min((hit for hit in hits if hit[0] >= 0), default=None)
    return None if found is None else (found[0], found[2])


def num_held(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end may begin a marker, or are whitespace before one."""
    longest = max((len(marker) - 1 for marker in markers), default=0)
    sizes = range(min(longest, len(text)), 0, -1)
    size = next((n for n in sizes if any(marker.startswith(text[-n:]) for marker in markers)), 0)
    before = text[: len(text) - size]
    return len(text) - len(before.rstrip())
