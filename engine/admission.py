"""What a step may hold, and what could never run and is refused: lengths, items, atoms, encoder sides. Knows no queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ..mm.errors import InputError
from ..mm.types import MultiModalFeature
from .atoms import Atom


@dataclass(frozen=True)
class SchedulerLimits:
    """What one step may hold, and how prompts may be cut.

    Args:
        max_num_seqs: sequences with blocks at once.
        max_num_batched_tokens: rows of a step. At least one prefill atom and a row for every other sequence.
        max_model_len: tokens of a sequence.
        max_encoder_tokens: rows that encoders make in a step; an item of more is encoded alone.
        prefill: "causal", cut anywhere; "item_atomic", a run of an item's rows is computed together; "prompt_atomic", the
            whole prompt is.
        prefix_caching: blocks of equal beginnings are shared.
        encode_beside: encoder rows are made beside steps, and read in later ones.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_encoder_tokens: int = 1 << 30
    prefill: str = "causal"
    prefix_caching: bool = True
    encode_beside: bool = False


def check_length(length: int, limit: int) -> None:
    """InputError for a prompt without tokens, or without room for one more."""
    if length == 0:
        raise InputError("the prompt has no tokens; give at least one")
    if length >= limit:
        raise InputError(f"prompt has {length} tokens, max_model_len is {limit}: shorten it or raise max_model_len")


def check_features(features: Sequence[MultiModalFeature], start: int, stop: int) -> None:
    """InputError unless the items lie in order, apart, inside the tokens `[start, stop)`, as long as their grids say.

    Two may share a range, where no token stands for rows of both.
    """
    alone = None  # the item before, if it has its range for itself
    for index, feature in enumerate(features):
        shared = alone is not None and alone.range.shares(feature.range)
        if not shared and (feature.range.offset < start or feature.range.end > stop):
            where = f"[{feature.range.offset}, {feature.range.end})"
            raise InputError(f"{feature.modality} {index}: its tokens {where} are not inside [{start}, {stop})")
        rows, slots = feature.geometry.num_embeds, feature.range.num_embeds
        if rows != slots:
            raise InputError(f"{feature.modality} {index}: {slots} placeholder tokens stand for {rows} encoder rows")
        start, alone = feature.range.end, None if shared else feature


def check_cross(rows: int, capacity: int, takes_cross: bool) -> None:
    """InputError unless the encoder side is there where the model reads one, and the key/value cache can hold it."""
    if takes_cross != (rows > 0):
        wanted = "needs" if takes_cross else "has no place for"
        raise InputError(f"this model {wanted} an encoder side, from which the answer is read")
    if rows > capacity:
        raise InputError(f"the encoder side has {rows} rows, the key/value cache holds {capacity}; raise kv_cache_memory_bytes")


def check_atoms(
    parts: Sequence[Atom], features: Sequence[MultiModalFeature], cross_rows: int, room: int, most_rows: int
) -> None:
    """InputError for tokens that have to be computed together and never could be.

    Args:
        parts: prefill atoms.
        cross_rows: of the encoder side, which the first step may have to read beside any item.
        room: tokens of one step. most_rows: that the encoder cache holds.
    """
    for first, last in parts:
        if last - first > room:
            reason = f"{last - first} tokens have to be computed at once, a step has room for {room}"
            raise InputError(f"{reason}; raise max_num_batched_tokens")
    for first, last in (*parts, *_read_at_once(features, cross_rows > 0)):
        inside = {f.hash: f.range.num_embeds for f in features if f.range.offset < last and f.range.end > first}
        rows = sum(inside.values()) + cross_rows
        if rows > most_rows:
            raise InputError(
                f"{rows} encoder rows are needed at once, there is room for {most_rows}; raise encoder_cache_bytes"
            )


def _read_at_once(features: Sequence[MultiModalFeature], every: bool) -> list[Atom]:
    """Ranges whose rows have to be there together with others: those that two items share, or `every` one."""
    ranges = Counter((feature.range.offset, feature.range.end) for feature in features)
    return [where for where, items in ranges.items() if every or items > 1]
