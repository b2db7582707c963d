"""Greedy decoding of rows of connectionist temporal classification (CTC) one after the other, under rules for logits.

Source: Graves et al., "Connectionist temporal classification", ICML 2006: runs of equal tokens are one token, and blanks none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..interface import LogitsRule


@dataclass(frozen=True)
class CtcToken:
    """A token of `count` rows from `first` on. `total`: the sum of its log probabilities."""

    token: int
    first: int
    count: int
    total: float

    def row(self) -> tuple[int, int, int, float]:
        """Return the token, its first row, its number of rows, and its mean log probability."""
        return self.token, self.first, self.count, self.total / self.count


@dataclass(frozen=True)
class CtcState:
    """The decoding of an item's rows so far.

    Args:
        last: token of the last row.
    """

    blank: int
    tokens: tuple[CtcToken, ...] = ()
    num_rows: int = 0
    last: int | None = None


def decode_ctc(logprobs: Tensor, before: CtcState, rule: LogitsRule | None) -> CtcState:
    """Return the state after more rows, float32 `[rows, vocab]`.

    The rule applies to tokens that a row would begin: neither to the blank nor to the token that the row before it has.
    """
    found, last = list(before.tokens), before.last
    answer = [entry.token for entry in found]
    for number, row in enumerate(logprobs, before.num_rows):
        scores = row.clone()
        if rule is not None:
            rule(answer, scores)
        goes_on = [before.blank] if last is None else [before.blank, last]
        scores[goes_on] = row[goes_on]
        token = int(scores.argmax())
        if token not in goes_on:
            found.append(CtcToken(token, number, 1, float(row[token])))
            answer.append(token)
        elif token != before.blank:
            entry = found[-1]
            found[-1] = replace(entry, count=entry.count + 1, total=entry.total + float(row[token]))
        last = token
    return CtcState(before.blank, tuple(found), before.num_rows + len(logprobs), last)
