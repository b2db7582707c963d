"""Answers that go round in a circle: finding the loop, and what to forbid so that it does not come back. Knows no scheduler.

How to use it: after every token, `find_loop(request.token_ids, request.turn_start, detection)`. Where it finds a loop, the
answer ends with finish_reason "repetition"; with `repair`, and while fewer than `max_repairs` loops were taken back in this
answer, it is rolled back to `loop.start` tokens instead (keys and values with it), `loop.forbidden` is added to the token
sequences that must not be completed, and generation goes on. No state is kept between calls: the tokens are the state.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from ..mm.errors import InputError

_MOST_REPEATED = 1 << 16  # tokens that a check may look at


@dataclass(frozen=True)
class RepetitionDetection:
    """When an answer counts as a loop, and what becomes of it.

    An answer is in a loop when its end is one cycle of at most `max_cycle` tokens, said at least `min_repeats` times in a row,
    over at least `min_tokens` tokens. The last time need not be complete.

    Args:
        max_cycle: tokens of the longest cycle looked for.
        min_repeats: times a cycle must be said; 2 or more.
        min_tokens: tokens a loop must cover; keeps short cycles (rules of dashes, zeros, empty cells) from being one too soon.
        repair: roll the answer back to where the loop began, forbid the cycle for its rest, and go on.
        max_repairs: loops that are taken back in one answer; the next one ends it.

    Raises:
        InputError: a value outside its limits.
    """

    max_cycle: int = 128
    min_repeats: int = 4
    min_tokens: int = 32
    repair: bool = False
    max_repairs: int = 3

    def __post_init__(self) -> None:
        for name, least in {"max_cycle": 1, "min_repeats": 2, "min_tokens": 1, "max_repairs": 1}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
                raise InputError(f"repetition_detection.{name}={value!r} must be an integer, {least} or above")
        if not isinstance(self.repair, bool):
            raise InputError(f"repetition_detection.repair={self.repair!r} must be True or False")
        if max(self.max_cycle * self.min_repeats, self.min_tokens) > _MOST_REPEATED:
            raise InputError(f"repetition_detection looks at {_MOST_REPEATED} tokens at most; lower max_cycle or min_tokens")


@dataclass(frozen=True)
class Loop:
    """`cycle` is said over and over from token `start` of the sequence to its end."""

    start: int
    cycle: tuple[int, ...]

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Without this sequence the loop cannot come back: the cycle, or of a single token a second one after it."""
        return self.cycle if len(self.cycle) > 1 else self.cycle * 2


def find_loop(token_ids: Sequence[int], turn_start: int, detection: RepetitionDetection) -> Loop | None:
    """The loop that the answer `token_ids[turn_start:]` ends in, that of the shortest cycle; None where there is none.

    With max_cycle=3, min_repeats=3, min_tokens=6 the answer `5 1 2 1 2 1 2` is a loop of the cycle (1, 2) from its second
    token on: `1 2` is said three times, over six tokens. `1 2 1 2 1` is not one yet, and neither is `7 7 7`: that is too
    short. After `9 8 7 8 7 8 7 8`, the loop begins at the first 8 and its cycle is (8, 7).

    Costs one comparison per length of cycle while the last token is a new one, and looks at no more than
    `max(max_cycle * min_repeats, min_tokens)` tokens of an answer that is no loop.
    """
    end = len(token_ids)
    room = end - turn_start
    if room < detection.min_tokens:
        return None
    last = token_ids[-1]
    for size in range(1, min(detection.max_cycle, room // detection.min_repeats) + 1):
        if token_ids[-1 - size] != last:
            continue
        first = end - max(size * detection.min_repeats, detection.min_tokens)
        if token_ids[first : end - size] == token_ids[first + size :]:
            while first > turn_start and token_ids[first - 1] == token_ids[first - 1 + size]:
                first -= 1
            return Loop(first, tuple(token_ids[first : first + size]))
    return None
