"""Speech: the thinker answers a conversation in text, and the talker speaks the answer.

The thinker computes the prompt once more in one prefill, whose hidden states the talker reads: in Qwen2.5-Omni with the answer,
in Qwen3-Omni only if the prompt has images, videos or audio.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..callers.errors import ConfigError, ErrorInfo, InputError, SensoriumError, short_repr
from ..callers.repr_mixin import ReprMixin
from ..engine.frontend.arguments import Messages, as_conversations
from ..engine.frontend.input_processor import ParsedPrompt
from ..engine.frontend.processed_prompt import ProcessedPrompt
from ..engine.frontend.request import RequestInput
from ..engine.frontend.request_handle import RequestHandle
from ..engine.outputs import RequestOutput
from ..engine.pooling_requests import LayerStates, TokenVectors
from ..engine.sampling_params import SamplingParams
from ..engine.seeds import splitmix64
from ..engine.worker.talker_runner import MAX_CODES, Division, Frame, SpokenAnswer, TalkerRunner
from .run import Task, answer
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.engine import Engine

_NOTHING_SAMPLED = SamplingParams(max_tokens=1)
_UNUSED = (
    "n", "stop", "logprobs", "prompt_logprobs", "structured_outputs", "logits_processors", "repetition_detection", "bad_words",
)  # fmt: skip
"""Sampling parameters that have no meaning for codes of speech."""


@dataclass(frozen=True)
class SpokenWord:
    """A word and when it is spoken, in seconds. `word`: as written, or its phonemes if these were given."""

    word: str
    start: float
    end: float
    phonemes: str


@dataclass(frozen=True, repr=False)
class Speech(ReprMixin):
    """An answer as text and speech, or the speech of a text; with `stream_speak` a part of it.

    A part of an answer is the whole text with the next samples and frames. A part of a text is its next sentences.

    Args:
        text: the answer, or what is spoken; empty if phonemes were given.
        samples: float32 `[n]` in [-1, 1], one channel. Empty if there is nothing to say; with an error, those before it.
        sampling_rate: samples per second.
        error: why there is no speech, or not all of it; or None.
        output: the answer's request; of a text the last one, as each sentence has its own.
        codes: the frames of codes that the samples were made of: one code in Qwen2.5-Omni, several in Qwen3-Omni.
        phonemes: of a text, those that were spoken. words: of a text, with their times.
        phoneme_times: of a text: (phoneme, start, end) of all phonemes, spaces and marks included, in seconds.
    """

    text: str
    samples: Tensor
    sampling_rate: int
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)
    codes: tuple[Frame, ...] = field(default=(), repr=False)
    phonemes: str = field(default="", repr=False)
    words: tuple[SpokenWord, ...] = field(default=(), repr=False)
    phoneme_times: tuple[tuple[str, float, float], ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sampling_rate


@dataclass(frozen=True)
class _SpeechRequest:
    """A conversation whose answer is spoken. `params`: of the codes of speech. `seed`: of codes and noise."""

    handle: RequestHandle
    talker: TalkerRunner
    params: SamplingParams
    voice: str
    seed: int


def speech_requests(
    engine: Engine,
    messages: Messages | Sequence[Messages],
    sampling_params: SamplingParams | None = None,
    speech_params: SamplingParams | None = None,
    voice: str | None = None,
    **chat: Any,
) -> list[_SpeechRequest]:
    """Return one request per conversation. Conversations are those of `LLM.chat`.

    The published models speak well only after their own system prompt ("You are Qwen, a virtual human ..."), which their model
    cards quote.

    Args:
        sampling_params: of the text; None takes the checkpoint's defaults.
        speech_params: of the codes of speech. None samples as the published models do: temperature 0.9, top_k 40 and top_p 0.8
            (Qwen2.5-Omni) or top_k 50 (Qwen3-Omni), a repetition penalty of 1.05, and at most 4096 frames (82 s or 328 s). The
            other codes of Qwen3-Omni's frames are sampled with top_k 50 and top_p 0.8, or greedily if the temperature is 0.
            `seed` also determines the noise from which Qwen2.5-Omni's sound is made; None derives it from the engine's seed and
            the number of the conversation.
        voice: name of the speaker, in any case; None takes the checkpoint's first one.
        chat: further arguments of `LLM.chat`.

    Raises:
        InputError: an argument has a wrong type or value, or the voice is unknown.
        ConfigError: the model was loaded without its talker.
    """
    talker = engine.talker
    if talker is None:
        how = "wake the engine first" if engine.config.load_talker else "load the model with <<param=>>True"
        raise ConfigError(f"this engine has no talker; {how}", param="load_talker")
    check_type("sampling_params", sampling_params, SamplingParams, type(None))
    check_type("speech_params", speech_params, SamplingParams, type(None))
    check_type("voice", voice, str, type(None))
    text, sound = (sampling_params or engine.default_params).clone(), _speech_params(talker, speech_params)
    if text.n > 1:
        raise InputError(
            f"<<param=>>{text.n} is not supported by speak, which speaks one answer; leave n out", code="unsupported", param="n"
        )
    speaker = _find_voice(talker.model.voices, voice)
    conversations = as_conversations(messages)
    engine_seed = splitmix64(engine.config.seed)
    seeds = [engine_seed + i if sound.seed is None else sound.seed for i in range(len(conversations))]
    return [
        _SpeechRequest(engine.request(conversation, text, **chat), talker, sound, speaker, seed)
        for conversation, seed in zip(conversations, seeds, strict=True)
    ]


def _speech_params(talker: TalkerRunner, params: SamplingParams | None) -> SamplingParams:
    """Return a copy of the parameters, or how the published model samples. Raise InputError for those without a meaning."""
    if params is None:
        return SamplingParams.from_optional(**talker.model.sampling, max_tokens=MAX_CODES)
    plain = SamplingParams()
    unused = next((name for name in _UNUSED if getattr(params, name) != getattr(plain, name)), None)
    if unused is not None:
        raise InputError(f"<<param>>: {unused} has no meaning for codes of speech; leave it out", param="speech_params")
    return params.clone()


def _find_voice(voices: Sequence[str], name: str | None) -> str:
    voice = voices[0] if name is None else next((v for v in voices if v.lower() == name.lower()), None)
    if voice is None:
        raise InputError(
            f"<<param=>>{short_repr(name)} is unknown; this model has {', '.join(voices)}", code="unsupported", param="voice"
        )
    return voice


def speak_tasks(engine: Engine, messages: Messages | Sequence[Messages], *args: Any, **options: Any) -> list[Task[Speech]]:
    """Return one task per conversation; see `speech_requests` for the arguments and errors."""
    return [partial(_speak, request) for request in speech_requests(engine, messages, *args, **options)]


def stream_task(
    engine: Engine, messages: Messages, *args: Any, exact: bool = True, **options: Any
) -> tuple[Task[_SpokenAnswer], Callable[[_SpokenAnswer], Generator[Speech, None, None]]]:
    """Return the task that answers one conversation in text, and the function that speaks its result part by part.

    The first part has the text and no samples. Each further one has the next samples and frames. If there is an error, the last
    part has it.

    Args:
        exact: the samples of all parts together are those of `speak`. Qwen2.5-Omni's then need 9 s of later codes. False: its
            samples come from windows of codes, the first ones after 1 s of codes, and differ from those of `speak`.

    Raises:
        InputError, ConfigError: as `speech_requests`, and for several conversations.
    """
    check_type("exact", exact, bool)
    requests = speech_requests(engine, messages, *args, **options)
    if len(requests) != 1:
        reason = f"messages holds {len(requests)} conversations; one answer is streamed, so call it for each of them"
        raise InputError(reason, param="messages")
    (request,) = requests
    return partial(_answer, request), partial(_parts, request, "exact" if exact else "windows")


@dataclass(frozen=True)
class _SpokenAnswer:
    """An answer in text. `spoken`: what the talker reads; None if there is an error, or nothing to say."""

    speech: Speech
    spoken: SpokenAnswer | None = None

    @property
    def error(self) -> ErrorInfo | None:
        return self.speech.error


async def _answer(request: _SpeechRequest) -> _SpokenAnswer:
    """Generate text, and compute the hidden states that the talker reads."""
    handle, talker = request.handle, request.talker
    prompts = list[ProcessedPrompt]()
    handle.input = replace(handle.input, prepare=_keeping(handle.input.prepare, prompts))
    output = await answer(handle)
    nothing = Speech("", torch.zeros(0), talker.model.rate, output.error, output)
    if output.error is not None:
        return _SpokenAnswer(nothing)
    tokens, speech = output.outputs[0].token_ids, replace(nothing, text=output.outputs[0].text)
    if len(tokens) < 2:
        return _SpokenAnswer(speech)
    (prompt,) = prompts
    layer, hidden = talker.model.layer, torch.zeros(0)
    if layer is None or prompt.features:
        full_prompt = prompt if layer else replace(prompt, token_ids=(*prompt.token_ids, *tokens[:-1]))
        wanted = TokenVectors(normalize=False) if layer is None else LayerStates(layer)
        hidden_states = RequestInput(lambda: full_prompt, _NOTHING_SAMPLED, pooling=wanted)
        states = await answer(RequestHandle(hidden_states))
        if states.error is not None or states.pooled is None:
            return _SpokenAnswer(replace(speech, error=states.error))
        hidden = states.pooled
    return _SpokenAnswer(speech, SpokenAnswer(prompt.token_ids, tokens, hidden, prompt.features))


async def _speak(request: _SpeechRequest) -> Speech:
    """Answer in text, and speak the answer."""
    written = await _answer(request)
    if written.spoken is None:
        return written.speech
    try:
        codes, samples = request.talker.speak(written.spoken, request.voice, request.params, request.seed)
    except SensoriumError as error:
        return replace(written.speech, error=error.info)
    return replace(written.speech, samples=samples, codes=tuple(codes))


def _parts(request: _SpeechRequest, division: Division, written: _SpokenAnswer) -> Generator[Speech, None, None]:
    yield written.speech
    if written.spoken is None:
        return
    try:
        for codes, samples in request.talker.stream(written.spoken, request.voice, request.params, request.seed, division):
            yield replace(written.speech, samples=samples, codes=tuple(codes))
    except SensoriumError as error:
        yield replace(written.speech, error=error.info)


def _keeping(
    prepare: Callable[[], ProcessedPrompt | ParsedPrompt], prompts: list[ProcessedPrompt]
) -> Callable[[], ProcessedPrompt]:
    """Return a function that prepares a prompt with its media, and appends it to `prompts`."""

    def prepared() -> ProcessedPrompt:
        prepared_prompt = prepare()
        prompt = prepared_prompt.finish() if isinstance(prepared_prompt, ParsedPrompt) else prepared_prompt
        prompts[:] = [prompt]
        return prompt

    return prepared
