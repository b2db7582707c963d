"""Transcribes one window: detects its language, tries rising temperatures, and checks each answer with thresholds (gates)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from math import exp, inf
from typing import TYPE_CHECKING, Any

from ...engine.builtin_logits_processors import ALLOWED_TOKENS, BOOST_PHRASES, SUPPRESS_TOKENS, TIMESTAMPS
from ...engine.frontend.processed_prompt import ProcessedPrompt
from ...engine.frontend.request import RequestInput
from ...engine.frontend.request_handle import RequestHandle
from ...engine.outputs import CompletionOutput, RequestOutput
from ...engine.pooling_params import PoolingParams
from ...engine.sampling_params import SamplingParams
from ...mm.speech import SpeechRequest
from ...mm.types import MultiModalFeature
from ..doubt import compression_ratio, with_logprobs
from ..pooling import pooling_request
from ..run import answer
from .beams import search_beams
from .boost import boosted_output, max_tokens
from .frames import read_frames
from .merge import split_words, word_key
from .options import GREEDY, SpeechOptions
from .segments import Attempt, Segment, WindowResult, WindowText, segments
from .spoken_length import fast_seconds
from .windows import Window

if TYPE_CHECKING:
    from ...engine.engine import Engine

FATAL = frozenset({"engine_asleep", "engine_closed", "engine_dead"})  # error codes that end a live stream or a file
_MAX_EXCESS_SECONDS = 1.0  # by which the text of a window, said fast, may exceed the window's speech
_SWITCH = 0.5  # by which another language must be more probable than that of the window before
_SAME = 0.9  # least share of equal words of two answers that say the same
_ONE_TOKEN = replace(GREEDY, max_tokens=1)


@dataclass(frozen=True)
class Decoding:
    """How the windows of a call are decoded.

    Args:
        make_request: returns the request for a language and a context.
        aligner: adds the times of words to a window's segments; None: they are not requested.
        beam_size: beams at temperature 0.
        timestamped_request: as `make_request`, with timestamps: tried once if the first answer repeats itself. None: not tried.
        boost: arguments of `BoostPhrases`; None: no phrases are expected.
    """

    make_request: Callable[[str | None, str], SpeechRequest]
    options: SpeechOptions
    aligner: Aligner | None = None
    beam_size: int = 1
    timestamped_request: Callable[[str | None, str], SpeechRequest] | None = None
    boost: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class WindowInput:
    """Audio that is transcribed at once.

    Args:
        item: what the encoder gets: audio, a list of consecutive parts of the window, or the feature of an open window.
        window: None: `item` is the whole audio.
        context: the preceding text, or words to expect.
        answer_start: tokens with which the answer begins. They are not generated again.
        hypothesis: tokens of an earlier answer about this audio. Those that the answer has again take fewer steps.
    """

    item: object
    window: Window | None
    context: str
    answer_start: CompletionOutput | None = None
    hypothesis: Sequence[int] = ()

    def times(self, rate: int) -> tuple[float, float]:
        """Return its start and end in seconds."""
        return (0.0, 0.0) if self.window is None else (self.window.start / rate, self.window.end / rate)


@dataclass
class SpokenLanguage:
    """The language of an audio item.

    Args:
        code: given, or detected by a request of its own; it is in the prompts of all windows.
        probability: of the code; 1 if it was given, None if the model only names it.
        all_probabilities: code and probability of each language, the most probable first; None if it was not detected.
        spoken: the language that the first window's answer names. It is in no prompt, because windows run in any order.
        before: the language of the window before this one, if each has its own. It stays unless another is clearly likelier.
    """

    code: str | None
    probability: float | None = None
    all_probabilities: tuple[tuple[str, float], ...] | None = None
    sample: Any = None  # the window in which it is detected
    spoken: str | None = None
    spoken_from: float = inf  # seconds; start of the window whose answer names `spoken`
    before: str | None = None

    def set_probabilities(self, codes: Sequence[str], probabilities: Sequence[float]) -> None:
        """Choose the most probable language."""
        ordered = sorted(zip(codes, probabilities, strict=True), key=lambda pair: -pair[1])
        self.all_probabilities, self.sample = tuple(ordered), None
        self.follow(self.before)

    def follow(self, before: str | None) -> None:
        """Choose the most probable language, or `before`, that of the window before, if another is not clearly likelier."""
        if not self.all_probabilities:
            return
        best, likely = self.all_probabilities[0], dict(self.all_probabilities)
        stays = before in likely and best[1] - likely[before] < _SWITCH
        self.code, self.probability = (before, likely[before]) if before is not None and stays else best


@dataclass(frozen=True)
class _Answer:
    """An answer for a window. `is_likely`: by its log probability. `fits`: its text can be said in the speech of the window."""

    output: RequestOutput
    request: SpeechRequest
    attempt: Attempt
    text: str
    is_likely: bool
    fits: bool


Aligner = Callable[["Engine", object, WindowText, SpeechRequest, str | None, int], Awaitable[WindowText]]
"""Takes the engine, an item, its text, the request of the text, the language and the rate; returns the text with words."""


async def transcribe_window(engine: Engine, part: WindowInput, decoding: Decoding, language: SpokenLanguage) -> WindowText:
    """Detect the language if it is not known, then transcribe a window."""
    assert engine.speech is not None
    rate, salt = engine.speech.decode_spec.rate, decoding.options.cache_salt
    overlap = 0.0 if part.window is None else part.window.overlap / rate
    empty = WindowResult(*part.times(rate), "", (), 0, overlap=overlap)
    failed = await detect_language(engine, part.item, language, salt)
    if failed is not None:
        return WindowText(empty, None, failed)
    no_speech, silence = None, engine.speech.no_speech_request()
    if silence is not None and decoding.options.no_speech_threshold is not None:
        params = _with_processors(engine, _ONE_TOKEN, silence, None)
        output = await answer(_request(engine, part.item, silence, params, salt))
        if output.error:
            return WindowText(empty, None, output)
        no_speech = probability_of_first(output)
    answers = await _answers(engine, part, decoding, language.code, no_speech)
    if isinstance(answers, RequestOutput):
        return WindowText(empty, None, answers)
    best = max(range(len(answers)), key=lambda i: _rank(answers[i]))
    skipped = "no_speech" if _is_silence(no_speech, answers[best].attempt, decoding.options) else None
    attempts = tuple(answer.attempt for answer in answers)
    result = replace(empty, attempts=attempts, accepted=best, no_speech_prob=no_speech, skipped=skipped)
    text = _with_text(engine, result, answers[best], language, part.window)
    if decoding.aligner is None or not text.result.text:
        return text
    return await decoding.aligner(engine, part.item, text, answers[best].request, language.code or language.spoken, rate)


async def detect_language(
    engine: Engine, item: object, language: SpokenLanguage, cache_salt: str | None
) -> RequestOutput | None:
    """Detect the language in an item, or in the sample of another window that is detected now, if it is not known.

    Return the output of a request that failed, else None. A model that names the language itself needs no request.
    """
    assert engine.speech is not None
    detection = engine.speech.language_detection_request() if language.code is None else None
    if detection is None:
        return None
    language.sample = item if language.sample is None else language.sample
    codes = {engine.tokenizer.token_to_id(token): code for token, code in detection.allowed_tokens.items()}
    prompt = {"prompt": detection.prompt, "multi_modal_data": {"audio": [language.sample]}, "cache_salt": cache_salt}
    output = await answer(pooling_request(engine, prompt, PoolingParams(tuple(filter(None, codes))), {}))
    if output.error or output.pooled is None:
        return output
    language.set_probabilities(list(codes.values()), output.pooled.softmax(0).tolist())
    return None


async def _answers(
    engine: Engine, part: WindowInput, decoding: Decoding, language: str | None, no_speech: float | None
) -> list[_Answer] | RequestOutput:
    """Return the answers in the order of the attempts, or the output of a request that failed.

    If the first answer repeats itself, a second one is written with timestamps, which often end the repetition. If it says the
    same again, the repetition was spoken, and sampling would only lose it.
    """
    assert engine.speech is not None
    options, item, rate = decoding.options, part.item, engine.speech.decode_spec.rate
    request, frames = decoding.make_request(language, part.context), engine.speech.frame_rule()
    seconds = inf if part.window is None else _speech_seconds(part.window, rate)
    plan = [(temperature, request) for temperature in (options.temperatures if frames is None else (0.0,))]
    answers = list[_Answer]()
    while plan:
        temperature, request = plan.pop(0)
        params = replace(options.params, temperature=temperature)
        if temperature and params.seed is None:  # a seed that does not depend on the batch
            params = replace(params, seed=round(part.times(rate)[0] * 1000) + 1)
        if frames is not None:
            output = await read_frames(engine, item, request, frames, options.cache_salt, decoding.boost)
        elif decoding.beam_size > 1 and not temperature:
            prompt = _beam_prompt(engine, item, request, options.cache_salt)
            ruled = _with_processors(engine, params, request, decoding.boost)
            output = await search_beams(engine, prompt, ruled, decoding.beam_size)
        else:
            start = part.answer_start if not answers or request.times is None else None
            if params.draft_text is None:
                params = replace(params, draft_text=_expected(part.hypothesis, answers, start))
            output = await _sampled(engine, item, request, params, decoding, start)
        if output.error:
            return output
        answers.append(_judge(engine, output, request, temperature, options, seconds))
        last = answers[-1].attempt
        if last.rejected is None or _is_silence(no_speech, last, options) or _is_confirmed(answers):
            break
        if (
            len(answers) == 1
            and decoding.timestamped_request
            and last.rejected == "compression_ratio"
            and request.times is None
        ):
            plan.insert(0, (temperature, decoding.timestamped_request(language, part.context)))
    return answers


async def _sampled(
    engine: Engine,
    item: object,
    request: SpeechRequest,
    params: SamplingParams,
    decoding: Decoding,
    start: CompletionOutput | None,
) -> RequestOutput:
    """Return an answer about an item, `start` included, in which expected phrases are written where that is likely."""
    salt, boost = decoding.options.cache_salt, decoding.boost
    if start is not None:
        request = replace(request, suppressed_first=())
        boost = None if boost is None else {**boost, "before": start.token_ids}

    async def boosted(arguments: Mapping[str, Any], drafted: Sequence[int]) -> RequestOutput:
        drafts = replace(params, draft_text=list(drafted) or None, max_tokens=max_tokens(params, drafted))
        drafts = _with_processors(engine, drafts, request, arguments)
        return await answer(_request(engine, item, request, drafts, salt, start))

    plain = await answer(_request(engine, item, request, _with_processors(engine, params, request, None), salt, start))
    return _joined(start, await boosted_output(plain, boost, boosted))


def _expected(hypothesis: Sequence[int], answers: Sequence[_Answer], start: CompletionOutput | None) -> Sequence[int] | None:
    """Return what the next attempt probably says: what the last one said, or the hypothesis, after the start that is given."""
    tokens = answers[-1].output.outputs[0].token_ids if answers else hypothesis
    first_tokens = [] if start is None else list(start.token_ids)
    return (tokens[len(first_tokens) :] if list(tokens[: len(first_tokens)]) == first_tokens else tokens) or None


def _speech_seconds(window: Window, rate: int) -> float:
    pauses = sum(min(last, window.end) - max(first, window.start) for first, last in window.pauses)
    return (window.end - window.start - pauses) / rate


def probability_of_first(output: RequestOutput) -> float | None:
    """Return the probability of the answer's first token."""
    answer = output.outputs[0]
    return None if not answer.logprobs else exp(answer.logprobs[0][answer.token_ids[0]].logprob)


def _judge(
    engine: Engine, output: RequestOutput, request: SpeechRequest, temperature: float, options: SpeechOptions, seconds: float
) -> _Answer:
    """Check an answer. `seconds`: of speech in the window."""
    answer = output.outputs[0]
    text = engine.tokenizer.decode(_text_tokens(answer, request), True)
    count = len(answer.token_ids)
    logprob = None if answer.cumulative_logprob is None or not count else answer.cumulative_logprob / count
    ratio, rejected = compression_ratio(text), None
    is_likely = options.log_prob_threshold is None or logprob is None or logprob >= options.log_prob_threshold
    if options.compression_ratio_threshold is not None and ratio > options.compression_ratio_threshold:
        rejected = "compression_ratio"
    elif not is_likely:
        rejected = "avg_logprob"
    attempt = Attempt(temperature, logprob, ratio, rejected, timestamps=request.times is not None)
    return _Answer(output, request, attempt, text, is_likely, fast_seconds(text) <= seconds + _MAX_EXCESS_SECONDS)


def _is_confirmed(answers: Sequence[_Answer]) -> bool:
    """Return whether the second answer, with timestamps, says the same as the first, and both may have been said."""
    if len(answers) != 2 or not answers[1].attempt.timestamps or answers[0].attempt.timestamps:
        return False
    first, second = ([word_key(word) for word in split_words(answer.text)] for answer in answers)
    is_same = SequenceMatcher(None, first, second, autojunk=False).ratio() >= _SAME
    return is_same and all(answer.is_likely and answer.fits for answer in answers)


def _is_silence(no_speech: float | None, attempt: Attempt, options: SpeechOptions) -> bool:
    """Return whether "no speech" is probable and the answer unlikely."""
    if no_speech is None or options.no_speech_threshold is None or no_speech <= options.no_speech_threshold:
        return False
    least = options.log_prob_threshold
    return least is None or attempt.avg_logprob is None or attempt.avg_logprob < least


def _rank(answer: _Answer) -> tuple[bool, bool, bool, bool, float]:
    """Return a sort key, largest for the best answer.

    Accepted ones come first. Among rejected ones, a text that is too long for the speech is a loop. One that repeats itself and
    is likely, as a repeated sentence is, is better than an unlikely one without repetition, such as those of high temperatures.
    """
    attempt = answer.attempt
    repeats = attempt.rejected == "compression_ratio"
    return attempt.rejected is None, answer.fits, answer.is_likely, not repeats, attempt.avg_logprob or 0.0


def _with_text(
    engine: Engine, result: WindowResult, chosen: _Answer, language: SpokenLanguage, window: Window | None
) -> WindowText:
    assert engine.speech is not None
    answer, times, decode = chosen.output.outputs[0], chosen.request.times, engine.tokenizer.decode
    text, spoken = engine.speech.parse_transcript(decode(_text_tokens(answer, chosen.request), False), language.code)
    if spoken and result.start < language.spoken_from:
        language.spoken, language.spoken_from = spoken, result.start
    named = spoken or language.code or language.spoken
    text_segments: tuple[Segment, ...] | None = None
    tokens = answer_tokens(answer)
    logprobs = [entry[token].logprob for entry, token in zip(answer.logprobs or (), tokens, strict=False)]
    kept, special = set(_text_tokens(answer, chosen.request)), engine.tokenizer.all_special_ids
    rated = [(token, value) for token, value in zip(tokens, logprobs, strict=False) if token in kept and token not in special]
    if times is not None:
        text_segments = () if result.skipped else segments(tokens, times, decode, logprobs, chosen.attempt.temperature)
    text = "" if result.skipped else text
    finished = replace(
        result,
        text=text,
        num_tokens=len(answer.token_ids),
        num_prompt_tokens=len(chosen.output.prompt_token_ids),
        token_logprobs=() if result.skipped else tuple(rated),
        finish_reason=answer.finish_reason,
        language=named,
    )
    return WindowText(finished, text_segments, chosen.output, window)


def answer_tokens(answer: CompletionOutput) -> list[int]:
    """Return the answer's tokens without the end token."""
    has_eos = answer.finish_reason == "stop" and answer.stop_reason is None
    return answer.token_ids[:-1] if has_eos else answer.token_ids


def _text_tokens(answer: CompletionOutput, request: SpeechRequest) -> list[int]:
    tokens, times = answer_tokens(answer), request.times
    return tokens if times is None else [token for token in tokens if token < times.first]


def answer_start(engine: Engine, answer: CompletionOutput, language: str | None, words: int) -> CompletionOutput | None:
    """Return the tokens of the first `words` words of an answer without timestamps, or None if there are none."""
    tokens, decode, speech = answer_tokens(answer), engine.tokenizer.decode, engine.speech
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


def _joined(start: CompletionOutput | None, output: RequestOutput) -> RequestOutput:
    """Return the output with the start of the answer that was given."""
    if start is None or output.error:
        return output
    answer = output.outputs[0]
    logprobs = None if start.logprobs is None or answer.logprobs is None else start.logprobs + answer.logprobs
    total = None if logprobs is None else (start.cumulative_logprob or 0.0) + (answer.cumulative_logprob or 0.0)
    tokens = start.token_ids + answer.token_ids
    return replace(output, outputs=[replace(answer, token_ids=tokens, logprobs=logprobs, cumulative_logprob=total)])


def _token_ids(engine: Engine, request: SpeechRequest, start: CompletionOutput | None) -> list[int]:
    """Return the prompt's tokens, followed by those of the known start of the answer."""
    speech = engine.speech
    assert speech is not None
    special = speech.adds_special_tokens and "audio" in speech.placeholder_ids  # an encoder-decoder model's prompt has none
    return [*engine.tokenizer.encode(request.prompt, special), *(start.token_ids if start is not None else ())]


def _beam_prompt(engine: Engine, item: object, request: SpeechRequest, cache_salt: str | None) -> dict[str, object]:
    ids = _token_ids(engine, request, None)
    return {"prompt_token_ids": ids, "multi_modal_data": {"audio": [item]}, "cache_salt": cache_salt}


def _request(
    engine: Engine,
    item: object,
    request: SpeechRequest,
    params: SamplingParams,
    cache_salt: str | None,
    start: CompletionOutput | None = None,
) -> RequestHandle:
    """Return the request for an answer about an item, a list of parts of one, or the encoder input of an open window.

    Args:
        params: with the logits processors of `_with_processors`.
        start: what the answer begins with; its tokens count in `max_tokens`.
    """
    items = item if isinstance(item, list) else [item]
    if len(items) > 1:
        assert engine.speech is not None
        mark = engine.tokenizer.decode([engine.speech.placeholder_ids["audio"]], False)
        request = replace(request, prompt=request.prompt.replace(mark, mark * len(items)))
    if start is not None and params.max_tokens is not None:
        params = replace(params, max_tokens=max(1, params.max_tokens - len(start.token_ids)))
    if isinstance(item, MultiModalFeature):
        made = ProcessedPrompt(None, tuple(_token_ids(engine, request, start)), cross=(item,), salt=cache_salt or "")
        return RequestHandle(RequestInput(lambda: made, params))
    prompt = {"prompt": request.prompt} if start is None else {"prompt_token_ids": _token_ids(engine, request, start)}
    return engine.request({**prompt, "multi_modal_data": {"audio": items}, "cache_salt": cache_salt}, params)


def _with_processors(
    engine: Engine, params: SamplingParams, request: SpeechRequest, boost: Mapping[str, Any] | None
) -> SamplingParams:
    """Return the parameters with the logits processors that this family's answers need, and that of expected phrases.

    As in Whisper's own code, log probabilities are those among the tokens that these rules allow: the thresholds are for them.
    Only `allowed_tokens` are asked how probable they are among all tokens.
    """
    processors, mode = dict(params.processors), "processed_logprobs"
    if request.allowed_tokens:
        mode = "raw_logprobs"
        ids = map(engine.tokenizer.token_to_id, request.allowed_tokens)
        processors[ALLOWED_TOKENS] = {"tokens": [token for token in ids if token is not None]}
    if request.suppressed or request.suppressed_first:
        processors[SUPPRESS_TOKENS] = {"tokens": list(request.suppressed), "first": list(request.suppressed_first)}
    if request.times is not None:
        times = request.times
        processors[TIMESTAMPS] = {"first": times.first, "none": times.none, "end": times.end, "latest": times.latest}
    if boost is not None:  # last: phrases neither allow a token nor end a timestamp's turn
        processors[BOOST_PHRASES] = boost
    return replace(with_logprobs(params), logits_processors=processors, logprobs_mode=mode)
