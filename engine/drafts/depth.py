"""Chooses how many guesses a step verifies: what they are expected to save against what their rows are measured to cost."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

STEP_COSTS: Mapping[str, tuple[float, ...]] = {
    "amx": (1.0, 1.0, 1.0, 1.0, 1.02, 1.05, 1.08, 1.1, 1.12, 1.14, 1.16, 1.18, 1.2, 1.22, 1.25, 1.3),
    "avx512_bf16": (1.0, 1.02, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.45, 1.6, 1.75, 1.9, 2.05, 2.2, 2.35, 2.5),
    "avx512": (1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.3, 2.4, 2.6),
    "": (1.0, 1.2, 1.45, 1.8, 2.2, 2.6, 3.0, 3.4, 3.8, 4.2, 4.6, 5.0, 5.4, 5.8, 6.2, 6.6),
}
"""Cost of a step of 1 to 16 rows relative to one row, by instruction set; "" is AVX2, NEON and others. They are for machines
on which rows are not measured (`kernels/measure.py`). What steps take replaces these values (`StepCosts`). Source:
benchmarks/README.md, products with weights that are in no cache."""
_KEEP = 512  # steps after which a measured cost is forgotten, so that a number of rows that was slow once is tried again
_WEIGHT = 0.1  # of a new measurement, once there are ten
_MAX_ROWS = 64  # larger steps are not measured
_DECAY = 0.98  # of acceptance counts, per observation
_STRENGTH = 4.0  # observations that the acceptance rate of all requests counts for in that of one
_LEAST = 0.05  # guesses that survive less often are not verified
_MOST = 64  # guesses of a step
_FIRST_RATES = (0.15, 0.3, 0.4, 0.5, 0.65, 0.8, 0.9)
_GIVEN_RATES = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.95)
_GIVEN = ("text", "hypothesis")
"""Acceptance before anything was observed, by the bucket of `_bucket`; of proposers that follow what the answer should be."""


@dataclass
class _Cost:
    seconds: float
    step: int  # when it was measured last
    count: int = 0  # measurements after the first


class StepCosts:
    """Seconds of a step by its number of rows: running means of the steps that decoded only, and in between the table's ratios.

    Args:
        table: cost of a step of 1, 2, ... rows relative to one row.
    """

    def __init__(self, table: Sequence[float]) -> None:
        self._table, self._measured, self._num_steps = table, dict[int, _Cost](), 0

    def observe(self, rows: int, seconds: float) -> None:
        """Record a step. A step that took far more or less than those before counts as twice or half of them."""
        self._num_steps += 1
        if not 0 < rows <= _MAX_ROWS or seconds <= 0:
            return
        cost = self._measured.get(rows)
        if cost is None or self._num_steps - cost.step > _KEEP:
            # the first step of a shape allocates and records: it counts no more than the table says
            expected = self.seconds(rows) if any(rows != other for other in self._measured) else seconds
            self._measured[rows] = _Cost(min(seconds, expected), self._num_steps)
            return
        cost.count += 1  # the second measurement replaces the first, so that few steps tell what drafts really cost
        bounded = min(max(seconds, cost.seconds / 2), cost.seconds * 2)
        cost.seconds += max(_WEIGHT, 1 / cost.count) * (bounded - cost.seconds)
        cost.step = self._num_steps

    def seconds(self, rows: int) -> float:
        """Return the expected seconds of a step; without any measurement, its cost relative to one row."""
        cost = self._measured.get(rows)
        if cost is not None and self._num_steps - cost.step <= _KEEP:
            return cost.seconds
        measured = [other for other in self._measured if other != rows]
        if not measured:
            return self._ratio(rows)
        nearest = min(measured, key=lambda other: (abs(other - rows), other))
        return self._measured[nearest].seconds * self._ratio(rows) / self._ratio(nearest)

    def _ratio(self, rows: int) -> float:
        """Return the table's value; beyond its end, it goes on with its mean slope."""
        last = len(self._table)
        if rows <= last:
            return self._table[rows - 1]
        return self._table[-1] + (rows - last) * (self._table[-1] - self._table[0]) / max(1, last - 1)


class AcceptanceRates:
    """How often guesses are right, by proposer and by how many tokens before them agree with their source.

    Every sampled token is compared with what was proposed for it, verified or not, so nothing has to be tried to be known.
    `parent`: rates that these start from.
    """

    def __init__(self, parent: AcceptanceRates | None = None) -> None:
        self._parent = parent
        self._counts: dict[tuple[Hashable, int], list[float]] = {}  # right, all

    def observe(self, name: str, matched: int, is_right: bool) -> None:
        counts = self._counts.setdefault((name, _bucket(matched)), [0.0, 0.0])
        counts[0] = counts[0] * _DECAY + is_right
        counts[1] = counts[1] * _DECAY + 1
        if self._parent is not None:
            self._parent.observe(name, matched, is_right)

    def rate(self, name: str, matched: int) -> float:
        """Return the probability that the guess after `matched` agreeing tokens is right."""
        if self._parent is None:
            first = (_GIVEN_RATES if name in _GIVEN else _FIRST_RATES)[_bucket(matched)]
        else:
            first = self._parent.rate(name, matched)
        right, tried = self._counts.get((name, _bucket(matched)), (0.0, 0.0))
        return (right + _STRENGTH * first) / (tried + _STRENGTH)

    def survival(self, name: str, matched: int, count: int) -> list[float]:
        """Return the probability that the first guess is right, the first two, and so on."""
        survival, values = 1.0, []
        for position in range(count):
            survival *= self.rate(name, matched + position)
            values.append(survival)
        return values


def _bucket(matched: int) -> int:
    """Return 0 for 0 tokens, 1 for 1, 2 for 2 and 3, 3 for 4 to 7, and so on."""
    return min(matched.bit_length(), len(_FIRST_RATES) - 1)


@dataclass
class Slot:
    """The guesses of one sequence in a step.

    Args:
        survival: see AcceptanceRates.
        repeats: the sequence has states, so the accepted tokens of a step with a wrong guess are rows of the next step again.
        depth: how many to verify.
    """

    survival: Sequence[float]
    repeats: bool = False
    depth: int = field(default=0)

    def repeated_rows(self, depth: int) -> float:
        """Return how many more rows the next step is expected to have."""
        return sum((1.0, *self.survival)[:depth]) - depth * self.survival[depth - 1] if self.repeats and depth else 0.0


def choose_depths(slots: Sequence[Slot], num_sequences: int, rows: int, costs: StepCosts) -> None:
    """Set the depths that give the most tokens per second. The likeliest guesses of all sequences come first.

    Args:
        num_sequences: sequences that get a token in this step. rows: rows of the step without guesses.
    """
    steps = sorted(((gain, -i) for i, slot in enumerate(slots) for gain in slot.survival if gain >= _LEAST), reverse=True)
    expected, best, taken = float(num_sequences), num_sequences / costs.seconds(rows), 0
    depths, repeated = [0] * len(slots), 0.0
    for count, (gain, index) in enumerate(steps[:_MOST], start=1):
        expected += gain
        depth = depths[-index] = depths[-index] + 1
        repeated += slots[-index].repeated_rows(depth) - slots[-index].repeated_rows(depth - 1)
        speed = expected / costs.seconds(rows + count + round(repeated))
        if speed > best:
            best, taken = speed, count
    for _, index in steps[:taken]:
        slots[-index].depth += 1


def choose_depth(survival: Sequence[float], rows: int, costs: StepCosts, token_seconds: float) -> int:
    """Return how many guesses to verify in a step that has to compute a prompt anyway: those that cost less than they save.

    Args:
        survival: see AcceptanceRates.
        rows: rows of the step without guesses.
        token_seconds: what a guess that is right saves.
    """
    gains = [gain for gain in survival if gain >= _LEAST]
    prices = [costs.seconds(rows + count) - costs.seconds(rows) for count in range(1, len(gains) + 1)]
    saved = [total * token_seconds - price for total, price in zip(accumulate(gains), prices, strict=True)]
    return max(range(len(saved) + 1), key=lambda depth: saved[depth - 1] if depth else 0.0)
