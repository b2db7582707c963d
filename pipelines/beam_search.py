"""Beam search: the likeliest answers of a fixed number of candidates per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ..callers.errors import InputError, hints_at_arguments, short_repr
from ..engine.frontend.output_processor import CompletionBuilder
from ..engine.frontend.processed_prompt import ProcessedPrompt
from ..engine.frontend.request_handle import RequestHandle
from ..engine.outputs import CompletionOutput, RequestOutput
from ..engine.sampling_params import SamplingParams
from ..engine.types import Logprob, TokenOutput
from .run import Task, answer, gather
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine

_MAX_PENALTY = 10  # powers of a length remain finite


@hints_at_arguments
@dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`.

    Args:
        beam_width: number of candidates that are kept per step, and of answers.
        max_tokens: maximum number of tokens of an answer.
        ignore_eos: continue after EOS.
        temperature: as in SamplingParams.
        length_penalty: an answer's score is its log probability divided by its number of tokens to this power.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"<<param=>>{value!r} must be an integer, 1 or above", code="invalid_value", param=name)
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) <= _MAX_PENALTY:
            reason = f"<<param=>>{short_repr(penalty)} must be a number, at most {_MAX_PENALTY} from 0"
            raise InputError(reason, code="invalid_value", param="length_penalty")


@dataclass
class BeamSearchSequence:
    """One answer. `tokens` and `text` begin with the prompt, as in vLLM."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None


@dataclass
class BeamSearchOutput:
    """The answers to one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class _Path:
    """An answer so far: its tokens, the likeliest tokens at the place of each, and the sum of its log probabilities."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[dict[int, Logprob], ...] = ()
    total: float = 0.0
    is_finished: bool = False


class _Search:
    """The beams of one prompt."""

    def __init__(self, params: BeamSearchParams, prompt_length: int, eos_token_ids: Sequence[int]) -> None:
        self._params, self._prompt_length = params, prompt_length
        self._ends = () if params.ignore_eos else eos_token_ids
        self.beams, self._finished = [_Path()], list[_Path]()

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """Extend each beam by the likeliest next tokens, and keep the best."""
        candidates: list[tuple[float, _Path, int, dict[int, Logprob]]] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            (logprobs,) = output.outputs[0].logprobs or [{}]
            candidates += [(beam.total + entry.logprob, beam, token, logprobs) for token, entry in logprobs.items()]
        ended = [self._longer(*candidate, True) for candidate in candidates if candidate[2] in self._ends]
        self._finished = self._best([*self._finished, *ended])
        running = sorted((entry for entry in candidates if entry[2] not in self._ends), key=lambda entry: -entry[0])
        self.beams = [self._longer(*entry) for entry in running[: self._params.beam_width]]

    def best(self) -> list[_Path]:
        """Return the answers at the end of the search, the best first."""
        return self._best([*self._finished, *self.beams])

    def _longer(self, total: float, beam: _Path, token: int, logprobs: dict[int, Logprob], ends: bool = False) -> _Path:
        return _Path((*beam.tokens, token), (*beam.logprobs, logprobs), total, ends)

    def _best(self, beams: Sequence[_Path]) -> list[_Path]:
        """Return the beams with the highest scores. As in vLLM, the length is that of prompt and answer without EOS."""

        def score(beam: _Path) -> float:
            length = self._prompt_length + len(beam.tokens) - beam.is_finished
            return beam.total / float(length**self._params.length_penalty)

        return sorted(beams, key=score, reverse=True)[: self._params.beam_width]


async def search_beams(engine: Engine, handle: RequestHandle, params: BeamSearchParams) -> RequestOutput:
    """Return the best answers to a request, in order. All beams of a step run at once and share cached prefixes.

    Args:
        handle: a request that is not submitted yet. Of its sampling parameters, those of the output apply: `logprobs`,
            `prompt_logprobs` and `skip_special_tokens`.

    Raises:
        InputError: twice the beam width is above `max_logprobs`.
        SensoriumError: the request's error.
    """
    most = engine.config.max_logprobs // 2
    if params.beam_width > most:
        reason = f"<<param=>>{params.beam_width} is over the limit of {most}, half of max_logprobs"
        reason = f"{reason}; ask for fewer, or raise <<max_logprobs>>"
        raise InputError(reason, code="over_limit", param="beam_width", limit=most, value=params.beam_width)
    request, sampling = handle.input, handle.input.params
    count = max(2 * params.beam_width, sampling.logprobs or 0)
    one_token = SamplingParams(max_tokens=1, logprobs=count, temperature=params.temperature, ignore_eos=True, detokenize=False)
    handle.input = replace(request, params=replace(one_token, prompt_logprobs=sampling.prompt_logprobs))
    first = _checked(await answer(handle))
    prompt = handle.answer.builder.prepared
    search = _Search(params, len(prompt.token_ids), engine.eos_token_ids)
    search.advance([first])
    request = replace(request, params=one_token, request_id=None, has_files=False)
    for _ in range(min(params.max_tokens, engine.max_model_len - len(prompt.token_ids)) - 1):
        if not search.beams:
            break
        handles = [RequestHandle(replace(request, prepare=_continued(prompt, beam.tokens))) for beam in search.beams]
        outputs = await gather([partial(answer, handle) for handle in handles], len(handles))
        search.advance([_checked(output) for output in outputs])
    answers = [_answer(engine, index, beam, sampling, prompt) for index, beam in enumerate(search.best())]
    return replace(first, outputs=answers)


def _continued(prompt: ProcessedPrompt, tokens: Sequence[int]) -> partial[ProcessedPrompt]:
    """Return a call that gives the prompt with tokens of an answer. Its items are not read or processed again."""
    return partial(replace, prompt, token_ids=(*prompt.token_ids, *tokens))


def _answer(engine: Engine, index: int, beam: _Path, sampling: SamplingParams, prompt: ProcessedPrompt) -> CompletionOutput:
    """Return an answer as the engine writes those of requests: the text has no EOS."""
    builder = CompletionBuilder(index, sampling, engine.tokenizer)
    builder.answer_format = prompt.answer_format
    reason = "stop" if beam.is_finished else "length"
    builder.add(TokenOutput("", beam.tokens, beam.logprobs, finish_reason=reason))
    return builder.output()


def _checked(output: RequestOutput) -> RequestOutput:
    if output.error is not None:
        raise output.error.exception()
    return output


def beam_search_tasks(engine: Engine, prompts: Sequence[object], params: BeamSearchParams) -> list[Task[RequestOutput]]:
    """Return a task for each prompt, whose result has the best answers to it.

    Raises:
        InputError: `params` are none of beam search, or a prompt has an unknown form.
    """
    check_type("params", params, BeamSearchParams)
    sampling = SamplingParams(max_tokens=params.max_tokens, logprobs=0)
    return [partial(search_beams, engine, engine.request(prompt, sampling), params) for prompt in prompts]


def as_sequences(engine: Engine, output: RequestOutput) -> BeamSearchOutput:
    """Return the answers of a task, each with the prompt before it."""
    sequences = []
    for completion in output.outputs:
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        text = engine.tokenizer.decode(tokens)
        total = completion.cumulative_logprob or 0.0
        sequences.append(BeamSearchSequence(tokens, list(completion.logprobs or ()), total, text, completion.finish_reason))
    return BeamSearchOutput(sequences)
