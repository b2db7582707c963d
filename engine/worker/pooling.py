"""Pooling: returns vectors of a prompt or of its tokens, logits, likely next tokens, or classes, instead of an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.interface import (
    LogitsRule,
    Model,
    SupportsClassification,
    SupportsPooling,
    SupportsRowDecoding,
    SupportsSpeech,
)
from ..logits_processors import apply_processors, keeps_logprobs
from ..pooling_requests import (
    LayerStates,
    LikelyTokens,
    PooledPrompt,
    PooledTokens,
    PoolingRequest,
    PromptClasses,
    PromptVector,
    SpokenPrompt,
    TokenClasses,
    TokenLogits,
    TokenVectors,
    keeps_rows,
)
from .sequence_state import SequenceState


def pool(rows: Sequence[Tensor], poolings: Sequence[PoolingRequest], model: Model) -> list[Tensor]:
    """Return float32 `[n]`, or `[tokens, n]` for results of tokens, for the `kept_rows` of each prompt, on the CPU."""
    last_rows = [hidden for hidden, pooling in zip(rows, poolings, strict=True) if isinstance(pooling, TokenLogits)]
    logits = iter(model.compute_logits(torch.cat(last_rows)) if last_rows else ())
    results = [
        next(logits)[list(pooling.token_ids)] if isinstance(pooling, TokenLogits) else _result(hidden, pooling, model)
        for hidden, pooling in zip(rows, poolings, strict=True)
    ]
    return [as_result(result.float()) for result in results]


def as_result(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU that callers can use in autograd, unlike tensors that are made in inference mode."""
    with torch.inference_mode(False):
        return tensor.cpu().clone()


def keep_rows(parts: Sequence[tuple[SequenceState, Tensor, int]], model: Model) -> None:
    """Keep what poolings over all tokens need of a step. `parts`: sequences, their hidden states, and their first tokens."""
    if isinstance(model, SupportsRowDecoding):
        decoded = [part for part in parts if _decodes(part[0], model)]
        before = [None if start == 0 else sequence.decodings[start] for sequence, _, start in decoded]
        rules = [_logits_rule(sequence) for sequence, _, _ in decoded]
        after = model.decode_rows([hidden for _, hidden, _ in decoded], before, rules) if decoded else ()
        for (sequence, hidden, start), old, new in zip(decoded, before, after, strict=True):
            sequence.decodings = {start: old, start + len(hidden): new}
        parts = [part for part in parts if not _decodes(part[0], model)]
    for sequence, hidden, start in parts:
        _keep(sequence, hidden, start, model)


def _decodes(sequence: SequenceState, model: SupportsRowDecoding) -> bool:
    wanted = model.decodes_always or bool(sequence.sampling.params.processors)
    return wanted and isinstance(sequence.message.pooling, PooledTokens)


def _logits_rule(sequence: SequenceState) -> LogitsRule | None:
    processors = sequence.sampling.processors

    def change(tokens: Sequence[int], logits: Tensor) -> None:
        for processor in processors:
            processor(tokens, logits)

    return change if processors else None


def _keep(sequence: SequenceState, hidden: Tensor, start: int, model: Model) -> None:
    """Keep what a pooling over all tokens needs of the hidden states of a step, those from token `start` on.

    Results of tokens are kept on the host; poolings keep a row for each mode (`_pool_part`). A step may be repeated. Hidden
    states of a layer were kept by the model's forward pass (`HiddenCapture`).
    """
    pooling = sequence.message.pooling
    stop = start + len(hidden)
    if isinstance(pooling, LayerStates):
        return
    if isinstance(pooling, TokenVectors | TokenClasses | SpokenPrompt):
        vectors = hidden if isinstance(pooling, SpokenPrompt) else _vectors(hidden, pooling, model)
        if start == 0:
            sequence.kept_rows = torch.zeros(sequence.prompt_length, vectors.shape[1])
        assert sequence.kept_rows is not None
        sequence.kept_rows[start:stop] = vectors
        return
    assert isinstance(pooling, PooledPrompt)
    first, end = _pooled_range(sequence, pooling, model)
    if start == 0:
        sequence.pooled_rows = {0: torch.zeros(len(pooling.modes), hidden.shape[1], device=hidden.device)}
    before = sequence.pooled_rows[start]
    part = hidden[max(0, first - start) : max(0, end - start)]
    if len(part):
        begin = max(first, start)
        states = zip(pooling.modes, before, strict=True)
        after = torch.stack([_pool_part(mode, state, part, begin, first) for mode, state in states])
    else:
        after = before
    sequence.pooled_rows = {start: before, stop: after}


def _pool_part(mode: str, before: Tensor, part: Tensor, begin: int, first: int) -> Tensor:
    """Return the float32 state `[hidden]` of a pooling after more hidden states `[n, hidden]`.

    Args:
        before: the state before them.
        begin: number of their first token. first: number of the first token that is pooled.
    """
    if mode == "cls":
        return part[0].float() if begin == first else before
    if mode == "last":
        return part[-1].float()
    if mode == "max":
        largest = part.amax(0).float()
        return largest if begin == first else torch.maximum(before, largest)
    if mode == "weightedmean":
        weights = torch.arange(begin + 1, begin + len(part) + 1, device=part.device, dtype=torch.float32)
        return before + (part.float() * weights[:, None]).sum(0)
    return before + part.sum(0, dtype=torch.float32)


def _pooled_vector(mode: str, state: Tensor, first: int, end: int) -> Tensor:
    """Return the vector `[hidden]` for the state after the tokens from `first` to `end`."""
    if mode == "mean":
        return state / (end - first)
    if mode == "mean_sqrt_len_tokens":
        return state / math.sqrt(end - first)
    if mode == "weightedmean":
        return state / ((first + 1 + end) * (end - first) / 2)  # the sum of the weights first + 1 to end
    return state


def kept_rows(sequence: SequenceState, last: Tensor, model: Model) -> Tensor:
    """Return the row `[1, modes * hidden]` that a prompt is pooled from, or the result for its tokens. `last`: its last row."""
    pooling = sequence.message.pooling
    if not keeps_rows(pooling):
        return last
    if isinstance(model, SupportsRowDecoding) and _decodes(sequence, model):
        return model.decoded(sequence.decodings[sequence.prompt_length])
    if isinstance(pooling, PooledPrompt):
        tokens, states = _pooled_range(sequence, pooling, model), sequence.pooled_rows[sequence.prompt_length]
        vectors = [_pooled_vector(mode, state, *tokens) for mode, state in zip(pooling.modes, states, strict=True)]
        return torch.cat(vectors)[None].to(last.dtype)
    assert sequence.kept_rows is not None
    return sequence.kept_rows


def spoken_prompt(sequence: SequenceState, model: Model, device: torch.device) -> Tensor:
    """Return the result of `SpokenPrompt` on the CPU. Errors: see `SupportsSpeech`."""
    pooling, hidden = sequence.message.pooling, sequence.kept_rows
    assert isinstance(pooling, SpokenPrompt)
    assert hidden is not None
    assert isinstance(model, SupportsSpeech)
    ids = torch.tensor(sequence.token_ids[: sequence.prompt_length], device=device)
    style = torch.tensor(pooling.style, device=device)
    frames, samples = model.speak(ids, hidden.to(device), style, pooling.speed, pooling.seed)
    return as_result(torch.cat((frames.float(), samples)))


def likely_tokens(hidden: Tensor, sequences: Sequence[SequenceState], model: Model) -> list[Tensor | Exception]:
    """Return `PoolingParams.candidates` for each of the last rows `[n, hidden]`, on the CPU, or why its processors failed."""
    scores = model.compute_logits(hidden).float().log_softmax(-1)
    answers = [_answer(sequence) for sequence in sequences]
    processors = [sequence.sampling.processors for sequence in sequences]
    errors = apply_processors([[p for p in row if not keeps_logprobs(p)] for row in processors], answers, scores)
    normal = scores.logsumexp(-1).clamp(min=torch.finfo(torch.float32).min)
    logprobs = scores.clone() if any(map(keeps_logprobs, chain(*processors))) else scores
    errors |= apply_processors([[p for p in row if keeps_logprobs(p)] for row in processors], answers, scores)
    results = list[Tensor | Exception]()
    for i, sequence in enumerate(sequences):
        assert isinstance(sequence.message.pooling, LikelyTokens)
        best = scores[i].topk(min(sequence.message.pooling.count, scores.shape[1]))
        least = torch.finfo(torch.float32).min  # instead of -inf, since results must be finite
        likely = logprobs[i, best.indices].clamp(min=least) - normal[i]
        numbers = torch.stack((best.indices.float(), likely, best.values.clamp(min=least)))
        results.append(errors.get(i, as_result(numbers)))
    return results


def _answer(sequence: SequenceState) -> list[int]:
    """Return the last tokens of the prompt that logits processors see as the answer."""
    assert isinstance(sequence.message.pooling, LikelyTokens)
    return sequence.token_ids[max(0, len(sequence.token_ids) - sequence.message.pooling.answer_tokens) :]


def _pooled_range(sequence: SequenceState, pooling: PooledPrompt, model: Model) -> tuple[int, int]:
    """Return the first token of a pooling, and the end: all tokens, or those of the items for a mean if the model says so."""
    items = sequence.features
    if pooling.modes == ("mean",) and items and isinstance(model, SupportsPooling) and model.pools_items:
        return max(0, items[0].range.offset - 1), min(items[-1].range.end + 1, sequence.prompt_length)
    return min(pooling.skip_tokens, sequence.prompt_length - 1), sequence.prompt_length


def _result(hidden: Tensor, pooling: PoolingRequest, model: Model) -> Tensor:
    if isinstance(pooling, PromptClasses):
        assert isinstance(model, SupportsClassification)
        return model.classify(hidden, pooling.activates)[0]
    if isinstance(pooling, PooledTokens):
        return hidden
    assert isinstance(pooling, PromptVector)
    return _vectors(hidden, pooling, model)[0]


def _vectors(hidden: Tensor, pooling: PromptVector | TokenVectors | TokenClasses, model: Model) -> Tensor:
    if isinstance(pooling, TokenClasses):
        assert isinstance(model, SupportsClassification)
        return model.classify(hidden, pooling.activates)
    vectors, normalizes = hidden, True
    if isinstance(model, SupportsPooling):
        of_tokens = isinstance(pooling, TokenVectors)
        vectors, normalizes = model.project_hidden(hidden, of_tokens), model.normalizes
        if model.vector_head is not None and not of_tokens:
            vectors = model.vector_head(vectors)
    normalizes = normalizes if pooling.normalize is None else pooling.normalize
    return F.normalize(vectors.float(), dim=-1) if normalizes else vectors
