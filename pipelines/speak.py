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

from ..engine.frontend.arguments import Messages, as_conversations
from ..engine.frontend.input_processor import ParsedPrompt
from ..engine.frontend.processed_prompt import ProcessedPrompt
from ..engine.frontend.request_handle import RequestHandle
from ..engine.pooling_params import PoolingParams
from ..engine.sampling_params import SamplingParams
from ..engine.seeds import splitmix64
from ..engine.types import RequestOutput
from ..engine.worker.talker_runner import MAX_CODES, Division, Frame, SpokenAnswer, TalkerRunner
from ..mm.errors import ConfigError, ErrorInfo, InputError, SensoriumError, short_repr
from ..mm.repr_mixin import ReprMixin
from .tasks import Task
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

_STATES = PoolingParams(pooling="tokens", normalize=False)
_NOTHING_SAMPLED = SamplingParams(max_tokens=1)
_UNUSED = (
    "n", "stop", "logprobs", "prompt_logprobs", "structured_outputs", "logits_processors", "repetition_detection", "bad_words",
)  # fmt: skip
"""Sampling parameters that have no meaning for codes of speech."""


@dataclass(frozen=True, repr=False)
class Speech(ReprMixin):
    """An answer as text and speech, or with `stream_speak` a part of it: the whole text, and the next samples and frames.

    Args:
        text: the answer.
        samples: float32 `[n]` in [-1, 1], one channel. Empty if there is an error, or nothing to say.
        sampling_rate: samples per second.
        error: why there is no speech, or None.
        output: the answer's request.
        codes: the frames of codes that the samples were made of: one code in Qwen2.5-Omni, several in Qwen3-Omni.
    """

    text: str
    samples: Tensor
    sampling_rate: int
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)
    codes: tuple[Frame, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sampling_rate


@dataclass(frozen=True)
class _Request:
    """A conversation whose answer is spoken. `params`: of the codes of speech. `seed`: of codes and noise."""

    handle: RequestHandle
    talker: TalkerRunner
    params: SamplingParams
    voice: str
    seed: int


def speech_requests(
    llm: LLM,
    messages: Messages | Sequence[Messages],
    sampling_params: SamplingParams | None = None,
    speech_params: SamplingParams | None = None,
    voice: str | None = None,
    **chat: Any,
) -> list[_Request]:
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
    talker = llm.talker
    if talker is None:
        how = "wake the engine first" if llm.config.load_talker else "load the model with load_talker=True"
        raise ConfigError(f"this engine has no talker; {how}", param="load_talker")
    check_type("sampling_params", sampling_params, SamplingParams, type(None))
    check_type("speech_params", speech_params, SamplingParams, type(None))
    check_type("voice", voice, str, type(None))
    text, sound = (sampling_params or llm.default_params).clone(), _speech_params(talker, speech_params)
    if text.n > 1:
        raise InputError(f"n={text.n} is not supported by speak, which speaks one answer; leave n out", param="n")
    speaker = _find_voice(talker.model.voices, voice)
    conversations = as_conversations(messages)
    own = splitmix64(llm.config.seed)
    seeds = [own + i if sound.seed is None else sound.seed for i in range(len(conversations))]
    return [
        _Request(llm.request(one, text, **chat), talker, sound, speaker, seed)
        for one, seed in zip(conversations, seeds, strict=True)
    ]


def _speech_params(talker: TalkerRunner, given: SamplingParams | None) -> SamplingParams:
    """Return a copy of the parameters, or how the published model samples. Raise InputError for those without a meaning."""
    if given is None:
        return SamplingParams.from_optional(**talker.model.sampling, max_tokens=MAX_CODES)
    plain = SamplingParams()
    unused = next((name for name in _UNUSED if getattr(given, name) != getattr(plain, name)), None)
    if unused is not None:
        raise InputError(f"speech_params: {unused} has no meaning for codes of speech; leave it out", param="speech_params")
    return given.clone()


def _find_voice(voices: Sequence[str], name: str | None) -> str:
    found = voices[0] if name is None else next((one for one in voices if one.lower() == name.lower()), None)
    if found is None:
        raise InputError(f"voice={short_repr(name)} is unknown; this model has {', '.join(voices)}", param="voice")
    return found


def speak_tasks(llm: LLM, messages: Messages | Sequence[Messages], *args: Any, **options: Any) -> list[Task[Speech]]:
    """Return one task per conversation; see `speech_requests` for the arguments and errors."""
    return [_speak(request) for request in speech_requests(llm, messages, *args, **options)]


def stream_task(
    llm: LLM, messages: Messages, *args: Any, exact: bool = True, **options: Any
) -> tuple[Task[_Answer], Callable[[_Answer], Generator[Speech, None, None]]]:
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
    requests = speech_requests(llm, messages, *args, **options)
    if len(requests) != 1:
        reason = f"messages holds {len(requests)} conversations; one answer is streamed, so call it for each of them"
        raise InputError(reason, param="messages")
    (request,) = requests
    return _answer(request), partial(_parts, request, "exact" if exact else "windows")


@dataclass(frozen=True)
class _Answer:
    """An answer in text. `spoken`: what the talker reads; None if there is an error, or nothing to say."""

    speech: Speech
    spoken: SpokenAnswer | None = None

    @property
    def error(self) -> ErrorInfo | None:
        return self.speech.error


def _answer(request: _Request) -> Task[_Answer]:
    """Generate text, and compute the hidden states that the talker reads."""
    handle, talker = request.handle, request.talker
    prompts = list[ProcessedPrompt]()
    handle.prepare = _keeping(handle.prepare, prompts)
    output = yield handle
    nothing = Speech("", torch.zeros(0), talker.model.rate, output.error, output)
    if output.error is not None:
        return _Answer(nothing)
    answer, speech = output.outputs[0].token_ids, replace(nothing, text=output.outputs[0].text)
    if len(answer) < 2:
        return _Answer(speech)
    (prompt,) = prompts
    layer, hidden = talker.model.layer, torch.zeros(0)
    if layer is None or prompt.features:
        whole = prompt if layer else replace(prompt, token_ids=(*prompt.token_ids, *answer[:-1]))
        states = yield RequestHandle(lambda: whole, _NOTHING_SAMPLED, pooling=replace(_STATES, layer=layer))
        if states.error is not None or states.pooled is None:
            return _Answer(replace(speech, error=states.error))
        hidden = states.pooled
    return _Answer(speech, SpokenAnswer(prompt.token_ids, answer, hidden, prompt.features))


def _speak(request: _Request) -> Task[Speech]:
    """Answer in text, and speak the answer."""
    answer = yield from _answer(request)
    if answer.spoken is None:
        return answer.speech
    try:
        codes, samples = request.talker.speak(answer.spoken, request.voice, request.params, request.seed)
    except SensoriumError as error:
        return replace(answer.speech, error=error.info)
    return replace(answer.speech, samples=samples, codes=tuple(codes))


def _parts(request: _Request, division: Division, answer: _Answer) -> Generator[Speech, None, None]:
    yield answer.speech
    if answer.spoken is None:
        return
    try:
        for codes, samples in request.talker.stream(answer.spoken, request.voice, request.params, request.seed, division):
            yield replace(answer.speech, samples=samples, codes=tuple(codes))
    except SensoriumError as error:
        yield replace(answer.speech, error=error.info)


def _keeping(
    prepare: Callable[[], ProcessedPrompt | ParsedPrompt], prompts: list[ProcessedPrompt]
) -> Callable[[], ProcessedPrompt]:
    """Return a function that prepares a prompt with its media, and appends it to `prompts`."""

    def prepared() -> ProcessedPrompt:
        found = prepare()
        prompt = found.finish() if isinstance(found, ParsedPrompt) else found
        prompts[:] = [prompt]
        return prompt

    return prepared
