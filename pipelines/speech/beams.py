"""Beam search for the text of a window, with the scores and the stopping rule of transformers' `generate(num_beams=...)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...engine.outputs import CompletionOutput, RequestOutput
from ...engine.pooling_params import PoolingParams
from ...engine.sampling_params import SamplingParams
from ...engine.types import Logprob
from ..pooling import pooling_request
from ..run import answer, gather

if TYPE_CHECKING:
    from ...engine.engine import Engine


@dataclass(frozen=True)
class _Beam:
    """A hypothesis: its tokens, their log probabilities, and the sum of these."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    total: float = 0.0


@dataclass
class _WindowSearch:
    """The running beams of one window, and the best finished ones with their mean log probability per token."""

    size: int
    end_ids: Sequence[int]
    max_tokens: int
    beams: list[_Beam] = field(default_factory=lambda: [_Beam()])
    finished: list[tuple[float, _Beam]] = field(default_factory=list)

    @property
    def candidates(self) -> int:
        """Number of the likeliest tokens of each beam among which the next beams are."""
        return max(2, 1 + len(self.end_ids)) * self.size

    def advance(self, candidates: Tensor) -> bool:
        """Extend each beam by its `candidates` `[beams, 3, candidates]`. Return False at the end of the search."""
        ids, raw, scores = candidates.unbind(1)
        scores = scores.masked_fill(scores == torch.finfo(scores.dtype).min, -torch.inf)
        totals = scores + torch.tensor([[beam.total] for beam in self.beams])
        best = totals.flatten().topk(min(self.candidates, totals.numel()))
        running = list[_Beam]()
        for rank, (total, flat_index) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
            row, column = divmod(flat_index, ids.shape[1])
            before, token = self.beams[row], int(ids[row, column])
            beam = _Beam((*before.tokens, token), (*before.logprobs, float(raw[row, column])), total)
            if token not in self.end_ids and len(beam.tokens) < self.max_tokens:
                running.append(beam)
            elif rank < self.size and total > -torch.inf:
                self.finished.append((total / len(beam.tokens), beam))
        self.finished = sorted(self.finished, key=lambda finished_beam: -finished_beam[0])[: self.size]
        self.beams = [beam for beam in running if beam.total > -torch.inf][: self.size]
        if not self.beams:
            return False
        return len(self.finished) < self.size or self.beams[0].total / len(self.beams[0].tokens) > self.finished[-1][0]


async def search_beams(engine: Engine, prompt: Mapping[str, Any], params: SamplingParams, size: int) -> RequestOutput:
    """Return the output of the best beam. All beams of a step run at once and share encoder rows and cached prefixes.

    `prompt_token_ids` of the output has the tokens that the family adds to the prompt.

    Args:
        prompt: with `prompt_token_ids`.
        params: its logits processors apply to the log probabilities.
    """
    prefix = list(prompt["prompt_token_ids"])
    room = engine.max_model_len - len(prefix) - 2  # the family may add a token to the prefix
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    search = _WindowSearch(size, engine.eos_token_ids, max_tokens)
    single_token = SamplingParams(max_tokens=1, logits_processors=params.processors)
    prompt_ids: list[int] | None = None
    while True:
        pooling = PoolingParams(candidates=search.candidates, answer_tokens=len(search.beams[0].tokens))
        handles = [
            pooling_request(engine, {**prompt, "prompt_token_ids": [*prefix, *beam.tokens]}, pooling, {}, single_token)
            for beam in search.beams
        ]
        outputs = await gather([partial(answer, handle) for handle in handles], len(handles))
        failed = next((output for output in outputs if output.error), None)
        if failed is not None:
            return failed
        prompt_ids = prompt_ids or outputs[0].prompt_token_ids  # of the first step, which has no tokens of an answer
        if not search.advance(torch.stack([output.pooled for output in outputs if output.pooled is not None])):
            break
    best = search.finished[0][1] if search.finished else search.beams[0]
    stopped = bool(best.tokens) and best.tokens[-1] in engine.eos_token_ids
    logprobs = [{token: Logprob(value)} for token, value in zip(best.tokens, best.logprobs, strict=True)]
    text = engine.tokenizer.decode(best.tokens)
    completion = CompletionOutput(0, text, list(best.tokens), logprobs, sum(best.logprobs), "stop" if stopped else "length")
    return replace(outputs[0], prompt_token_ids=prompt_ids, outputs=[completion], pooled=None)
