"""Bidirectional spans: runs of prompt tokens that attend to each other and therefore must be computed in one step.

A model family declares how the tokens of a prompt attend to each other (`ProcessingInfo.prompt_attention`):

- "causal": every token sees the tokens before it. A prompt can be cut after any token.
- "bidirectional_items": adjacent tokens of one item see each other (images of Gemma 3). Each run of them is a span.
- "bidirectional_ranges": the same, with the start and the end token of the item (BAGEL). Each item's range is a span.
- "bidirectional_windows": as "bidirectional_items", except for audio, but only in layers with a sliding window (Gemma 4).
- "bidirectional_media": the tokens of all images and videos see each other, whatever text is between them (Molmo2). If there is
  any, the span reaches from the start of the prompt to the end of the last item (`worker/key_order.py` says why).
- "bidirectional_prompt": all tokens of the prompt see each other (the prefix-LM of PaliGemma). The prompt is one span.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..mm.embeddings import PROMPT_EMBEDS
from ..mm.types import MultiModalFeature

BidirectionalSpan = tuple[int, int]  # tokens [start, stop)
BRACKETS = 2  # start and end token of an item in a bidirectional range; they are not encoder rows


def find_spans(prompt_attention: str, prompt_length: int, features: Sequence[MultiModalFeature]) -> list[BidirectionalSpan]:
    """Return the spans of a sequence in order. `prompt_length`: number of tokens that the sequence began with."""
    if prompt_attention in ("bidirectional_items", "bidirectional_windows"):
        causal = (PROMPT_EMBEDS, "audio") if prompt_attention == "bidirectional_windows" else (PROMPT_EMBEDS,)
        return [run for feature in features if feature.modality not in causal for run in feature.range.runs]
    if prompt_attention == "bidirectional_ranges":
        ranges = (one.range for one in features if one.modality != PROMPT_EMBEDS)
        return list(dict.fromkeys((where.offset, where.end) for where in ranges))
    if prompt_attention == "bidirectional_media":
        runs = media_runs(features)
        return runs if len(runs) < 2 else [(0, runs[-1][1])]
    return [(0, prompt_length)] if prompt_attention == "bidirectional_prompt" else []


def media_runs(features: Sequence[MultiModalFeature]) -> list[tuple[int, int]]:
    """Return the runs of adjacent tokens of items, `[first, last)` in order. Runs of different items that touch are one run."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(run for one in features if one.modality != PROMPT_EMBEDS for run in one.range.runs):
        touches = bool(joined) and joined[-1][1] == first
        joined[-1 if touches else len(joined) :] = [(joined[-1][0] if touches else first, last)]
    return joined


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
