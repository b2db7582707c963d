"""Speech: the thinker answers a conversation in text, and the talker speaks the answer.

The thinker computes prompt and answer once more in one prefill, whose hidden states the talker reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
from ..engine.worker.talker_runner import MAX_CODES, TalkerRunner
from ..mm.errors import ConfigError, ErrorInfo, InputError, SensoriumError, short_repr
from ..mm.repr_mixin import ReprMixin
from .tasks import Task
from .validation import check_type

if TYPE_CHECKING:
    from ..engine.llm import LLM

SPEECH_PARAMS = SamplingParams(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, max_tokens=MAX_CODES)
"""How the published models sample codes of speech."""
_STATES = PoolingParams(pooling="tokens", normalize=False)
_NOTHING_SAMPLED = SamplingParams(max_tokens=1)
_UNUSED = (
    "n", "stop", "logprobs", "prompt_logprobs", "structured_outputs", "logits_processors", "repetition_detection", "bad_words",
)  # fmt: skip
"""Sampling parameters that have no meaning for codes of speech."""


@dataclass(frozen=True, repr=False)
class Speech(ReprMixin):
    """An answer as text and speech.

    Args:
        text: the answer.
        samples: float32 `[n]` in [-1, 1], one channel. Empty if there is an error, or nothing to say.
        sampling_rate: samples per second.
        error: why there is no speech, or None.
        output: the answer's request.
        codes: the codes of speech that the samples were made of.
    """

    text: str
    samples: Tensor
    sampling_rate: int
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)
    codes: tuple[int, ...] = field(default=(), repr=False)

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sampling_rate


def speak_tasks(
    llm: LLM,
    messages: Messages | Sequence[Messages],
    sampling_params: SamplingParams | None = None,
    speech_params: SamplingParams | None = None,
    voice: str | None = None,
    **chat: Any,
) -> list[Task[Speech]]:
    """Return one task per conversation. Conversations are those of `LLM.chat`.

    The published models speak well only after their own system prompt ("You are Qwen, a virtual human ..."), which their model
    cards quote.

    Args:
        sampling_params: of the text; None takes the checkpoint's defaults.
        speech_params: of the codes of speech. None samples as the published models do: temperature 0.9, top_k 40, top_p 0.8, a
            repetition penalty of 1.05, and at most 4096 codes (82 s in Qwen2.5-Omni). `seed` also determines the noise from
            which the sound is made; None derives it from the engine's seed and the number of the conversation.
        voice: name of the speaker; None takes the checkpoint's first one.
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
    voices = talker.model.voices
    if voice is not None and voice not in voices:
        raise InputError(f"voice={short_repr(voice)} is unknown; this model has {', '.join(voices)}", param="voice")
    text, sound = (sampling_params or llm.default_params).clone(), (speech_params or SPEECH_PARAMS).clone()
    if text.n > 1:
        raise InputError(f"n={text.n}: one answer is spoken; leave it out", param="n")
    plain = SamplingParams()
    given = next((name for name in _UNUSED if getattr(sound, name) != getattr(plain, name)), None)
    if given is not None:
        raise InputError(f"speech_params: {given} has no meaning for codes of speech; leave it out", param="speech_params")
    conversations = as_conversations(messages)
    own = splitmix64(llm.config.seed)
    seeds = [own + i if sound.seed is None else sound.seed for i in range(len(conversations))]
    return [
        _speak(llm.request(one, text, **chat), talker, sound, voice or voices[0], seed)
        for one, seed in zip(conversations, seeds, strict=True)
    ]


def _speak(handle: RequestHandle, talker: TalkerRunner, params: SamplingParams, voice: str, seed: int) -> Task[Speech]:
    """Generate text, compute its hidden states, and speak it."""
    prompts = list[ProcessedPrompt]()
    handle.prepare = _keeping(handle.prepare, prompts)
    output = yield handle
    nothing = Speech("", torch.zeros(0), talker.model.rate, output.error, output)
    if output.error is not None:
        return nothing
    answer, said = output.outputs[0].token_ids, replace(nothing, text=output.outputs[0].text)
    if len(answer) < 2:
        return said
    (prompt,) = prompts
    whole = replace(prompt, token_ids=(*prompt.token_ids, *answer[:-1]))
    states = yield RequestHandle(lambda: whole, _NOTHING_SAMPLED, pooling=_STATES)
    if states.error is not None or states.pooled is None:
        return replace(said, error=states.error)
    try:
        codes, samples = talker.speak(prompt.token_ids, answer, states.pooled, prompt.features, voice, params, seed)
    except SensoriumError as error:
        return replace(said, error=error.info)
    return replace(said, samples=samples, codes=tuple(codes))


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
