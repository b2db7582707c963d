"""The limits of a step, and checks that refuse requests which could never run within them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ...callers.errors import InputError, MediaError
from ...mm.rules import CAUSAL, PromptAttention
from ...mm.types import MultiModalFeature, item_index
from ..bidirectional_spans import BidirectionalSpan


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of one step, and rules for cutting prompts into chunks.

    Args:
        max_num_seqs: running sequences.
        max_num_batched_tokens: tokens of a step; it needs room for a bidirectional span and a token of every other sequence.
        max_model_len: tokens of a sequence.
        max_encoder_tokens: encoder rows computed in a step; a larger item is encoded alone.
        prompt_attention: how the tokens of a prompt attend to each other.
        prefix_caching: share blocks between sequences with equal prefixes.
        encode_beside: encoder calls run in parallel to steps; later steps read their rows.
        max_chunk: tokens of one sequence in a step.
        max_cross_rows: encoder rows that one sequence reads by cross-attention, if several items make them.
        max_step_cross_rows: encoder rows that the sequences of a step write to the caches of cross-attention.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_encoder_tokens: int = 1 << 30
    prompt_attention: PromptAttention = CAUSAL
    prefix_caching: bool = True
    encode_beside: bool = False
    max_chunk: int = 1 << 30
    max_cross_rows: int = 1 << 30
    max_step_cross_rows: int = 1 << 30


def check_length(length: int, limit: int, answer: int = 1) -> None:
    """Raise InputError for a prompt without tokens, or without room for `answer` more."""
    if length == 0:
        raise InputError("the prompt has no tokens; give at least one")
    if length + answer > limit:
        reason = f"the prompt has {length} tokens, but <<max_model_len>> is {limit}; shorten it or raise <<max_model_len>>"
        raise InputError(reason, code="too_long", limit=limit - answer, value=length)


def check_features(features: Sequence[MultiModalFeature], start: int, stop: int) -> None:
    """Raise InputError unless the items are in order, disjoint, inside `[start, stop)`, and as long as their grids say.

    Two items may share a range if no token stands for a row of both.
    """
    unshared = None  # the previous item, unless it already shares its range
    for index, feature in enumerate(features):
        shared = unshared is not None and unshared.range.shares(feature.range)
        if not shared and (feature.range.offset < start or feature.range.end - feature.geometry.ahead > stop):
            where = f"[{feature.range.offset}, {feature.range.end})"
            raise MediaError(*item_index(features, index), f"its tokens {where} are not inside [{start}, {stop})")
        rows, slots = feature.geometry.num_embeds, feature.range.num_embeds
        if rows != slots:
            raise MediaError(*item_index(features, index), f"{slots} placeholder tokens stand for {rows} encoder rows")
        start, unshared = feature.range.end, None if shared else feature


def check_cross(rows: int, capacity: int, has_cross_attention: bool, optional: bool = False) -> None:
    """Raise InputError for a missing, unexpected or too large encoder input. Only models with cross-attention have one."""
    if has_cross_attention and not rows and not optional:
        raise InputError("this model needs an encoder input to answer from; add the item to the prompt", code="unsupported")
    if rows and not has_cross_attention:
        raise InputError("this model has no cross-attention and takes no encoder input; leave it out", code="unsupported")
    if rows > capacity:
        reason = f"the encoder input has {rows} rows, but the KV cache holds {capacity}; raise <<kv_cache_memory_bytes>>"
        raise InputError(reason, code="too_long", limit=capacity, value=rows)


def check_cross_items(items: Sequence[MultiModalFeature], max_rows: int, max_encoder_rows: int) -> None:
    """Raise InputError for more items of the encoder input than fit.

    Args:
        max_rows: SchedulerLimits.max_cross_rows.
        max_encoder_rows: rows that the encoder cache holds; it needs those of all items at once.
    """
    if len(items) < 2:
        return
    rows = sum(item.range.num_embeds for item in items)
    what = f"the {len(items)} {items[0].modality}s of the prompt have {rows} encoder rows"
    if rows > max_rows:
        advice = f"give fewer, or raise limit_mm_per_prompt[{items[0].modality!r}] or <<max_model_len>>"
        raise InputError(f"{what}, but there is room for {max_rows}; {advice}", code="too_long", limit=max_rows, value=rows)
    at_once = sum({item.hash: item.range.num_embeds for item in items}.values())
    if at_once > max_encoder_rows:
        reason = f"{what}, {at_once} of them different, but the encoder cache holds {max_encoder_rows}"
        reason = f"{reason}; give fewer, or raise <<encoder_cache_bytes>>"
        raise InputError(reason, code="too_long", limit=max_encoder_rows, value=at_once)


def check_spans(
    spans: Sequence[BidirectionalSpan],
    features: Sequence[MultiModalFeature],
    cross_rows: int,
    max_tokens: int,
    max_rows: int,
) -> None:
    """Raise InputError for tokens that have to be computed together but never fit into one step.

    Args:
        spans: bidirectional spans of the sequence.
        cross_rows: rows of the encoder input, which the first step may need together with any item.
        max_tokens: tokens that a step has room for.
        max_rows: rows that the encoder cache holds.
    """
    for first, last in spans:
        if last - first > max_tokens:
            reason = f"{last - first} tokens have to be computed at once, but a step has room for {max_tokens}"
            reason = f"{reason}; raise <<max_num_batched_tokens>>"
            raise InputError(reason, code="too_long", limit=max_tokens, value=last - first)
    ranges = Counter((feature.range.offset, feature.range.end) for feature in features)
    read_together = [where for where, num_items in ranges.items() if cross_rows or num_items > 1]
    for first, last in (*spans, *read_together):
        inside = {f.hash: f.range.num_embeds for f in features if f.range.offset < last and f.range.end > first}
        rows = sum(inside.values()) + cross_rows
        if rows > max_rows:
            reason = f"{rows} encoder rows are needed at once, but there is room for {max_rows}; raise <<encoder_cache_bytes>>"
            raise InputError(reason, code="too_long", limit=max_rows, value=rows)
