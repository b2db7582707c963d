"""The sampler: draws tokens from the logits of a batch.

Rules apply in this order: logits processors of the caller, the grammar, bad words and min_tokens, logit_bias, penalties,
processors that keep log probabilities; then temperature, min_p, top_k, top_p and the random number (`kernels.sampling`). Log
probabilities are those of the raw logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import ErrorInfo, InputError
from ...kernels import sampling as kernels
from ...kernels.streams import copy_to_host
from ..logits_processors import apply_processors, keeps_logprobs
from ..seeds import splitmix64
from ..types import Logprob
from .sampling_state import SamplingState
from .staging import ToDevice

NOT_FINITE = ErrorInfo(
    "not_finite", "the model's logits are not finite (NaN or infinity) for this prompt; change it, or serve with a wider dtype"
)
_NO_TOKEN = ErrorInfo(
    "invalid_input", "no token is allowed: bad_words, min_tokens, the grammar or a logits processor leave none"
)
_NOT_FINITE_AFTER = ErrorInfo(
    "invalid_input", "logits are not finite (NaN or infinity) after logits_processors", param="logits_processors"
)
_RAW_NOT_FINITE = 3  # in addition to the error numbers of `kernels.sampling`
_ERRORS = {kernels.NO_TOKEN_ALLOWED: _NO_TOKEN, kernels.NOT_FINITE: _NOT_FINITE_AFTER, _RAW_NOT_FINITE: NOT_FINITE}
_MASK64 = (1 << 64) - 1
_ALL = 2**31 - 1  # no vocabulary is larger


@dataclass(frozen=True)
class SampledToken:
    """A token, and its log probabilities if they are requested."""

    token: int
    logprobs: dict[int, Logprob] | None = None


@dataclass(frozen=True, eq=False)
class SamplerOutput:
    """Tokens of a batch, still on their device.

    Args:
        sampled_token_ids: int64 `[rows]`, on the device.
        numbers: waits for the device, then returns tokens, error numbers, and one entry of `_logprob_numbers` for each row of
            `num_logprobs`.
        errors: errors of rows that failed on the host.
        num_logprobs: number of requested log probabilities by row; rows without any are left out.
    """

    sampled_token_ids: Tensor
    numbers: Callable[[], list[float]]
    errors: Mapping[int, Exception]
    num_logprobs: Mapping[int, int]

    def get(self) -> list[SampledToken | Exception]:
        """Wait for the device, and return a token or an error for each row."""
        numbers, rows = self.numbers(), len(self.sampled_token_ids)
        size = (len(numbers) - 2 * rows) // max(1, len(self.num_logprobs)) or 1
        tokens, wrong = ([int(number) for number in numbers[first : first + rows]] for first in (0, rows))
        logprobs = _logprob_dicts(
            tokens, self.num_logprobs, [numbers[i : i + size] for i in range(2 * rows, len(numbers), size)]
        )
        errors: dict[int, Exception] = dict(self.errors)
        for i, number in enumerate(wrong):
            if number == _RAW_NOT_FINITE or (number and i not in errors):
                errors[i] = _error(number)
        return [errors.get(i) or SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens)]


def sample(
    logits: Tensor, states: Sequence[SamplingState], to_device: ToDevice = torch.from_numpy
) -> list[SampledToken | Exception]:
    """Sample a token for each row of float32 `[rows, vocab]`; a row that cannot be sampled gets an error of its own.

    A row's token depends only on that row's logits, parameters, seed and tokens. `logits` may be overwritten.

    Args:
        to_device: copies an array to the device of `logits`.
    """
    if logits.device.type == "cpu" and all(state.only_argmax for state in states):
        values = logits.numpy()
        tokens: list[int] = values.argmax(-1).tolist()  # NaN counts as the largest
        return [
            SampledToken(token) if math.isfinite(values[i, token]) else _error(_RAW_NOT_FINITE)
            for i, token in enumerate(tokens)
        ]
    return sample_async(logits, states, to_device).get()


def verify(
    logits: Tensor, states: Sequence[SamplingState], drafts: Sequence[Sequence[int]], to_device: ToDevice = torch.from_numpy
) -> list[list[SampledToken] | Exception]:
    """Sample the rows of sequences that have one row, and one more for each draft, and append the tokens to `states`.

    A row was computed after the drafts before it. So it is sampled only if the tokens before it equal them, and with the
    counts, the grammar and the random number of its place: the tokens are those of steps with one row.

    Args:
        logits: float32 `[rows, vocab]`, the rows of each sequence one after the other; may be overwritten.
        drafts: guessed tokens of each sequence.

    Returns:
        The tokens of each sequence, at least one, or why its first row could not be sampled. The next step meets the errors of
        further rows again.
    """
    if not any(drafts):  # most steps
        return [_appended(state, result) for state, result in zip(states, sample(logits, states, to_device), strict=True)]
    starts, left, num_done = [0, *accumulate(1 + len(guessed) for guessed in drafts)], list(range(len(states))), 0
    tokens: list[list[SampledToken]] = [[] for _ in states]
    failed: dict[int, Exception] = {}
    while left:
        part = logits if len(left) == len(logits) else logits[[starts[i] + num_done for i in left]]
        try:
            sampled = sample(part, [states[i] for i in left], to_device)
        except Exception:
            if not num_done:
                raise
            break
        following = []
        for i, result in zip(left, sampled, strict=True):
            if isinstance(result, Exception):
                failed |= {} if num_done else {i: result}
                continue
            tokens[i].append(result)
            states[i].token_ids.append(result.token)
            if drafts[i] and list(drafts[i][num_done : num_done + 1]) == [result.token]:
                following.append(i)
        left, num_done = following, num_done + 1
    return [failed.get(i, sampled) for i, sampled in enumerate(tokens)]


def _appended(state: SamplingState, result: SampledToken | Exception) -> list[SampledToken] | Exception:
    if isinstance(result, Exception):
        return result
    state.token_ids.append(result.token)
    return [result]


def sample_async(
    logits: Tensor, states: Sequence[SamplingState], to_device: ToDevice = torch.from_numpy, ahead: int = 0
) -> SamplerOutput:
    """Sample as `sample` does, without waiting for the device.

    Args:
        ahead: number of each sequence's tokens that are only on the device; above 0, no state may change logits.
    """
    finite = logits.amax(-1).isfinite()  # NaN counts as the largest
    num_logprobs = {i: state.params.logprobs for i, state in enumerate(states) if state.params.logprobs is not None}
    changed = [i for i, state in enumerate(states) if state.changes_logits]
    if changed and logits.device.type == "cpu":  # reading `finite` needs no wait there, so skip rows that fail anyway
        good = finite.tolist()
        changed = [i for i in changed if good[i]]
    raw = logits.clone() if num_logprobs and changed else logits
    errors, allowed = _change_logits(logits, states, changed)
    processed = [i for i in num_logprobs if i in changed and states[i].params.logprobs_mode == "processed_logprobs"]
    if processed:
        raw[processed] = logits[processed] if allowed is None else _without(logits[processed], allowed[processed])
    errors |= _apply_logits_processors(logits, states, [i for i in changed if i not in errors], keeping=True)
    rules = to_device(np.array([_sampling_rules(state, ahead) for state in states]))
    tokens, wrong = kernels.sample(logits, rules, allowed)
    numbers = [tokens, torch.where(finite, wrong, _RAW_NOT_FINITE)]
    if num_logprobs:
        rows = to_device(np.array(list(num_logprobs)))
        part = raw if len(rows) == len(raw) else raw.index_select(0, rows)
        numbers.append(_logprob_numbers(part, tokens.index_select(0, rows), max(num_logprobs.values())).flatten())
    return SamplerOutput(tokens, copy_to_host(*numbers), errors, num_logprobs)


def _without(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return logits `[rows, tokens]` without the tokens that `allowed` forbids: bits in int32 `[rows, words]`."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    bits = allowed[:, tokens // 32] >> (tokens % 32) & 1
    return logits.masked_fill(bits == 0, -torch.inf)


def _error(number: int) -> InputError:
    info = _ERRORS[number]
    return InputError(**info.fields())


def _sampling_rules(state: SamplingState, ahead: int) -> tuple[float, ...]:
    """Return one row of the `rules` of `kernels.sampling.sample`."""
    params = state.params
    if params.greedy:
        return 0.0, 0, 1.0, -math.inf, 0.0
    log_min_p = math.log(params.min_p) if params.min_p else -math.inf
    number = uniform_number(state.seed, len(state.token_ids) + ahead)
    return params.temperature, min(max(0, params.top_k), _ALL), params.top_p, log_min_p, number


def uniform_number(seed: int, position: int) -> float:
    """Return a number in [0, 1) that depends on seed and position only (two rounds of splitmix64, top 53 bits)."""
    return (splitmix64(splitmix64(seed & _MASK64) ^ position) >> 11) * 2.0**-53


def _change_logits(
    logits: Tensor, states: Sequence[SamplingState], changed: Sequence[int]
) -> tuple[dict[int, Exception], Tensor | None]:
    """Apply all rules that precede the temperature to the rows `changed`, in place.

    Returns the errors of rows that failed, and which tokens grammars allow, for `kernels.sampling.sample`.
    """
    errors = _apply_logits_processors(logits, states, changed, keeping=False)
    allowed = _grammar_mask(logits, states, [i for i in changed if i not in errors], errors)
    changed = [i for i in changed if i not in errors]
    apply_constraints(logits, states, changed)
    apply_penalties(logits, states, [i for i in changed if states[i].params.penalised])
    return errors, allowed


def _apply_logits_processors(
    logits: Tensor, states: Sequence[SamplingState], changed: Sequence[int], keeping: bool
) -> dict[int, Exception]:
    """Run logits processors in place: those that keep log probabilities, or all others. Return the errors of rows."""
    errors: dict[int, Exception] = {}
    rows, processors = [], []
    for i in changed:
        if states[i].params.processors:
            try:
                chosen = [processor for processor in states[i].processors if keeps_logprobs(processor) == keeping]
            except InputError as error:
                errors[i] = error
                continue
            if chosen:
                processors.append(chosen)
                rows.append(i)
    if rows:
        part = logits[rows]
        failed = apply_processors(processors, [states[i].output_token_ids for i in rows], part)
        logits[rows] = part
        errors |= {rows[k]: error for k, error in failed.items()}
    return errors


def _grammar_mask(
    logits: Tensor, states: Sequence[SamplingState], changed: Sequence[int], errors: dict[int, Exception]
) -> Tensor | None:
    """Return the tokens that grammars allow, as bits in int32 `[rows, words]`; None if no row has a grammar.

    The errors of grammars that fail are added to `errors`.
    """
    bits = None
    for i in changed:
        if states[i].params.structured_outputs is None:
            continue
        if bits is None:
            bits = np.full((len(states), -(-logits.shape[1] // 32) * 4), 255, dtype=np.uint8)
        try:
            allowed = np.packbits(states[i].allowed_tokens(logits.shape[1]), bitorder="little")
        except InputError as error:
            errors[i] = error
        else:
            bits[i, : len(allowed)] = allowed
    return None if bits is None else torch.from_numpy(bits).view(torch.int32).to(logits.device)


def apply_constraints(logits: Tensor, states: Sequence[SamplingState], changed: Sequence[int]) -> None:
    """Forbid bad words and early ends, then add logit_bias, in place."""
    banned = [(i, tokens) for i in changed if (tokens := states[i].banned_tokens())]
    if banned:
        logits[_rows_and_tokens(banned, logits)] = -torch.inf
    biased = [i for i in changed if states[i].params.logit_bias]
    if biased:
        biases = np.concatenate([states[i].biases[1] for i in biased])
        logits[_rows_and_tokens([(i, states[i].biases[0]) for i in biased], logits)] += torch.from_numpy(biases).to(
            logits.device
        )


def _rows_and_tokens(tokens_of: Sequence[tuple[int, Sequence[int] | np.ndarray]], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of tokens of rows: int64 `[n]` each, on the device of `logits`."""
    rows = np.repeat([row for row, _ in tokens_of], [len(tokens) for _, tokens in tokens_of])
    tokens = np.concatenate([np.asarray(tokens, dtype=np.int64) for _, tokens in tokens_of])
    return torch.from_numpy(rows).to(logits.device), torch.from_numpy(tokens).to(logits.device)


def apply_penalties(logits: Tensor, states: Sequence[SamplingState], penalised: Sequence[int]) -> None:
    """Penalise repetition over prompt and answer, presence and frequency over the answer, in place."""
    if not penalised:
        return
    counts = [states[i].token_counts() for i in penalised]
    rows = np.repeat(np.array(penalised), [len(ids) for ids, _ in counts])
    tokens, occurrences = (np.concatenate(parts) for parts in zip(*counts, strict=True))
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = np.array([[getattr(state.params, name) for name in names] for state in states], dtype=np.float32)
    kernels.apply_penalties_(
        logits, *(torch.from_numpy(part).to(logits.device) for part in (rows, tokens, occurrences, penalties))
    )


def gather_logprobs(logits: Tensor, tokens: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """Return the log probabilities of each row of `[rows, vocab]`: its token's, then those of the `count` most likely."""
    ids = torch.tensor(tokens, device=logits.device)
    return list(
        _logprob_dicts(tokens, dict.fromkeys(range(len(tokens)), count), _logprob_numbers(logits, ids, count).tolist()).values()
    )


def _logprob_numbers(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """Return float64 `[rows, 2 + 2 * count]`: the token's log probability and rank, the best tokens, theirs."""
    token_logprobs, ranks, ids, values = kernels.top_log_probs(logits, tokens, min(count, logits.shape[1]))
    return torch.cat((token_logprobs[:, None].double(), ranks[:, None].double(), ids.double(), values.double()), 1)


def _logprob_dicts(
    tokens: Sequence[int], num_logprobs: Mapping[int, int], numbers: Sequence[Sequence[float]]
) -> dict[int, dict[int, Logprob]]:
    """Return the log probabilities by row, from one entry of `_logprob_numbers` for each row of `num_logprobs`."""
    logprobs: dict[int, dict[int, Logprob]] = {}
    for (i, count), (logprob, rank, *best) in zip(num_logprobs.items(), numbers, strict=True):
        half = len(best) // 2
        logprobs[i] = {tokens[i]: Logprob(logprob, int(rank))}
        for best_rank, (token, value) in enumerate(zip(best[:count], best[half:], strict=False), start=1):
            logprobs[i].setdefault(int(token), Logprob(value, best_rank))
    return logprobs
