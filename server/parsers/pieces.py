"""Pieces of an answer, and the search for markers in a text that arrives in chunks."""

from __future__ import annotations

import re
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


def marker_pattern(markers: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern of the markers; of two at one place, it finds the longer one."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or r"(?!)")


def num_held(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end may begin a marker, or are whitespace before one."""
    longest = max((len(marker) - 1 for marker in markers), default=0)
    sizes = range(min(longest, len(text)), 0, -1)
    size = next((n for n in sizes if any(marker.startswith(text[-n:]) for marker in markers)), 0)
    before = text[: len(text) - size]
    return len(text) - len(before.rstrip())
