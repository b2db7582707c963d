"""Pooling: returns vectors of a prompt or of its tokens, logits, likely next tokens, or classes, instead of an answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.interface import Model, SupportsClassification, SupportsPooling, SupportsRowDecoding
from ..logits_processors import apply_processors
from ..pooling_params import PoolingParams
from .sequence_state import SequenceState


def pool(rows: Sequence[Tensor], params: Sequence[PoolingParams], model: Model) -> list[Tensor]:
    """Return float32 `[n]`, or `[tokens, n]` with the pooling "tokens", for the `kept_rows` of each prompt, on the CPU."""
    with_logits = [i for i, one in enumerate(params) if one.token_ids]
    logits = (
        dict(zip(with_logits, model.compute_logits(torch.cat([rows[i] for i in with_logits])), strict=True))
        if with_logits
        else {}
    )
    found = [
        _result(hidden, one, model) if (own := logits.get(i)) is None else own[list(one.token_ids)]
        for i, (hidden, one) in enumerate(zip(rows, params, strict=True))
    ]
    return [one.float().cpu().clone() for one in found]


def keep_rows(parts: Sequence[tuple[SequenceState, Tensor, int]], model: Model) -> None:
    """Keep what poolings over all tokens need of a step. `parts`: sequences, their hidden states, and their first tokens."""
    if isinstance(model, SupportsRowDecoding):
        decoded = [part for part in parts if _decodes(part[0])]
        before = [None if start == 0 else sequence.decodings[start] for sequence, _, start in decoded]
        after = model.decode_rows([hidden for _, hidden, _ in decoded], before) if decoded else ()
        for (sequence, hidden, start), old, new in zip(decoded, before, after, strict=True):
            sequence.decodings = {start: old, start + len(hidden): new}
        parts = [part for part in parts if not _decodes(part[0])]
    for sequence, hidden, start in parts:
        _keep(sequence, hidden, start, model)


def _decodes(sequence: SequenceState) -> bool:
    return sequence.request.pooling is not None and sequence.request.pooling.pooling == "tokens"


def _keep(sequence: SequenceState, hidden: Tensor, start: int, model: Model) -> None:
    """Keep what a pooling over all tokens needs of the hidden states of a step, those from token `start` on.

    The pooling "mean" keeps a sum, "cls" the first row, "tokens" the vectors, on the host. A step may be repeated. Hidden
    states of a layer were kept by the model's forward pass (`HiddenCapture`).
    """
    pooling = sequence.request.pooling
    assert pooling is not None
    stop = start + len(hidden)
    if pooling.pooling == "mean":
        first, end = _mean_range(sequence, model)
        part = hidden[max(0, first - start) : max(0, end - start)].sum(0, keepdim=True, dtype=torch.float32)
        if start == 0:
            sequence.hidden_sums = {0: torch.zeros_like(part)}
        before = sequence.hidden_sums[start]
        sequence.hidden_sums = {start: before, stop: before + part}
    elif pooling.layer is not None:
        return
    elif pooling.pooling == "tokens":
        vectors = _vectors(hidden, pooling, model)
        if start == 0:
            sequence.kept_rows = torch.zeros(sequence.prompt_length, vectors.shape[1])
        assert sequence.kept_rows is not None
        sequence.kept_rows[start:stop] = vectors
    elif start == 0:
        sequence.kept_rows = hidden[:1].clone()


def kept_rows(sequence: SequenceState, last: Tensor, model: Model) -> Tensor:
    """Return the row `[1, hidden]` that a prompt is pooled from, or the result for its tokens. `last`: its last row."""
    pooling = sequence.request.pooling
    if pooling is None or not pooling.pools_rows:
        return last
    if isinstance(model, SupportsRowDecoding) and _decodes(sequence):
        return model.decoded(sequence.decodings[sequence.prompt_length])
    if pooling.pooling == "mean":
        first, end = _mean_range(sequence, model)
        return (sequence.hidden_sums[sequence.prompt_length] / (end - first)).to(last.dtype)
    assert sequence.kept_rows is not None
    return sequence.kept_rows


def likely_tokens(hidden: Tensor, sequences: Sequence[SequenceState], model: Model) -> list[Tensor | Exception]:
    """Return `PoolingParams.candidates` for each of the last rows `[n, hidden]`, on the CPU, or why its processors failed."""
    raw = model.compute_logits(hidden).float().log_softmax(-1)
    scores = raw.clone()
    answers = [_answer(sequence) for sequence in sequences]
    errors = apply_processors([sequence.sampling.processors for sequence in sequences], answers, scores)
    found = list[Tensor | Exception]()
    for i, sequence in enumerate(sequences):
        assert sequence.request.pooling is not None
        best = scores[i].topk(min(sequence.request.pooling.candidates or 0, scores.shape[1]))
        least = torch.finfo(torch.float32).min  # instead of -inf, since results must be finite
        numbers = torch.stack((best.indices.float(), raw[i, best.indices], best.values.clamp(min=least)))
        found.append(errors.get(i, numbers.cpu()))
    return found


def _answer(sequence: SequenceState) -> list[int]:
    """Return the last tokens of the prompt that logits processors see as the answer."""
    assert sequence.request.pooling is not None
    return sequence.token_ids[max(0, len(sequence.token_ids) - sequence.request.pooling.answer_tokens) :]


def _mean_range(sequence: SequenceState, model: Model) -> tuple[int, int]:
    """Return the first token of a mean, and the end: all tokens, or those of the items if the model pools these."""
    items = sequence.features
    if not (items and isinstance(model, SupportsPooling) and model.pools_items):
        return 0, sequence.prompt_length
    return max(0, items[0].range.offset - 1), min(items[-1].range.end + 1, sequence.prompt_length)


def _result(hidden: Tensor, params: PoolingParams, model: Model) -> Tensor:
    if params.classifies:
        assert isinstance(model, SupportsClassification)
        return model.classify(hidden, params.use_activation is not False)[0]
    if params.pools_rows and params.pooling == "tokens":
        return hidden
    return _vectors(hidden, params, model)[0]


def _vectors(hidden: Tensor, params: PoolingParams, model: Model) -> Tensor:
    if params.classifies_tokens:
        assert isinstance(model, SupportsClassification)
        return model.classify(hidden, params.use_activation is not False)
    vectors, normalizes = hidden, True
    if isinstance(model, SupportsPooling):
        vectors, normalizes = model.project_hidden(hidden, params.pooling == "tokens"), model.normalizes
    normalizes = normalizes if params.normalize is None else params.normalize
    return F.normalize(vectors.float(), dim=-1) if normalizes else vectors
