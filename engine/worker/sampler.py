"""Logits to tokens, for all rows of a step at once. Knows no model and no scheduler.

The order is the field's: the caller's own processors, the grammar, bad words, min_tokens, logit_bias, penalties, then
temperature, min_p, top_k, top_p. Log probabilities are those of the untouched logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.sampling import NOT_FINITE as ODD
from ..kernels.sampling import NOTHING_LEFT, log_probs, penalise_
from ..kernels.sampling import draw as draw_tokens
from ..mm.errors import InputError
from .draw import draw, likeliest
from .logits_processors import apply_processors
from .sample_row import SampleRow
from .staging import Place, fetch
from .types import Logprob

NOT_FINITE = "the model's logits are not finite (NaN or infinity) for this prompt; change it, or serve with a wider dtype"
_NO_TOKEN = "no token is allowed: bad_words, min_tokens, the grammar or a logits processor leave none"
_NOT_FINITE_AFTER = "logits are not finite (NaN or infinity) after logits_processors"
_RAW = 3  # beside what `kernels.sampling` finds wrong
_WRONG = {NOTHING_LEFT: _NO_TOKEN, ODD: _NOT_FINITE_AFTER, _RAW: NOT_FINITE}
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Sampled:
    """A token, and its log probabilities where they were asked for."""

    token: int
    logprobs: dict[int, Logprob] | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow], place: Place = torch.from_numpy) -> list[Sampled | Exception]:
    """One token per row of float32 `[rows, vocab]`, or the error of that row alone.

    A row's token depends on its own logits, parameters, seed and tokens only. `logits` may be overwritten.
    `place`: an array to where the logits are.
    """
    if logits.device.type != "cpu":
        return sample_together(logits, rows, place).read()
    best = logits.amax(-1).isfinite()  # NaN is the largest of all
    errors: dict[int, Exception] = {} if best.all() else _errors(~best, NOT_FINITE)
    if all(row.plain for row in rows):
        return [errors.get(i) or Sampled(token) for i, token in enumerate(likeliest(logits))]
    raw = logits.clone() if any(row.params.logprobs is not None for row in rows) else logits
    changing = [i for i, row in enumerate(rows) if row.constrained and i not in errors]
    if changing:
        errors = constrain(logits, rows, changing) | errors
    for i in errors:
        logits[i] = 0.0  # drawn and thrown away
    chosen = choose(logits, rows)
    entries = _row_logprobs(raw, chosen, rows, errors)
    return [errors.get(i) or Sampled(*found) for i, found in enumerate(zip(chosen, entries, strict=True))]


@dataclass(frozen=True, eq=False)
class Sampling:
    """Rows that are being sampled on their device.

    Args:
        tokens: int64 `[rows]`, there.
        coming: waits for all that is read: tokens, what is wrong, and for those of `logged` log probability, rank, and the
            likeliest tokens with their log probabilities.
        errors: of rows that failed before.
        logged: rows whose log probabilities are wanted, and of how many tokens.
    """

    tokens: Tensor
    coming: Callable[[], list[float]]
    errors: Mapping[int, Exception]
    logged: Mapping[int, int]

    def read(self) -> list[Sampled | Exception]:
        """Wait for the device; as `sample`."""
        numbers, rows = self.coming(), len(self.tokens)
        size = (len(numbers) - 2 * rows) // max(1, len(self.logged)) or 1
        tokens, wrong = ([int(number) for number in numbers[first : first + rows]] for first in (0, rows))
        entries = _entries(tokens, self.logged, [numbers[i : i + size] for i in range(2 * rows, len(numbers), size)])
        failed: dict[int, Exception] = dict(self.errors)
        for i, kind in enumerate(wrong):
            if kind == _RAW or (kind and i not in failed):
                failed[i] = InputError(_WRONG[kind])
        return [failed.get(i) or Sampled(token, entries.get(i)) for i, token in enumerate(tokens)]


def sample_together(logits: Tensor, rows: Sequence[SampleRow], place: Place = torch.from_numpy, ahead: int = 0) -> Sampling:
    """As `sample`, on any device and without a look at the numbers there.

    `ahead`: tokens that the device knows of each sequence and the rows do not; then none of them may be `constrained`.
    """
    finite = logits.amax(-1).isfinite()  # NaN is the largest of all
    logged = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    changing = [i for i, row in enumerate(rows) if row.constrained]
    raw = logits.clone() if logged and changing else logits
    errors = _process(logits, rows, changing)
    words = _words(logits, rows, [i for i in changing if i not in errors], errors)
    rest = [i for i in changing if i not in errors]
    apply_constraints(logits, rows, rest)
    apply_penalties(logits, rows, [i for i in rest if rows[i].params.penalised])
    rules = place(np.array([_rules(row, ahead) for row in rows]))
    tokens, wrong = draw_tokens(logits, rules, words)
    read = [tokens.double(), torch.where(finite, wrong, _RAW).double()]
    if logged:
        read.append(_logprob_numbers(raw, tokens, logged, place).flatten())
    return Sampling(tokens, fetch(torch.cat(read)), errors, logged)


def _rules(row: SampleRow, ahead: int) -> tuple[float, ...]:
    """What `kernels.sampling.draw` is told of a row."""
    p = row.params
    if p.greedy:
        return 0.0, 0, 1.0, -math.inf, 0.0
    least = math.log(p.min_p) if p.min_p else -math.inf
    return p.temperature, max(0, p.top_k), p.top_p, least, uniform_number(row.seed, len(row.token_ids) + ahead)


def _words(logits: Tensor, rows: Sequence[SampleRow], changing: Sequence[int], errors: dict[int, Exception]) -> Tensor | None:
    """What the grammars of the rows allow, a bit for each token; None where no row has one. `errors` grows."""
    bits = None
    for i in changing:
        if rows[i].params.structured_outputs is not None:
            if bits is None:
                bits = np.full((len(rows), -(-logits.shape[1] // 32) * 4), 255, dtype=np.uint8)
            try:
                own = np.packbits(rows[i].allowed(logits.shape[1]), bitorder="little")
            except InputError as error:
                errors[i] = error
            else:
                bits[i, : len(own)] = own
    return None if bits is None else torch.from_numpy(bits).view(torch.int32).to(logits.device)


def _entries(
    tokens: Sequence[int], logged: Mapping[int, int], numbers: Sequence[Sequence[float]]
) -> dict[int, dict[int, Logprob]]:
    """By row, of what `_logprob_numbers` gives."""
    entries: dict[int, dict[int, Logprob]] = {}
    for (i, count), (own, rank, *best) in zip(logged.items(), numbers, strict=True):
        half = len(best) // 2
        entries[i] = {tokens[i]: Logprob(own, int(rank))}
        for place, (token, value) in enumerate(zip(best[:count], best[half:], strict=False), start=1):
            entries[i].setdefault(int(token), Logprob(value, place))
    return entries


def _logprob_numbers(raw: Tensor, tokens: Tensor, logged: Mapping[int, int], place: Place = torch.from_numpy) -> Tensor:
    """float64 `[logged, 2 + 2 * most]`: log probability and rank of the token, the likeliest tokens, theirs."""
    who = place(np.array(list(logged)))
    part = raw if len(who) == len(raw) else raw.index_select(0, who)
    own, ranks, totals = log_probs(part, tokens.index_select(0, who))
    best = part.topk(min(max(logged.values()), part.shape[1]), -1)
    values = best.values.float() - totals[:, None]
    return torch.cat((own[:, None].double(), ranks[:, None].double(), best.indices.double(), values.double()), 1)


def constrain(logits: Tensor, rows: Sequence[SampleRow], changing: Sequence[int]) -> dict[int, Exception]:
    """All rules before the temperature, in place, for the rows `changing`; the errors of those that failed."""
    errors = _process(logits, rows, changing)
    errors |= _mask(logits, rows, [i for i in changing if i not in errors])
    rest = [i for i in changing if i not in errors]
    apply_constraints(logits, rows, rest)
    apply_penalties(logits, rows, [i for i in rest if rows[i].params.penalised])
    best = logits.amax(-1)
    errors = _errors(best == -torch.inf, _NO_TOKEN) | errors
    return _errors(best.isnan() | (best == torch.inf), _NOT_FINITE_AFTER) | errors


def _errors(rows: Tensor, text: str) -> dict[int, Exception]:
    """The same for each row that is marked."""
    return {i: InputError(text) for i in rows.nonzero().flatten().tolist()}


def _process(logits: Tensor, rows: Sequence[SampleRow], changing: Sequence[int]) -> dict[int, Exception]:
    """The callers' own processors."""
    errors: dict[int, Exception] = {}
    who, made = [], []
    for i in changing:
        if rows[i].params.logits_processors:
            try:
                made.append(rows[i].processors)
                who.append(i)
            except InputError as error:
                errors[i] = error
    if who:
        part = logits[who]
        failed = apply_processors(made, [rows[i].answer for i in who], part)
        logits[who] = part
        errors |= {who[k]: error for k, error in failed.items()}
    return errors


def _mask(logits: Tensor, rows: Sequence[SampleRow], changing: Sequence[int]) -> dict[int, Exception]:
    """What the grammars of the rows forbid."""
    errors: dict[int, Exception] = {}
    for i in changing:
        row = rows[i]
        if row.params.structured_outputs is None:
            continue
        try:
            allowed = row.allowed(logits.shape[1])
        except InputError as error:
            errors[i] = error
            continue
        logits[i].masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)
    return errors


def apply_constraints(logits: Tensor, rows: Sequence[SampleRow], changing: Sequence[int]) -> None:
    """Forbid bad words and early ends, then add biases; in place."""
    banned = [(i, token) for i in changing for token in rows[i].banned()]
    if banned:
        index = torch.tensor(banned, device=logits.device)  # [n, 2]
        logits[index[:, 0], index[:, 1]] = -torch.inf
    biases = [(i, token, bias) for i in changing for token, bias in (rows[i].params.logit_bias or {}).items()]
    if biases:
        who, token, bias = zip(*biases, strict=True)
        logits[list(who), list(token)] += torch.tensor(bias, device=logits.device)


def apply_penalties(logits: Tensor, rows: Sequence[SampleRow], changing: Sequence[int]) -> None:
    """Repetition over prompt and answer, presence and frequency over the answer; in place, for the tokens they hold only."""
    if not changing:
        return
    counts = [rows[i].counts() for i in changing]
    who = np.repeat(np.array(changing), [len(ids) for ids, _ in counts])
    tokens, answer = (np.concatenate(parts) for parts in zip(*counts, strict=True))
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = np.array([[getattr(row.params, name) for name in names] for row in rows], dtype=np.float32)
    penalise_(logits, *(torch.from_numpy(part).to(logits.device) for part in (who, tokens, answer, penalties)))


def choose(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The likeliest token of greedy rows, a drawn one of the others."""
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    tokens = likeliest(logits) if len(drawn) < len(rows) else [0] * len(rows)
    if drawn:
        numbers = [uniform_number(rows[i].seed, len(rows[i].token_ids)) for i in drawn]
        part = logits[drawn] if len(drawn) < len(rows) else logits
        for i, token in zip(drawn, draw(part, [rows[i].params for i in drawn], numbers), strict=True):
            tokens[i] = token
    return tokens


def uniform_number(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else (two rounds of splitmix64, top 53 bits)."""
    return (mix(mix(seed & _MASK64) ^ position) >> 11) * 2.0**-53


def mix(value: int) -> int:
    """splitmix64's finaliser: 64 bits in, 64 well-spread bits out (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _row_logprobs(
    raw: Tensor, chosen: Sequence[int], rows: Sequence[SampleRow], failed: Collection[int]
) -> list[dict[int, Logprob] | None]:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None and i not in failed]
    out: list[dict[int, Logprob] | None] = [None] * len(rows)
    if wanted:
        counts = [rows[i].params.logprobs or 0 for i in wanted]
        for i, entry in zip(wanted, gather_logprobs(raw[wanted], [chosen[i] for i in wanted], counts), strict=True):
            out[i] = entry
    return out


def gather_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """For each row of `[rows, vocab]`: its token's log probability and rank, then those of the `count` likeliest."""
    if logits.device.type != "cpu":
        logged = dict(enumerate(counts))
        numbers = _logprob_numbers(
            logits,
            torch.tensor(tokens, device=logits.device),
            logged,
            lambda array: torch.from_numpy(array).to(logits.device),
        )
        return list(_entries(tokens, logged, numbers.tolist()).values())
    table = logits.float().log_softmax(-1)
    own = table.gather(-1, torch.tensor(tokens, device=table.device).unsqueeze(-1))  # [rows, 1]
    ranks = (table > own).sum(-1).add_(1).tolist()
    own_list: list[float] = own.squeeze(-1).tolist()
    values, ids = (part.tolist() for part in table.topk(min(max(counts), table.shape[1]), dim=-1))
    result = []
    for i, token in enumerate(tokens):
        entry = {token: Logprob(own_list[i], ranks[i])}
        for rank, (other, value) in enumerate(zip(ids[i][: counts[i]], values[i], strict=False), start=1):
            entry.setdefault(other, Logprob(value, rank))
        result.append(entry)
    return result
