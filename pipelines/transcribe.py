"""Sounds to text, with language and times, for every family that writes down speech. Knows no family, and no window but one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..engine.sampling_params import SamplingParams
from ..engine.ticket import Job
from ..engine.token_rules import ONLY, SUPPRESS, TIMES
from ..engine.types import RequestOutput
from ..mm.errors import ConfigError, InputError, hint
from ..mm.parse import is_several
from ..mm.speech import SpeechRequest, TimestampRule, code_of
from .asking import Asking
from .wishes import check

if TYPE_CHECKING:
    from ..engine.llm import LLM

_GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
_TASKS = ("transcribe", "translate")
_ONE_TOKEN = replace(_GREEDY, max_tokens=1)


@dataclass(frozen=True)
class Segment:
    """A part of a sound that the model wrote down in one go. Seconds; `end` is None where the answer broke off."""

    start: float
    end: float | None
    text: str


@dataclass(frozen=True)
class Transcript:
    """What was said in one sound.

    Args:
        language: its code, None where the model does not say.
        segments: in order, None unless times were asked for.
        error: why there is no text, or None.
        output: the answer as the engine gave it, with tokens and the seconds of each stage.

    `finish_reason`: of the answer; "length" of a text that is cut off where no more tokens are allowed.
    """

    text: str
    language: str | None
    segments: tuple[Segment, ...] | None
    error: str | None
    output: RequestOutput

    @property
    def finish_reason(self) -> str | None:
        return self.output.outputs[0].finish_reason


def transcripts(
    llm: LLM,
    sounds: object,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool = False,
    context: str = "",
    sampling_params: SamplingParams | None = None,
) -> list[Asking[Transcript]]:
    """Write down one sound or a list of them, in one batch, in the order given.

    Args:
        sounds: each a path, URL, encoded bytes, samples at the model's rate, or `(samples, rate)`.
        language: spoken in all of them, as a code or an English name; None: found out where the model can.
        task: "transcribe", or "translate" to English where the model can.
        timestamps: also say when each segment was spoken, where the model can.
        context: names and words to expect, or what was said before; control tokens in it are left out.
        sampling_params: None for greedy.

    A sound that cannot be read, or is longer than the model takes at once, has a transcript with `error` set.

    Raises:
        ConfigError: a model that does not write down speech.
        InputError: an unknown language or task, timestamps of a model that has none, a context that is too long, an
            argument of another type.
    """
    speech = llm.speech
    if speech is None:
        raise ConfigError(f"{llm.config.model} does not write down speech; ask it with generate or chat")
    check("timestamps", timestamps, bool)
    check("context", context, str)
    check("sampling_params", sampling_params, SamplingParams, type(None))
    if task in _TASKS and task not in speech.tasks:
        raise InputError(f"task={task!r}, but this model can only {', '.join(speech.tasks)}; take another for that")
    if task not in speech.tasks:
        raise InputError(f"task={task!r} is not one this model knows; {hint(task, speech.tasks)}")
    if timestamps and not speech.has_timestamps:
        raise InputError("this model writes no times; leave timestamps out")
    given = list(sounds) if is_several("audio", sounds) else [sounds]  # type: ignore[call-overload]
    code = None if language is None else code_of(language, speech.languages)
    detection, words = speech.detection() if code is None else None, _cleaned(llm, context)

    def ask(spoken: str | None) -> SpeechRequest:
        return speech.transcription(spoken, task, timestamps, words)

    return [_heard(llm, sound, ask, code, detection, sampling_params or _GREEDY) for sound in given]


def _heard(
    llm: LLM,
    sound: object,
    ask: Callable[[str | None], SpeechRequest],
    language: str | None,
    detection: SpeechRequest | None,
    params: SamplingParams,
) -> Asking[Transcript]:
    if detection is not None:
        found = yield _job(llm, sound, detection, _ONE_TOKEN)
        if found.error:
            return Transcript("", None, None, found.error, found)
        meant = {llm.get_tokenizer().token_to_id(token): code for token, code in detection.only.items()}
        language = meant[found.outputs[0].token_ids[0]]
    asked = ask(language)
    output = yield _job(llm, sound, asked, params)
    return _written(llm, asked, language, output)


def _job(llm: LLM, sound: object, asked: SpeechRequest, params: SamplingParams) -> Job:
    prompt = {"prompt": asked.prompt, "multi_modal_data": {"audio": [sound]}}
    return llm.job(prompt, _ruled(llm, params, asked))


def _cleaned(llm: LLM, context: str) -> str:
    """Without control tokens; InputError where it leaves less than half of the model's positions for all else."""
    words = llm.get_tokenizer().without_specials(context)
    count, most = len(llm.get_tokenizer().encode_plain(words)), llm.max_model_len // 2 - 1
    if count > most:
        raise InputError(f"the context takes {count} tokens, at most {most} leave room for what is said; shorten it")
    return words


def _ruled(llm: LLM, params: SamplingParams, asked: SpeechRequest) -> SamplingParams:
    """The parameters with the rules that the family's answers obey."""
    rules = dict(params.processors)
    if asked.only:
        ids = map(llm.get_tokenizer().token_to_id, asked.only)
        rules[ONLY] = {"tokens": [token for token in ids if token is not None]}
    if asked.suppressed or asked.suppressed_first:
        rules[SUPPRESS] = {"tokens": list(asked.suppressed), "first": list(asked.suppressed_first)}
    if asked.times is not None:
        times = asked.times
        rules[TIMES] = {"first": times.first, "none": times.none, "end": times.end, "latest": times.latest}
    return replace(params, logits_processors=rules)


def _written(llm: LLM, asked: SpeechRequest, language: str | None, output: RequestOutput) -> Transcript:
    if output.error or llm.speech is None:
        return Transcript("", language, None, output.error, output)
    answer, times = output.outputs[0], asked.times
    ended = answer.finish_reason == "stop" and answer.stop_reason is None
    tokens = answer.token_ids[:-1] if ended else answer.token_ids  # the token that ends it is no text
    words = tokens if times is None else [token for token in tokens if token < times.first]
    decode = llm.get_tokenizer().decode
    text, spoken = llm.speech.transcript(decode(words, False), language)
    return Transcript(text, spoken, None if times is None else segments(tokens, times, decode), None, output)


def segments(tokens: Sequence[int], times: TimestampRule, decode: Callable[[Sequence[int]], str]) -> tuple[Segment, ...]:
    """The parts of an answer between its times."""
    found: list[Segment] = []
    start, words = 0.0, []
    for token in tokens:
        if token < times.first:
            words.append(token)
            continue
        time = round((token - times.first) * times.step, 3)
        if words:
            found.append(Segment(start, time, decode(words).strip()))
        start, words = time, []
    text = decode(words).strip()
    return (*found, Segment(start, None, text)) if text else tuple(found)
