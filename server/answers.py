"""How many answers a request gets: sampled ones, the likeliest of more candidates, copies of a greedy one, or beams."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from ..callers.errors import InputError, equals_one_of, naming_field, short_repr
from ..engine.frontend.request_handle import RequestHandle
from ..engine.frontend.trace import on_request_end
from ..engine.outputs import CompletionOutput, RequestOutput
from ..engine.sampling_params import SamplingLimits, SamplingParams
from ..pipelines.beam_search import BeamSearchParams, search_beams
from ..pipelines.llm import AsyncLLM
from ..pipelines.run import run_async
from .protocol.sampling import NOT_WITH_BEAMS, SamplingBody


@dataclass(frozen=True)
class AnswerCount:
    """The number of answers of a request.

    Args:
        wanted: answers in the response.
        sampled: answers that are computed.
        copies: how often a greedy answer is in the response. It is computed once, because all would be equal.
    """

    wanted: int
    sampled: int = 1
    copies: int = 1

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters of the computed answers. They are chosen by their log probabilities."""
        if self.sampled == 1:
            return params
        logprobs = (params.logprobs or 0) if self.sampled > self.wanted else params.logprobs
        return replace(params, n=self.sampled, logprobs=logprobs)

    def chosen(self, answers: Sequence[CompletionOutput]) -> Sequence[CompletionOutput]:
        """Return the answers with the highest log probability per token, the likeliest first, if there are too many."""
        if len(answers) <= self.wanted:
            return answers
        ranked = sorted(answers, key=lambda answer: -(answer.cumulative_logprob or 0.0) / max(1, len(answer.token_ids)))
        return [replace(answer, index=index) for index, answer in enumerate(ranked[: self.wanted])]

    def copied(self, outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
        """Return the outputs of a request with the copies of its answer."""
        return outputs if self.copies == 1 else _copied(outputs, self.copies)


async def _copied(outputs: AsyncGenerator[RequestOutput, None], count: int) -> AsyncGenerator[RequestOutput, None]:
    async with aclosing(outputs):
        async for output in outputs:
            yield replace(output, outputs=[replace(output.outputs[0], index=index) for index in range(count)])


def answer_count(body: SamplingBody, params: SamplingParams, limits: SamplingLimits) -> AnswerCount:
    """Return how many answers a request gets. `params`: those of one answer.

    Raises:
        InputError: there are too many, or too many log probabilities for all of them.
    """
    wanted = 1 if body.n is None else body.n
    with naming_field("n", body.count_field):
        candidates = body.num_candidates
        if candidates == wanted == 1 or body.use_beam_search:
            return AnswerCount(wanted)
        limits.check(replace(params, n=candidates, temperature=1.0 if params.greedy else params.temperature))
    return AnswerCount(wanted, copies=wanted) if params.greedy else AnswerCount(wanted, candidates)


def beam_params(body: SamplingBody, params: SamplingParams, longest: int) -> BeamSearchParams | None:
    """Return the parameters of beam search, or None if the request does not ask for it.

    Args:
        params: those of one answer.
        longest: tokens of an answer without a limit.

    Raises:
        InputError: a field cannot be honoured together with beam search.
    """
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1.0):
            raise InputError("<<param>> needs use_beam_search=true; set it, or remove <<param>>", param="length_penalty")
        return None
    for name, (accepted, reason) in NOT_WITH_BEAMS.items():
        value = getattr(body, name, None)
        if value is not None and not equals_one_of(value, accepted):
            reason = f"<<param=>>{short_repr(value)} cannot be honoured with use_beam_search: {reason}"
            raise InputError(f"{reason}; leave out one of them", code="unsupported", param=name)
    if params.structured_outputs is not None:
        reason = "<<param>> forces a call, whose arguments have a format, which beams do not follow; leave out one of them"
        raise InputError(reason, code="unsupported", param="tool_choice")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    most = longest if params.max_tokens is None else params.max_tokens
    with naming_field("beam_width", body.count_field):
        return BeamSearchParams(body.num_candidates, most, params.ignore_eos, params.temperature, penalty)


async def best_beams(llm: AsyncLLM, handle: RequestHandle, params: BeamSearchParams, body: SamplingBody) -> RequestOutput:
    """Return the best answers to a request, as many as it wants.

    The access log gets the tokens of these answers, instead of those of each step.

    Raises:
        SensoriumError: there are too many beams, or the request's error.
    """
    report, token = on_request_end.get(), on_request_end.set(None)
    try:
        with naming_field("beam_width", body.count_field):
            output = await run_async(llm, partial(search_beams, llm.engine, handle, params))
    finally:
        on_request_end.reset(token)
    output = replace(output, outputs=output.outputs[: body.n or 1])
    if report is not None:
        report(output)
    return output
