"""The one span builder: every slot of a prompt becomes its item's tokens. Knows no family, no media and no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..mm.errors import InputError
from ..mm.types import PlaceholderRange
from .interface import Span


def expand(
    prompt_ids: Sequence[int], spans: Mapping[str, Sequence[Span]], slot_ids: Mapping[str, int]
) -> tuple[tuple[int, ...], dict[str, list[PlaceholderRange]]]:
    """Write each item's span where its slot is; returns the tokens and, per modality, the ranges in item order.

    Slots are found once, left to right: a run of exactly the next item's own tokens is one slot that is already
    expanded, otherwise each single slot token is one slot. Example: slot 9, a span of 3 nines:
    [1, 9, 2] and [1, 9, 9, 9, 2] both give [1, 9, 9, 9, 2] with the range (1, 3).

    Raises:
        InputError: more items than slots or more slots than items, by modality and index.
    """
    modality_of = {slot_ids[name]: name for name in slot_ids}
    used = dict.fromkeys(slot_ids, 0)
    ranges: dict[str, list[PlaceholderRange]] = {name: [] for name in spans}
    out: list[int] = []
    position = 0
    while position < len(prompt_ids):
        token = prompt_ids[position]
        modality = modality_of.get(token)
        if modality is None:
            out.append(token)
            position += 1
            continue
        span = _next_span(modality, used[modality], spans)
        used[modality] += 1
        ranges[modality].append(PlaceholderRange(len(out), len(span.token_ids), span.is_embed))
        out.extend(span.token_ids)
        position += _slot_length(prompt_ids, position, token, span)
    for modality, given in spans.items():
        if used[modality] < len(given):
            raise InputError(
                f"{modality} {used[modality]}: the prompt has only {used[modality]} slot(s) for {len(given)} item(s)"
            )
    return tuple(out), ranges


def _next_span(modality: str, index: int, spans: Mapping[str, Sequence[Span]]) -> Span:
    given = spans.get(modality, ())
    if index >= len(given):
        raise InputError(
            f"{modality} {index}: the prompt has a slot for it but multi_modal_data holds {len(given)}; "
            "give one item per slot, or write the slot's token once for each item"
        )
    return given[index]


def _slot_length(prompt_ids: Sequence[int], position: int, token: int, span: Span) -> int:
    """Prompt tokens that the slot at `position` takes: the whole span where it is already written out, else 1."""
    stop = position + len(span.token_ids)
    if span.token_ids[0] != token or (position > 0 and prompt_ids[position - 1] == token):
        return 1
    whole = tuple(prompt_ids[position:stop]) == span.token_ids and (stop >= len(prompt_ids) or prompt_ids[stop] != token)
    return len(span.token_ids) if whole else 1
