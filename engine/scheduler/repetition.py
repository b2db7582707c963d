"""Finds repetition loops at the end of an answer, and the token sequence to forbid so that a loop cannot come back.

The scheduler calls `find_loop(request.token_ids, request.turn_start, detection)` after every token. A loop ends the answer
with finish_reason "repetition". With `repair`, while fewer than `max_repairs` loops were rolled back in this answer, the
sequence is truncated to `loop.start` tokens instead, `loop.forbidden` is added to its bad words, and generation goes on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ..sampling_params import RepetitionDetectionParams


@dataclass(frozen=True)
class Loop:
    """`cycle` repeats from token `start` of the sequence to its end."""

    start: int
    cycle: tuple[int, ...]

    @property
    def forbidden(self) -> tuple[int, ...]:
        """The token sequence to forbid, so that the loop cannot come back: the cycle, or its only token twice."""
        return self.cycle if len(self.cycle) > 1 else self.cycle * 2


def find_loop(token_ids: Sequence[int], turn_start: int, detection: RepetitionDetectionParams) -> Loop | None:
    """Return the loop at the end of the answer `token_ids[turn_start:]`, with the shortest cycle; None if there is no loop.

    With max_cycle=3, min_repeats=3, min_tokens=6 the answer `5 1 2 1 2 1 2` is a loop of the cycle (1, 2) from its second
    token on: `1 2` appears three times, over six tokens. `1 2 1 2 1` is not one yet. `7 7 7` is too short. After
    `9 8 7 8 7 8 7 8`, the loop begins at the first 8 and its cycle is (8, 7).

    Costs one comparison per cycle length while the last token is new to the answer, and reads at most
    `max(max_cycle * min_repeats, min_tokens)` tokens of an answer without a loop.
    """
    end = len(token_ids)
    room = end - turn_start
    if room < detection.min_tokens:
        return None
    last, data = token_ids[-1], b""
    for size in range(1, min(detection.max_cycle, room // detection.min_repeats) + 1):
        if token_ids[-1 - size] != last:
            continue
        if not data:  # bytes are copied and compared much faster than lists
            most = max(detection.max_cycle * detection.min_repeats, detection.min_tokens)
            data = array("i", token_ids[-most:]).tobytes()
        covered = max(size * detection.min_repeats, detection.min_tokens)
        first, start = end - covered, len(data) - 4 * covered
        if data[start : -4 * size] == data[start + 4 * size :]:
            while first > turn_start and token_ids[first - 1] == token_ids[first - 1 + size]:
                first -= 1
            return Loop(first, tuple(token_ids[first : first + size]))
    return None
