"""Checks of the arguments of `transcribe`. Each raises an InputError that names the argument."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite
from typing import TYPE_CHECKING

from ...engine.sampling_params import SamplingParams
from ...mm.errors import ConfigError, InputError, hint, short_repr
from ...mm.speech import language_code
from ..validation import check_type
from .decode import GREEDY
from .vad import make_detector

if TYPE_CHECKING:
    from ...engine.llm import LLM

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
NO_SPEECH = 0.6  # default of no_speech_threshold
_MAX_BEAMS = 32
_TIMESTAMPS = {False: "none", True: "segment", "none": "none", "segment": "segment", "word": "word"}
_GATES = {"no_speech": (0.0, 1.0), "log_prob": (-inf, 0.0), "compression_ratio": (0.0, inf)}  # least and largest threshold


def check_model(llm: LLM, task: str) -> int:
    """Return the model's sampling rate in hertz. Check that it transcribes and knows the task."""
    speech = llm.speech
    if speech is None:
        raise ConfigError("the model does not transcribe speech; use generate or chat")
    if task == "translate" and task not in speech.tasks:
        known = ", ".join(speech.tasks)
        reason = f"task='translate' is not supported by this model, which can only {known}; use another model"
        raise InputError(reason, param="task")
    if task not in speech.tasks:
        raise InputError(f"task={short_repr(task)} is unknown; {hint(task, speech.tasks)}", param="task")
    return speech.decode_spec.rate


def check_mode(llm: LLM, timestamps: object, sequential: object, condition: object, aligner: object) -> str:
    """Return which times are requested: "none", "segment" or "word"."""
    speech = llm.speech
    assert speech is not None
    for name, flag in (("sequential", sequential), ("condition_on_previous_text", condition)):
        check_type(name, flag, bool)
    if not isinstance(timestamps, bool | str) or timestamps not in _TIMESTAMPS:
        known = hint(timestamps, [name for name in _TIMESTAMPS if isinstance(name, str)])
        raise InputError(f"timestamps={short_repr(timestamps)} must be True or False, or a name; {known}", param="timestamps")
    times = _TIMESTAMPS[timestamps]
    if times == "word" and aligner is None and speech.alignment() is None and speech.frame_rule() is None:
        reason = "this model has no cross-attention to time words by; give aligner= the folder of a CTC model"
        raise InputError(reason, param="timestamps")
    if aligner is not None and times != "word":
        raise InputError('aligner is for timestamps="word"; leave it out', param="aligner")
    for name, value in (("timestamps", times == "segment"), ("sequential", sequential)):
        if value and not speech.has_timestamps:
            raise InputError(f"this model writes no timestamps; leave {name} out", param=name)
    if condition and not (sequential and speech.takes_context):
        reason = "condition_on_previous_text needs sequential=True and a model whose prompt takes preceding text; leave it out"
        raise InputError(reason, param="condition_on_previous_text")
    return times


def check_language(llm: LLM, language: str | None, task: str) -> str | None:
    """Return the language's code, or None to detect it. Raise an error if the model cannot detect it, or needs it."""
    speech = llm.speech
    assert speech is not None
    if language is None:
        speech.language_detection_request()
        speech.transcription_request(None, task, False, "")
        return None
    if not speech.takes_language:
        raise InputError("this model always detects the language; leave language out", param="language")
    return language_code(language, speech.languages)


def check_words(llm: LLM, texts: Mapping[str, str]) -> str:
    """Join the texts and remove control tokens. They must leave half of the model's positions to the transcript."""
    assert llm.speech is not None
    for name, value in texts.items():
        check_type(name, value, str)
        if value and not llm.speech.takes_context:
            reason = f"this model takes no words to expect in its prompt; leave {name} out"
            raise InputError(reason, param=name)
    text = llm.get_tokenizer().remove_special_tokens(" ".join(filter(None, texts.values())))
    count, limit = len(llm.get_tokenizer().encode_ordinary(text)), llm.max_model_len // 2 - 1
    if count > limit:
        reason = f"the context takes {count} tokens, but only {limit} leave room for the transcript; shorten it"
        raise InputError(reason, code="too_long", param="context")
    return text


def check_condition(llm: LLM, condition: object) -> None:
    """Check `condition_on_previous_text` of a live stream."""
    check_type("condition_on_previous_text", condition, bool)
    if condition and not (llm.speech and llm.speech.takes_context):
        reason = "this model's prompt takes no preceding text; leave condition_on_previous_text out"
        raise InputError(reason, param="condition_on_previous_text")


def check_vad(vad: object, rate: float) -> None:
    if vad is not False:
        make_detector(vad, rate)


def check_sampling(llm: LLM, params: SamplingParams | None, temperature: object) -> tuple[SamplingParams, tuple[float, ...]]:
    """Return the sampling parameters, and the temperatures to try in order."""
    check_type("sampling_params", params, SamplingParams, type(None))
    _check_decoder(llm, "sampling_params", params is not None)
    _check_decoder(llm, "temperature", temperature is not None and temperature != 0)
    if params is not None and params.n != 1:
        raise InputError(f"n={params.n} is not supported by transcribe, which returns one text; leave n out", param="n")
    if temperature is None:
        return params or GREEDY, TEMPERATURES if params is None else (params.temperature,)
    found = tuple(temperature) if isinstance(temperature, list | tuple) else (temperature,)
    if not found or not all(_is_number(one) and one >= 0 for one in found):
        raise InputError(
            f"temperature={short_repr(temperature)} must be a number, 0 or above, or a list of them", param="temperature"
        )
    return params or GREEDY, found


def _check_decoder(llm: LLM, name: str, given: bool) -> None:
    """Raise InputError for an argument of sampling or beams if the model has no decoder."""
    if given and llm.speech is not None and llm.speech.frame_rule() is not None:
        raise InputError(f"this model has no decoder, and its text is always the likeliest one; leave {name} out", param=name)


def check_beam_size(size: object) -> int:
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _MAX_BEAMS:
        raise InputError(f"beam_size={short_repr(size)} must be an integer from 1 to {_MAX_BEAMS}", param="beam_size")
    return size


def check_beams(llm: LLM, given: object) -> int:
    size = check_beam_size(given)
    _check_decoder(llm, "beam_size", size > 1)
    return size


def check_gates(llm: LLM, *thresholds: object) -> tuple[float | None, float | None, float | None]:
    """Return the thresholds of no speech, log probability and compression ratio, in this order.

    The default of the first one has no effect on models that cannot tell the probability of no speech.
    """
    for (gate, (least, most)), value in zip(_GATES.items(), thresholds, strict=True):
        name = f"{gate}_threshold"
        check_type(name, value, float, int, type(None))
        if value is not None and not (_is_number(value) and least <= value <= most):  # type: ignore[operator]
            limits = f"from {least:g} to {most:g}" if isfinite(least + most) else f"{least:g} or above"
            limits = limits if isfinite(least) else f"{most:g} or below"
            raise InputError(f"{name}={value} must be a finite number, {limits}, or None", param=name)
    assert llm.speech is not None
    if thresholds[0] not in (None, NO_SPEECH) and llm.speech.no_speech_request() is None:
        reason = "this model does not tell the probability of no speech; leave no_speech_threshold out"
        raise InputError(reason, param="no_speech_threshold")
    return thresholds  # type: ignore[return-value]


def check_number(name: str, value: object, least: float, most: float) -> None:
    if not _is_number(value) or not least <= value <= most:  # type: ignore[operator]
        raise InputError(f"{name}={short_repr(value)} must be a number from {least:g} to {most:g}", param=name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
