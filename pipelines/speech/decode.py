"""Transcribes one window: detects its language, tries rising temperatures, and checks each answer with thresholds (gates)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf
from typing import TYPE_CHECKING, Any

from ...engine.builtin_logits_processors import ALLOWED_TOKENS, SUPPRESS_TOKENS, TIMESTAMPS
from ...engine.frontend.processed_prompt import ProcessedPrompt
from ...engine.frontend.request_handle import RequestHandle
from ...engine.pooling_params import PoolingParams
from ...engine.sampling_params import SamplingParams
from ...engine.types import CompletionOutput, RequestOutput
from ...mm.speech import SpeechRequest
from ...mm.types import MultiModalFeature
from ..doubt import compression_ratio, with_logprobs
from ..pooling import pooling_request
from ..tasks import Task, WideTask
from .beams import beam_task
from .frames import frames_task
from .merge import split_words
from .results import Attempt, Segment, WindowResult, segments
from .windows import Window

if TYPE_CHECKING:
    from ...engine.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
FATAL = frozenset({"engine_asleep", "engine_closed", "engine_dead"})  # error codes that end a live stream or a file
_ONE_TOKEN = replace(GREEDY, max_tokens=1)


@dataclass(frozen=True)
class Decoding:
    """Options for decoding the windows of a call.

    Args:
        make_request: returns the request for a language and a context.
        temperatures: tried in order until an answer passes the gates.
        no_speech_threshold: a window has no text if the probability of "no speech" is above this and the answer is below
            `log_prob_threshold`. None: no gate.
        log_prob_threshold: an answer with a mean log probability below this is rejected.
        compression_ratio_threshold: an answer with a compression ratio above this repeats itself and is rejected.
        beam_size: beams at temperature 0.
        aligner: adds the times of words to a window's segments; None: they are not requested.
        cache_salt: of all requests.
    """

    make_request: Callable[[str | None, str], SpeechRequest]
    params: SamplingParams
    temperatures: tuple[float, ...]
    no_speech_threshold: float | None
    log_prob_threshold: float | None
    compression_ratio_threshold: float | None
    aligner: Aligner | None = None
    beam_size: int = 1
    cache_salt: str | None = None


@dataclass
class SpokenLanguage:
    """The language of an audio item.

    Args:
        code: given, or detected by a request of its own; it is in the prompts of all windows.
        probability: of the code; 1 if it was given, None if the model only names it.
        all_probabilities: code and probability of each language, the most probable first; None if it was not detected.
        spoken: the language that the first window's answer names. It is in no prompt, because windows run in any order.
    """

    code: str | None
    probability: float | None = None
    all_probabilities: tuple[tuple[str, float], ...] | None = None
    sample: Any = None  # the window in which it is detected
    spoken: str | None = None
    place: float = inf  # seconds; start of the window whose answer names `spoken`

    def set_probabilities(self, codes: Sequence[str], probabilities: Sequence[float]) -> None:
        """Choose the most probable language."""
        ordered = sorted(zip(codes, probabilities, strict=True), key=lambda pair: -pair[1])
        self.all_probabilities, self.sample = tuple(ordered), None
        self.code, self.probability = ordered[0]


@dataclass(frozen=True)
class WindowText:
    """The text of a window with its last output; `output.error` is set if there is none.

    `token_times`: start of each token of the segments, and end of the last one, in seconds; None if they are not known.
    """

    result: WindowResult
    segments: tuple[Segment, ...] | None
    output: RequestOutput
    window: Window | None = field(default=None, repr=False)
    token_times: list[float] | None = field(default=None, repr=False)


Aligner = Callable[["LLM", object, WindowText, SpeechRequest, str | None, int], Task[WindowText]]
"""Takes the engine, an item, its text, the request of the text, the language and the rate; returns the text with words."""


def window_task(
    llm: LLM,
    item: object,
    window: Window | None,
    rate: int,
    how: Decoding,
    language: SpokenLanguage,
    context: str,
    known: CompletionOutput | None = None,
) -> WideTask[WindowText]:
    """Detect the language if it is not known, then transcribe a window (None: `item` is the whole audio).

    A list of items is consecutive parts of the window. `known`: start of the answer, which is not generated again.
    """
    assert llm.speech is not None
    start, end = (0.0, 0.0) if window is None else (window.start / rate, window.end / rate)
    empty = WindowResult(start, end, "", (), 0, overlap=0.0 if window is None else window.overlap / rate)
    detection = llm.speech.language_detection_request() if language.code is None else None
    if detection is not None:
        language.sample = item if language.sample is None else language.sample
        codes = {llm.get_tokenizer().token_to_id(token): code for token, code in detection.allowed_tokens.items()}
        prompt = {"prompt": detection.prompt, "multi_modal_data": {"audio": [language.sample]}, "cache_salt": how.cache_salt}
        output = yield pooling_request(llm, prompt, PoolingParams(tuple(filter(None, codes))), {})
        if output.error or output.pooled is None:
            return WindowText(empty, None, output)
        language.set_probabilities(list(codes.values()), output.pooled.softmax(0).tolist())
    no_speech, silence = None, llm.speech.no_speech_request()
    if silence is not None and how.no_speech_threshold is not None:
        output = yield _request(llm, item, silence, _ONE_TOKEN, how.cache_salt)
        if output.error:
            return WindowText(empty, None, output)
        no_speech = probability_of_first(output)
    request, frames = how.make_request(language.code, context), llm.speech.frame_rule()
    attempts: list[Attempt] = []
    outputs: list[RequestOutput] = []
    for temperature in how.temperatures if frames is None else (0.0,):
        params = replace(how.params, temperature=temperature)
        if temperature and params.seed is None:  # a seed that does not depend on the batch
            params = replace(params, seed=round(start * 1000) + 1)
        if frames is not None:
            output = yield from frames_task(llm, item, request, frames, how.cache_salt)
        elif how.beam_size > 1 and not temperature:
            given = _beam_prompt(llm, item, request, how.cache_salt)
            output = yield from beam_task(llm, given, _with_processors(llm, params, request), how.beam_size)
        else:
            output = yield _request(llm, item, request, params, how.cache_salt, known)
            output = _joined(known, output)
        if output.error:
            return WindowText(empty, None, output)
        outputs.append(output)
        attempts.append(_judge(llm, output.outputs[0], request, temperature, how))
        if attempts[-1].rejected is None or _is_silence(no_speech, attempts[-1], how):
            break
    best = max(range(len(attempts)), key=lambda i: _rank(attempts[i]))
    skipped = "no_speech" if _is_silence(no_speech, attempts[best], how) else None
    result = replace(empty, attempts=tuple(attempts), accepted=best, no_speech_prob=no_speech, skipped=skipped)
    text = _with_text(llm, result, request, outputs[best], language, window, rate)
    if how.aligner is None or not text.result.text:
        return text
    return (yield from how.aligner(llm, item, text, request, language.code or language.spoken, rate))


def probability_of_first(output: RequestOutput) -> float | None:
    """Return the probability of the answer's first token."""
    answer = output.outputs[0]
    return None if not answer.logprobs else exp(answer.logprobs[0][answer.token_ids[0]].logprob)


def _judge(llm: LLM, answer: CompletionOutput, request: SpeechRequest, temperature: float, how: Decoding) -> Attempt:
    text = llm.get_tokenizer().decode(_text_tokens(answer, request), True)
    count = len(answer.token_ids)
    logprob = None if answer.cumulative_logprob is None or not count else answer.cumulative_logprob / count
    ratio, rejected = compression_ratio(text), None
    if how.compression_ratio_threshold is not None and ratio > how.compression_ratio_threshold:
        rejected = "compression_ratio"
    elif how.log_prob_threshold is not None and logprob is not None and logprob < how.log_prob_threshold:
        rejected = "avg_logprob"
    return Attempt(temperature, logprob, ratio, rejected)


def _is_silence(no_speech: float | None, attempt: Attempt, how: Decoding) -> bool:
    """Return whether "no speech" is probable and the answer unlikely."""
    if no_speech is None or how.no_speech_threshold is None or no_speech <= how.no_speech_threshold:
        return False
    least = how.log_prob_threshold
    return least is None or attempt.avg_logprob is None or attempt.avg_logprob < least


def _rank(attempt: Attempt) -> tuple[bool, bool, float]:
    """Return a sort key, largest for the best answer: accepted ones first, then those without repetition, then likely ones."""
    return attempt.rejected is None, attempt.rejected != "compression_ratio", attempt.avg_logprob or 0.0


def _with_text(
    llm: LLM,
    result: WindowResult,
    request: SpeechRequest,
    output: RequestOutput,
    language: SpokenLanguage,
    window: Window | None,
    rate: int,
) -> WindowText:
    assert llm.speech is not None
    answer, times, decode = output.outputs[0], request.times, llm.get_tokenizer().decode
    text, spoken = llm.speech.parse_transcript(decode(_text_tokens(answer, request), False), language.code)
    if spoken and result.start < language.place:
        language.spoken, language.place = spoken, result.start
    found: tuple[Segment, ...] | None = None
    if times is not None:
        tokens = answer_tokens(answer)
        logprobs = [entry[token].logprob for entry, token in zip(answer.logprobs or (), tokens, strict=False)]
        chosen = result.attempts[result.accepted]
        found = () if result.skipped else segments(tokens, times, decode, logprobs, chosen.temperature)
    text = "" if result.skipped else text
    finished = replace(
        result,
        text=text,
        num_tokens=len(answer.token_ids),
        num_prompt_tokens=len(output.prompt_token_ids),
        finish_reason=answer.finish_reason,
    )
    return WindowText(finished, found, output, window)


def answer_tokens(answer: CompletionOutput) -> list[int]:
    """Return the answer's tokens without the end token."""
    has_eos = answer.finish_reason == "stop" and answer.stop_reason is None
    return answer.token_ids[:-1] if has_eos else answer.token_ids


def _text_tokens(answer: CompletionOutput, request: SpeechRequest) -> list[int]:
    tokens, times = answer_tokens(answer), request.times
    return tokens if times is None else [token for token in tokens if token < times.first]


def answer_start(llm: LLM, answer: CompletionOutput, language: str | None, words: int) -> CompletionOutput | None:
    """Return the tokens of the first `words` words of an answer without timestamps, or None if there are none."""
    tokens, decode, speech = answer_tokens(answer), llm.get_tokenizer().decode, llm.speech
    assert speech is not None

    def first_words(count: int) -> list[str]:
        return split_words(speech.parse_transcript(decode(tokens[:count], False), language)[0].strip())

    kept, count = first_words(len(tokens))[:words], len(tokens)
    while count and (not kept or first_words(count) != kept):
        count -= 1
    if not count:
        return None
    logprobs = answer.logprobs and answer.logprobs[:count]
    total = None if not logprobs else sum(entry[token].logprob for entry, token in zip(logprobs, tokens, strict=False))
    return replace(answer, token_ids=tokens[:count], logprobs=logprobs, cumulative_logprob=total)


def _joined(known: CompletionOutput | None, output: RequestOutput) -> RequestOutput:
    """Return the output with the start of the answer that was given."""
    if known is None or output.error:
        return output
    answer = output.outputs[0]
    logprobs = None if known.logprobs is None or answer.logprobs is None else known.logprobs + answer.logprobs
    total = None if logprobs is None else (known.cumulative_logprob or 0.0) + (answer.cumulative_logprob or 0.0)
    tokens = known.token_ids + answer.token_ids
    return replace(output, outputs=[replace(answer, token_ids=tokens, logprobs=logprobs, cumulative_logprob=total)])


def _token_ids(llm: LLM, request: SpeechRequest, known: CompletionOutput | None) -> list[int]:
    """Return the prompt's tokens, followed by those of the known start of the answer."""
    speech = llm.speech
    assert speech is not None
    special = speech.adds_special_tokens and "audio" in speech.placeholder_ids  # an encoder-decoder model's prompt has none
    return [*llm.get_tokenizer().encode(request.prompt, special), *(known.token_ids if known is not None else ())]


def _beam_prompt(llm: LLM, item: object, request: SpeechRequest, cache_salt: str | None) -> dict[str, object]:
    ids = _token_ids(llm, request, None)
    return {"prompt_token_ids": ids, "multi_modal_data": {"audio": [item]}, "cache_salt": cache_salt}


def _request(
    llm: LLM,
    item: object,
    request: SpeechRequest,
    params: SamplingParams,
    cache_salt: str | None,
    known: CompletionOutput | None = None,
) -> RequestHandle:
    """Return the request for an answer about an item, a list of parts of one, or the encoder input of an open window."""
    items = item if isinstance(item, list) else [item]
    if len(items) > 1:
        assert llm.speech is not None
        mark = llm.get_tokenizer().decode([llm.speech.placeholder_ids["audio"]], False)
        request = replace(request, prompt=request.prompt.replace(mark, mark * len(items)))
    if known is not None:
        request = replace(request, suppressed_first=())
        if params.max_tokens is not None:
            params = replace(params, max_tokens=max(1, params.max_tokens - len(known.token_ids)))
    params = _with_processors(llm, params, request)
    if isinstance(item, MultiModalFeature):
        made = ProcessedPrompt(None, tuple(_token_ids(llm, request, known)), cross=item, salt=cache_salt or "")
        return RequestHandle(lambda: made, params)
    prompt = {"prompt": request.prompt} if known is None else {"prompt_token_ids": _token_ids(llm, request, known)}
    return llm.request({**prompt, "multi_modal_data": {"audio": items}, "cache_salt": cache_salt}, params)


def _with_processors(llm: LLM, params: SamplingParams, request: SpeechRequest) -> SamplingParams:
    """Return the parameters with the logits processors that this family's answers need."""
    processors = dict(params.processors)
    if request.allowed_tokens:
        ids = map(llm.get_tokenizer().token_to_id, request.allowed_tokens)
        processors[ALLOWED_TOKENS] = {"tokens": [token for token in ids if token is not None]}
    if request.suppressed or request.suppressed_first:
        processors[SUPPRESS_TOKENS] = {"tokens": list(request.suppressed), "first": list(request.suppressed_first)}
    if request.times is not None:
        times = request.times
        processors[TIMESTAMPS] = {"first": times.first, "none": times.none, "end": times.end, "latest": times.latest}
    return replace(with_logprobs(params), logits_processors=processors)
