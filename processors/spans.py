"""The one span builder: every slot of a prompt becomes its item's tokens. Knows no family, no media and no text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..mm.errors import InputError
from ..mm.types import PlaceholderRange
from .interface import Span


def expand(
    prompt_ids: Sequence[int],
    slots: Mapping[str, Sequence[Sequence[Span]]],
    slot_ids: Mapping[str, int],
    text_of: Callable[[int], str] = "token {}".format,
) -> tuple[tuple[int, ...], dict[str, list[list[PlaceholderRange]]]]:
    """Write each input's spans where its slot is; returns the tokens and, per modality and input, a range per span.

    Slots are found once, left to right: a run of exactly the next input's own tokens is one slot that is already
    expanded, otherwise each single slot token is one slot. Example: slot 9, an input of one span of 3 nines:
    [1, 9, 2] and [1, 9, 9, 9, 2] both give [1, 9, 9, 9, 2] with the range (1, 3). Text around a span is written with it.
    `text_of` says how an error calls a slot's token.

    Raises:
        InputError: more inputs than slots or more slots than inputs, by modality and index.
    """
    modality_of = {slot_ids[name]: name for name in slot_ids}
    ranges: dict[str, list[list[PlaceholderRange]]] = {name: [] for name in slots}
    out: list[int] = []
    joins: Mapping[tuple[int, int], int] = {}  # of the text that the last slot ended with
    position = taken = 0  # up to where the last slot reached
    while position < len(prompt_ids):
        token = prompt_ids[position]
        modality = modality_of.get(token)
        if modality is None:
            _join(out, (token,), joins)
            joins = {}
            position += 1
            continue
        spans = _next_input(modality, len(ranges.get(modality, ())), slots)
        start, taken = _slot(prompt_ids, position, taken, token, spans)
        del out[len(out) - (position - start) :]
        ranges[modality].append(_write(spans, out, whole=taken - start > 1))
        position, joins = taken, spans[-1].joins if taken - start == 1 else {}
    for modality, given in slots.items():
        used = len(ranges[modality])
        if used < len(given):
            raise InputError(
                f"{modality} {used}: the prompt has only {used} slot(s) for {len(given)} item(s); "
                f"write {text_of(slot_ids[modality])} once for each item, or ask with chat"
            )
    return tuple(out), ranges


def _write(spans: Sequence[Span], out: list[int], whole: bool) -> list[PlaceholderRange]:
    """`whole`: the prompt has the text around them already."""
    ranges: list[PlaceholderRange] = []
    for span in spans:
        if span.shared:
            ranges.append(PlaceholderRange(ranges[-1].offset, len(span.token_ids), span.is_embed))
            continue
        _join(out, () if whole else span.before, span.joins)
        ranges.append(PlaceholderRange(len(out), len(span.token_ids), span.is_embed))
        out.extend(span.token_ids)
        out.extend(() if whole else span.after)
    return ranges


def _join(out: list[int], tokens: Sequence[int], joins: Mapping[tuple[int, int], int]) -> None:
    """Write `tokens`, the first as one with the last that is there where `joins` has them."""
    joined = joins.get((out[-1], tokens[0])) if out and tokens else None
    if joined is not None:
        out[-1], tokens = joined, tokens[1:]
    out.extend(tokens)


def _next_input(modality: str, index: int, slots: Mapping[str, Sequence[Sequence[Span]]]) -> Sequence[Span]:
    given = slots.get(modality, ())
    if index >= len(given):
        raise InputError(
            f"{modality} {index}: the prompt has a slot for it but multi_modal_data holds {len(given)}; "
            "give one item per slot, or write the slot's token once for each item"
        )
    return given[index]


def _slot(prompt_ids: Sequence[int], position: int, taken: int, token: int, spans: Sequence[Span]) -> tuple[int, int]:
    """`[start, stop)` of the slot whose token is at `position`: all of the spans where they are already written out."""
    written = [one for span in spans if not span.shared for one in span.token_ids]
    if token in written:
        start = position - written.index(token)
        stop = start + len(written)
        beside = (start > 0 and written[0] == token == prompt_ids[start - 1]) or (
            stop < len(prompt_ids) and written[-1] == token == prompt_ids[stop]
        )
        if start >= taken and not beside and list(prompt_ids[start:stop]) == written:
            return start, stop
    return position, position + 1
