"""Audio to text with language and timestamps, for every model that transcribes speech."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from ..engine.builtin_logits_processors import ALLOWED_TOKENS, SUPPRESS_TOKENS, TIMESTAMPS
from ..engine.frontend.request_handle import RequestHandle
from ..engine.sampling_params import SamplingParams
from ..engine.types import RequestOutput
from ..mm.errors import ConfigError, ErrorInfo, InputError, hint, short_repr
from ..mm.parse import is_item_list
from ..mm.repr_mixin import ReprMixin
from ..mm.speech import SpeechRequest, TimestampRule, language_code
from .doubt import TextResult, compression_ratio, with_logprobs
from .tasks import Task, error_of_task
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

_GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
_TASKS = ("transcribe", "translate")
_ONE_TOKEN = replace(_GREEDY, max_tokens=1)


@dataclass(frozen=True, repr=False)
class Segment(ReprMixin):
    """The text between two timestamps, with the names of faster-whisper.

    Args:
        start, end: seconds; `end` is None if the answer stopped before the closing timestamp.
        id: number of the segment, from 1.
        tokens: of the text, without timestamps.
        avg_logprob: mean log probability of these tokens.
        temperature: of the sampling.
    """

    start: float
    end: float | None
    text: str
    id: int = field(default=0, repr=False, compare=False)
    tokens: tuple[int, ...] = field(default=(), repr=False, compare=False)
    avg_logprob: float | None = field(default=None, repr=False, compare=False)
    temperature: float = field(default=0.0, repr=False, compare=False)
    seek, words, no_speech_prob = 0, None, None  # one window is read at a time; the others are not computed

    @property
    def compression_ratio(self) -> float:
        return compression_ratio(self.text)


@dataclass(frozen=True)
class TranscriptionInfo:
    """Language and duration of a transcribed audio item.

    Args:
        language: the language code, or None if the model does not say.
        language_probability: 1 if the caller gave the language, else None.
        duration: length of the audio in seconds.
    """

    language: str | None
    language_probability: float | None
    duration: float


@dataclass(frozen=True, repr=False)
class Transcript(TextResult):
    """The text of one audio item. `doubt` says why it is probably wrong, as on noise; its thresholds are Whisper's.

    Args:
        text: empty if there is an error.
        language: the language code, or None if the model does not say.
        segments: in order, or None if timestamps were not requested.
        error: why there is no text, or None.
        output: the request's output, with tokens and timings.
        language_probability: as in TranscriptionInfo.
    """

    text: str
    language: str | None
    segments: tuple[Segment, ...] | None
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)
    language_probability: float | None = field(default=None, repr=False)

    min_avg_logprob: ClassVar[float] = -1.0
    max_compression_ratio: ClassVar[float] = 2.4

    @property
    def info(self) -> TranscriptionInfo:
        """The language and the duration under faster-whisper's names."""
        duration = sum(item.seconds for item in self.output.items)
        return TranscriptionInfo(self.language, self.language_probability, duration)


def transcribe_tasks(
    llm: LLM,
    audio: object,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool = False,
    context: str = "",
    sampling_params: SamplingParams | None = None,
) -> list[Task[Transcript]]:
    """Return one task per audio item, in order; they run as one batch.

    An item that cannot be read, or is longer than the model's window, gives a Transcript with `error`.

    Args:
        audio: an item or a list of items: paths, URLs, encoded bytes, samples at the model's rate, or `(samples, rate)`.
        language: the language spoken in all items, as a code or an English name; None detects it if the model can.
        task: "transcribe", or "translate" into English if the model can.
        timestamps: also return when each segment was spoken, if the model can.
        context: names and words to expect, or the preceding text; control tokens in it are removed.
        sampling_params: None for greedy sampling.

    Raises:
        ConfigError: the model does not transcribe speech.
        InputError: an unknown language or task, an argument that this model cannot honour, a context that is too long, or an
            argument of a wrong type.
    """
    speech = llm.speech
    if speech is None:
        raise ConfigError(f"{llm.config.model} does not transcribe speech; use generate or chat")
    check_type("timestamps", timestamps, bool)
    check_type("context", context, str)
    check_type("sampling_params", sampling_params, SamplingParams, type(None))
    if task in _TASKS and task not in speech.tasks:
        reason = f"task={task!r}, but this model can only {', '.join(speech.tasks)}; use another model for that"
        raise InputError(reason, param="task")
    if task not in speech.tasks:
        raise InputError(f"task={short_repr(task)} is not one this model knows; {hint(task, speech.tasks)}", param="task")
    if timestamps and not speech.has_timestamps:
        raise InputError("this model writes no timestamps; leave timestamps out", param="timestamps")
    if language is not None and not speech.takes_language:
        raise InputError("this model detects the language itself; leave language out", param="language")
    if context and not speech.takes_context:
        raise InputError("the prompt of this model has no place for words to expect; leave context out", param="context")
    items = list(audio) if is_item_list("audio", audio) else [audio]  # type: ignore[call-overload]
    code = None if language is None else language_code(language, speech.languages)
    detection, context = speech.language_detection_request() if code is None else None, _clean_context(llm, context)

    def make_request(language: str | None) -> SpeechRequest:
        return speech.transcription_request(language, task, timestamps, context)

    params = sampling_params or _GREEDY
    return [_transcribe_task(llm, i, item, make_request, code, detection, params) for i, item in enumerate(items)]


def _transcribe_task(
    llm: LLM,
    index: int,
    item: object,
    make_request: Callable[[str | None], SpeechRequest],
    language: str | None,
    detection: SpeechRequest | None,
    params: SamplingParams,
) -> Task[Transcript]:
    """Detect the language with a request of one token if it is not known, then transcribe."""
    probability = None if language is None else 1.0
    if detection is not None:
        detected = yield _request(llm, item, detection, _ONE_TOKEN)
        if detected.error:
            return Transcript("", None, None, error_of_task(detected, index), detected)
        languages = {llm.get_tokenizer().token_to_id(token): code for token, code in detection.allowed_tokens.items()}
        language = languages[detected.outputs[0].token_ids[0]]
    request = make_request(language)
    output = yield _request(llm, item, request, params)
    if output.error:
        return Transcript("", language, None, error_of_task(output, index), output)
    return replace(_transcript(llm, request, language, output, params.temperature), language_probability=probability)


def _request(llm: LLM, item: object, request: SpeechRequest, params: SamplingParams) -> RequestHandle:
    prompt = {"prompt": request.prompt, "multi_modal_data": {"audio": [item]}}
    return llm.request(prompt, _with_processors(llm, params, request))


def _clean_context(llm: LLM, context: str) -> str:
    """Remove control tokens. Raise InputError if the context leaves less than half of the model's positions."""
    text = llm.get_tokenizer().remove_special_tokens(context)
    count, limit = len(llm.get_tokenizer().encode_ordinary(text)), llm.max_model_len // 2 - 1
    if count > limit:
        reason = f"the context takes {count} tokens, but only {limit} leave room for the transcript; shorten it"
        raise InputError(reason, code="too_long", param="context")
    return text


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


def _transcript(
    llm: LLM, request: SpeechRequest, language: str | None, output: RequestOutput, temperature: float
) -> Transcript:
    assert llm.speech is not None
    answer, times = output.outputs[0], request.times
    has_eos = answer.finish_reason == "stop" and answer.stop_reason is None
    tokens = answer.token_ids[:-1] if has_eos else answer.token_ids
    text_tokens = tokens if times is None else [token for token in tokens if token < times.first]
    decode = llm.get_tokenizer().decode
    text, spoken_language = llm.speech.parse_transcript(decode(text_tokens, False), language)
    found = None
    if times is not None:
        logprobs = [entry[token].logprob for entry, token in zip(answer.logprobs or (), tokens, strict=False)]
        found = segments(tokens, times, decode, logprobs, temperature)
    return Transcript(text, spoken_language, found, None, output)


def segments(
    tokens: Sequence[int],
    times: TimestampRule,
    decode: Callable[[Sequence[int]], str],
    logprobs: Sequence[float] = (),
    temperature: float = 0.0,
) -> tuple[Segment, ...]:
    """Split an answer at its timestamp tokens. `logprobs`: of each token, if they are known."""
    found: list[Segment] = []
    start, begin = 0.0, 0

    def add(end: float | None, stop: int) -> None:
        text = decode(tokens[begin:stop]).strip()
        if stop > begin and (text or end is not None):
            mean = sum(logprobs[begin:stop]) / (stop - begin) if logprobs else None
            found.append(Segment(start, end, text, len(found) + 1, tuple(tokens[begin:stop]), mean, temperature))

    for place, token in enumerate(tokens):
        if token >= times.first:
            time = round((token - times.first) * times.step, 3)
            add(time, place)
            start, begin = time, place + 1
    add(None, len(tokens))
    return tuple(found)
