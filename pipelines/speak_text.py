"""`LLM.speak` of models that turn texts into speech: a request per sentence, with the style of a voice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..callers.errors import ConfigError, InputError, check_utf8, short_repr, typed
from ..engine.frontend.request_handle import RequestHandle
from ..engine.outputs import RequestOutput
from ..engine.pooling_requests import SpokenPrompt
from ..engine.sampling_params import SamplingParams
from ..engine.seeds import splitmix64
from ..engine.voices import Voice, Voices
from .pooling import failed_request
from .run import Task, answer
from .speak import Speech, SpokenWord
from .speech.espeak import LANGUAGES, espeak
from .speech.misaki import misaki
from .speech.phonemes import PhonemeWord, divide, split_first_part, words_of_phonemes, words_of_text
from .validation import check_function, check_number, check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine

_NOTHING_SAMPLED = SamplingParams(max_tokens=1)
_SLOWEST, _FASTEST = 0.25, 4.0
_MAX_CHARACTERS = 1 << 16  # of a text, about an hour


@dataclass(frozen=True)
class SpeakTextOptions:
    """Options of `speak` and `stream_speak` for models that turn texts into speech.

    Args:
        voice: name of a voice, several names joined by commas (the mean of these voices), a Path of a voice file, or a tensor
            `[phonemes, 1, style]`. None: the checkpoint's first voice.
        speed: from 0.25 to 4; 2 halves the durations.
        phonemes: one string of phonemes or a list of them, in place of texts.
        language: of the texts, as espeak-ng names it ("en-us", "fr-fr"). None: the voice's language, by the first letter of its
            name (a: American English, b: British English, e: Spanish, f: French, h: Hindi, i: Italian, p: Portuguese).
        phonemizer: "misaki" (English; the package misaki must be installed), or a function that is used in place of espeak-ng.
            It gets words without punctuation and returns their phonemes, words separated by spaces.
        seed: of the noise in the audio. None: the engine's seed.
    """

    voice: Voice | None = None
    speed: float = 1.0
    phonemes: str | Sequence[str] | None = None
    language: str | None = None
    phonemizer: Callable[[str], str] | Literal["misaki"] | None = None
    seed: int | None = None


@dataclass(frozen=True)
class _Sentences:
    """A text to speak. `words`: returns its words and punctuation. `voice`: styles `[phonemes, style]`."""

    engine: Engine
    voices: Voices
    words: Callable[[], list[PhonemeWord]]
    voice: Tensor
    speed: float
    seed: int

    def parts(self) -> list[tuple[PhonemeWord, ...]]:
        """Return the parts of the text, each spoken by one request. Raise InputError for an empty text."""
        limit = max(1, int(self.voices.rule.max_phonemes * min(1.0, self.speed)))
        words = self.words()
        parts = list(divide(words, limit)) if any(map(str.isalpha, "".join(word.phonemes for word in words))) else []
        parts = [part for part in parts if any(word.phonemes.strip() for word in part)]  # many spaces may be a part
        if not parts:
            raise InputError(
                "there is nothing to speak in the text; give one with words", code="invalid_value", param="messages"
            )
        return parts

    def request(self, part: Sequence[PhonemeWord]) -> tuple[str, RequestHandle]:
        """Return the phonemes of a part, and the request that speaks them."""
        phonemes, rule = "".join(word.phonemes for word in part).rstrip(), self.voices.rule
        ids = [rule.edge, *(rule.tokens[phoneme] for phoneme in phonemes), rule.edge]
        handle = self.engine.request({"prompt_token_ids": ids}, _NOTHING_SAMPLED)
        style = self.voices.style(self.voice, len(phonemes))
        handle.input = replace(handle.input, pooling=SpokenPrompt(style, float(self.speed), self.seed))
        return phonemes, handle


def text_requests(engine: Engine, texts: object, options: SpeakTextOptions) -> list[_Sentences]:
    """Return what to speak, for each text.

    Raises:
        InputError: an argument has a wrong type or value, the voice is unknown, or a phoneme is.
        ConfigError: the text needs espeak-ng or misaki, which is not installed.
    """
    voices = engine.voices
    assert voices is not None
    check_number("speed", options.speed, _SLOWEST, _FASTEST)
    check_type("seed", options.seed, int, type(None))
    check_type("language", options.language, str, type(None))
    voice, rule = voices.find(options.voice), voices.rule
    if (texts is None) == (options.phonemes is None):
        raise InputError("give either a text or <<param>>", param="phonemes")
    if options.phonemes is not None:
        makers = [partial(words_of_phonemes, given, rule) for given in _strings("phonemes", options.phonemes)]
        for make in makers:
            make()
    else:
        phonemize = _phonemizer(options, voices)
        makers = [partial(words_of_text, text, phonemize, rule) for text in _strings("messages", texts)]
    seed = splitmix64(engine.config.seed) if options.seed is None else options.seed
    return [_Sentences(engine, voices, make, voice, options.speed, seed % 2**63) for make in makers]


def _strings(param: str, value: object) -> list[str]:
    """Return one string or several as a list. Raise InputError for other types, and for empty and too long ones."""
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(string, str) for string in strings):
        raise InputError(
            f"<<param>> must be a string or a list of strings, not {typed(value)}", code="invalid_value", param=param
        )
    for string in strings:
        check_utf8(string, param)
        if not string.strip():
            raise InputError(f"<<param=>>{short_repr(string)} is empty; give words", code="invalid_value", param=param)
        if len(string) > _MAX_CHARACTERS:
            reason = f"<<param>> has a text of {len(string)} characters, at most {_MAX_CHARACTERS} are possible; divide it"
            raise InputError(reason, code="over_limit", param=param, limit=_MAX_CHARACTERS, value=len(string))
    return list(strings)


def _phonemizer(options: SpeakTextOptions, voices: Voices) -> Callable[[str], str]:
    if options.phonemizer is not None and options.phonemizer != "misaki":
        phonemizer = check_function("phonemizer", options.phonemizer)

        def call(text: str) -> str:
            phonemes = phonemizer(text)
            check_type("phonemizer", phonemes, str)
            return str(phonemes)

        return call
    name = options.voice if isinstance(options.voice, str) else (voices.names[0] if options.voice is None else "")
    language = options.language or LANGUAGES.get(name[:1])
    if language is None:
        reason = f"the language of the voice {short_repr(options.voice)} is not read here; give phonemes, or <<param>>"
        raise InputError(reason, code="unsupported", param="language")
    if options.phonemizer != "misaki":
        return partial(espeak().phonemes, language=language)
    if language not in ("en-us", "en-gb"):
        reason = f"<<param>> misaki reads English (en-us, en-gb), not {short_repr(language)}; leave it out, or give phonemes"
        raise InputError(reason, code="unsupported", param="phonemizer", value=language)
    return misaki(language)


def text_tasks(engine: Engine, texts: object, options: SpeakTextOptions) -> list[Task[Speech]]:
    """Return one task per text; see `text_requests`. A text that cannot be spoken has an error."""
    return [partial(_speak_all, sentences) for sentences in text_requests(engine, texts, options)]


def stream_tasks(engine: Engine, texts: object, options: SpeakTextOptions) -> Iterator[Task[Speech]]:
    """Return a task for each part of one text; see `split_first_part`. Raise InputError as `text_requests`, or for several."""
    requests = text_requests(engine, texts, options)
    if len(requests) != 1:
        raise InputError(f"<<param>> holds {len(requests)} texts; one is streamed, so call it for each", param="messages")
    (sentences,) = requests
    return (partial(_speak, sentences, part) for part in split_first_part(sentences.parts()))


async def _speak_all(sentences: _Sentences) -> Speech:
    spoken = list[Speech]()
    try:
        parts = sentences.parts()
    except (InputError, ConfigError) as error:
        return _nothing(sentences, await answer(failed_request(error)))
    for part in parts:
        spoken.append(await _speak(sentences, part))
        if spoken[-1].error is not None:
            break
    return _joined(spoken)


def _nothing(sentences: _Sentences, output: RequestOutput, text: str = "", phonemes: str = "") -> Speech:
    return Speech(text, torch.zeros(0), sentences.voices.rule.rate, output.error, output, phonemes=phonemes)


async def _speak(sentences: _Sentences, part: Sequence[PhonemeWord]) -> Speech:
    """Speak a part of a text. Times count from its start."""
    rule = sentences.voices.rule
    phonemes, handle = sentences.request(part)
    output = await answer(handle)
    speech = _nothing(sentences, replace(output, pooled=None), _written(part), phonemes)
    if output.error is not None or output.pooled is None:
        return speech
    frames, samples = output.pooled.split((len(phonemes) + 2, len(output.pooled) - len(phonemes) - 2))
    bounds = [count * rule.frame / rule.rate for count in frames.cumsum(0).tolist()]  # the first one: after the edge
    times = tuple((phoneme, start, end) for phoneme, (start, end) in zip(phonemes, pairwise(bounds[:-1]), strict=True))
    return replace(speech, samples=samples.clone(), words=tuple(_timed(part, times)), phoneme_times=times)


def _timed(part: Sequence[PhonemeWord], times: Sequence[tuple[str, float, float]]) -> Iterator[SpokenWord]:
    """Yield the words of a part with their times; marks are none."""
    at = 0
    for word in part:
        spoken = word.phonemes.strip()
        first = at + len(word.phonemes) - len(word.phonemes.lstrip())
        if any(phoneme.isalpha() for phoneme in spoken):
            yield SpokenWord(word.text or spoken, times[first][1], times[first + len(spoken) - 1][2], spoken)
        at += len(word.phonemes)


def _written(part: Sequence[PhonemeWord]) -> str:
    return "".join(word.text + " " * word.phonemes.endswith(" ") for word in part).strip()


def _joined(spoken: Sequence[Speech]) -> Speech:
    """Return parts of a text as one."""
    parts, seconds = list[Speech](), 0.0
    for part in spoken:
        parts.append(later(part, seconds))
        seconds += part.seconds
    return replace(
        parts[-1],
        text=" ".join(part.text for part in parts).strip(),
        samples=torch.cat([part.samples for part in parts]),
        phonemes=" ".join(part.phonemes for part in parts),
        words=tuple(word for part in parts for word in part.words),
        phoneme_times=tuple(time for part in parts for time in part.phoneme_times),
    )


def later(part: Speech, seconds: float) -> Speech:
    """Return a part with its times shifted by this many seconds."""
    words = tuple(replace(word, start=word.start + seconds, end=word.end + seconds) for word in part.words)
    times = tuple((phoneme, start + seconds, end + seconds) for phoneme, start, end in part.phoneme_times)
    return replace(part, words=words, phoneme_times=times)
