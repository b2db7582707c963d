"""How prompts are cut to a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def pair_lengths(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept if `room` are left: tokens of the longer text go first.

    This is "longest_first" of the tokenizers library: if both are longer than half, each gets half, the second one more.
    """
    if first + second <= room:
        return first, second
    short = min(first, second)
    long = short if short > room else max(short, room - short)
    if short + long > room:
        short, long = room // 2, room // 2 + room % 2
    return (long, short) if first > second else (short, long)


@dataclass(frozen=True)
class Truncation:
    """How a prompt is cut.

    Args:
        max_tokens: tokens that are kept, special tokens included.
        side: "right" keeps the first ones, "left" the last ones.
    """

    max_tokens: int
    side: str = "right"

    def apply(self, ids: Sequence[int], max_tokens: int | None = None) -> list[int]:
        """Return ids that are kept. `max_tokens`: replaces the number of this object."""
        count = self.max_tokens if max_tokens is None else max_tokens
        return list(ids[:count] if self.side == "right" else ids[max(0, len(ids) - count) :])
