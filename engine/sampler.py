"""Logits to tokens, for all rows of a step at once. Knows no model and no scheduler.

The order is the field's: bad words, min_tokens, logit_bias, penalties, then temperature, min_p, top_k, top_p. Log
probabilities are those of the untouched logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling_params import SamplingParams
from .types import Logprob

_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class SampleRow:
    """What the sampler must know of one sequence.

    `token_ids` are all its tokens, the answer from `turn_start` on; `end_ids` are EOS and stop tokens.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    turn_start: int
    seed: int
    end_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> tuple[list[int], list[dict[int, Logprob] | None]]:
    """One token per row of float32 `[rows, vocab]`, and its log probabilities where they were asked for.

    A row's token depends on its own logits, parameters, seed and number of tokens only. `logits` may be overwritten.
    """
    if all(row.params.plain for row in rows):
        return logits.argmax(-1).tolist(), [None] * len(rows)
    raw = logits.clone() if any(row.params.logprobs is not None for row in rows) else logits
    if any(row.params.changes_logits for row in rows):
        apply_constraints(logits, rows)
        apply_penalties(logits, rows)
    chosen = choose(logits, rows)
    return chosen, _row_logprobs(raw, chosen, rows)


def apply_constraints(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Forbid bad words and early ends, then add biases; in place."""
    banned = [(i, token) for i, row in enumerate(rows) for token in _banned(row)]
    if banned:
        index = torch.tensor(banned, device=logits.device)  # [n, 2]
        logits[index[:, 0], index[:, 1]] = -torch.inf
    biases = [(i, token, bias) for i, row in enumerate(rows) for token, bias in (row.params.logit_bias or {}).items()]
    if biases:
        who, token, bias = zip(*biases, strict=True)
        logits[list(who), list(token)] += torch.tensor(bias, device=logits.device)


def _banned(row: SampleRow) -> list[int]:
    banned = list(row.end_ids) if len(row.token_ids) - row.turn_start < row.params.min_tokens else []
    for word in row.bad_word_ids:
        before = len(word) - 1
        if before == 0 or tuple(row.token_ids[row.turn_start :][-before:]) == word[:-1]:
            banned.append(word[-1])
    return banned


def apply_penalties(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Repetition over prompt and answer, presence and frequency over the answer; in place."""
    chosen = [i for i, row in enumerate(rows) if _penalised(row.params)]
    if not chosen:
        return
    some = [rows[i] for i in chosen]
    answer = _counts([row.token_ids[row.turn_start :] for row in some], logits)
    seen = _counts([row.token_ids for row in some], logits) > 0  # [n, vocab]
    repeat, presence, frequency = (
        _column([getattr(row.params, f"{name}_penalty") for row in some], logits)
        for name in ("repetition", "presence", "frequency")
    )
    part = logits[chosen]
    part = torch.where(seen, torch.where(part > 0, part / repeat, part * repeat), part)
    logits[chosen] = part - frequency * answer - presence * (answer > 0)


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def _counts(lists: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
    """Occurrences of each token, float `[len(lists), vocab]`."""
    who = [i for i, tokens in enumerate(lists) for _ in tokens]
    flat = [token for tokens in lists for token in tokens]
    counts = logits.new_zeros(len(lists), logits.shape[1])
    index = (
        torch.tensor(who, dtype=torch.long, device=logits.device),
        torch.tensor(flat, dtype=torch.long, device=logits.device),
    )
    return counts.index_put_(index, counts.new_ones(()), accumulate=True)


def choose(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The likeliest token of greedy rows, a drawn one of the others."""
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    tokens: list[int] = logits.argmax(-1).tolist() if len(drawn) < len(rows) else [0] * len(rows)
    if drawn:
        some = [rows[i] for i in drawn]
        for i, token in zip(drawn, _draw(logits[drawn] if len(drawn) < len(rows) else logits, some), strict=True):
            tokens[i] = token
    return tokens


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    params = [row.params for row in rows]
    logits = logits / _column([p.temperature for p in params], logits)
    _mask_min_p(logits, params)
    _mask_top(logits, params)
    mass = logits.softmax(-1, dtype=torch.float64).cumsum(-1)  # [rows, vocab]
    target = _column([uniform_number(row.seed, len(row.token_ids)) for row in rows], mass) * mass[:, -1:]
    return torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[1] - 1).squeeze(-1).tolist()


def _mask_min_p(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    if any(p.min_p > 0 for p in params):
        floor = logits.amax(-1, keepdim=True) + _column([p.min_p for p in params], logits).log()
        logits.masked_fill_(logits < floor, -torch.inf)


def _mask_top(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """top_k, then top_p of what is left, in place. Tokens equal to the last one kept stay, so no order is left to chance."""
    vocab = logits.shape[1]
    need = [i for i, p in enumerate(params) if 0 < p.top_k < vocab or p.top_p < 1.0]
    if not need:
        return
    keep = [params[i].top_k if 0 < params[i].top_k < vocab else vocab for i in need]
    part = logits if len(need) == len(params) else logits[need]
    best = part.topk(max(keep), dim=-1).values  # [n, most kept], from high to low
    best.masked_fill_(torch.arange(best.shape[1], device=best.device) >= _column(keep, best), -torch.inf)
    probs = best.softmax(-1)
    before = probs.cumsum(-1) - probs
    inside = (before < _column([params[i].top_p if params[i].top_p < 1.0 else 2.0 for i in need], best)) & (best > -torch.inf)
    inside[:, 0] = True
    floor = best.gather(-1, inside.sum(-1, keepdim=True) - 1)
    logits[need] = part.masked_fill(part < floor, -torch.inf)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


def uniform_number(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else (two rounds of splitmix64, top 53 bits)."""
    return (mix(mix(seed & _MASK64) ^ position) >> 11) * 2.0**-53


def mix(value: int) -> int:
    """splitmix64's finaliser: 64 bits in, 64 well-spread bits out (Steele, Lea and Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _row_logprobs(raw: Tensor, chosen: Sequence[int], rows: Sequence[SampleRow]) -> list[dict[int, Logprob] | None]:
    wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    out: list[dict[int, Logprob] | None] = [None] * len(rows)
    if wanted:
        counts = [rows[i].params.logprobs or 0 for i in wanted]
        for i, entry in zip(wanted, gather_logprobs(raw[wanted], [chosen[i] for i in wanted], counts), strict=True):
            out[i] = entry
    return out


def gather_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """For each row of `[rows, vocab]`: its token's log probability and rank, then those of the `count` likeliest."""
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
