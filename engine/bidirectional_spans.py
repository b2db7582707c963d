"""Bidirectional spans: runs of prompt tokens that attend to each other and therefore must be computed in one step.

A model family declares how the tokens of a prompt attend to each other (`ProcessingInfo.prompt_attention`, `mm.rules`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ..mm.rules import PromptAttention
from ..mm.types import MultiModalFeature

BidirectionalSpan = tuple[int, int]  # tokens [start, stop)


def find_spans(
    attention: PromptAttention, prompt_length: int, features: Sequence[MultiModalFeature]
) -> list[BidirectionalSpan]:
    """Return the spans of a sequence in order. `prompt_length`: number of tokens that the sequence began with."""
    return [] if attention.spans is None else list(attention.spans(prompt_length, features))


def fit_chunk(start: int, count: int, budget: int, spans: Sequence[BidirectionalSpan]) -> int:
    """Return how many tokens to compute from `start` on: `count`, adjusted so that no span is cut; 0 if above `budget`.

    Example: span [4, 9). From 0, 6 tokens become 4. From 4, 3 become 5, or 0 when the budget is 3.
    """
    stop = start + count
    for first, last in spans:
        if first < stop < last:
            stop = first if first > start else last
    return stop - start if stop - start <= budget else 0


def round_down(position: int, block_size: int, spans: Sequence[BidirectionalSpan]) -> int:
    """Return the largest multiple of `block_size`, at most `position`, that cuts no span."""
    position -= position % block_size
    for first, last in reversed(spans):
        if first < position < last:
            position = first - first % block_size
    return position
