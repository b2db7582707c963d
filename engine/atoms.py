"""Where a prompt must not be cut: prefill atoms, by family. Knows no scheduler.

A family whose items see themselves whole (bidirectional pictures) is "item_atomic": each run of embeddings that lie side by
side is an atom. One whose prompt does (prefix-LM) is "prompt_atomic"; of a "causal" one every token can be the last of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..mm.types import MultiModalFeature

Atom = tuple[int, int]  # tokens [start, stop) that are computed in one step


def atoms(prefill: str, prompt_length: int, features: Sequence[MultiModalFeature]) -> list[Atom]:
    """In order. `prompt_length`: tokens the sequence began with."""
    if prefill == "item_atomic":
        return [run for feature in features for run in feature.range.runs]
    return [(0, prompt_length)] if prefill == "prompt_atomic" else []


def clip(start: int, count: int, budget: int, parts: Sequence[Atom]) -> int:
    """Tokens from `start` on that can be computed now: `count`, less or more so that no atom is cut, at most `budget`.

    Example: atom [4, 9). From 0, 6 tokens become 4. From 4, 3 become 5, or 0 when the budget is 3.
    """
    stop = start + count
    for first, last in parts:
        if first < stop < last:
            stop = first if first > start else last
    return stop - start if stop - start <= budget else 0


def round_down(position: int, block_size: int, parts: Sequence[Atom]) -> int:
    """The largest multiple of `block_size`, at most `position`, that cuts no atom."""
    position -= position % block_size
    for first, last in reversed(parts):
        if first < position < last:
            position = first - first % block_size
    return position
