"""Checks that a model can honour the options of `transcribe` and of live streams. Errors name the option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...callers.errors import ConfigError, InputError, hint, short_repr
from ...mm.languages import language_code
from .options import NO_SPEECH, FileOptions, LiveOptions, SpeechOptions, Times
from .vad import make_detector

if TYPE_CHECKING:
    from ...engine.engine import Engine


def check_model(engine: Engine, task: str) -> int:
    """Return the model's sampling rate in hertz. Check that it transcribes and knows the task."""
    speech = engine.speech
    if speech is None:
        raise ConfigError("the model does not transcribe speech; <<use_chat>>", param="model")
    if task == "translate" and task not in speech.tasks:
        tasks = ", ".join(speech.tasks)
        reason = f"<<translation>> is not supported by this model, which can only {tasks}; use another model"
        raise InputError(reason, code="unsupported", param="task")
    if task not in speech.tasks:
        raise InputError(
            f"<<param=>>{short_repr(task)} is unknown; {hint(task, speech.tasks)}",
            code="unknown_name",
            value=task,
            param="task",
        )
    return speech.decode_spec.rate


def check_options(engine: Engine, options: SpeechOptions) -> None:
    """Raise ConfigError if the model does not transcribe, and InputError for an option that it cannot honour."""
    rate, speech = check_model(engine, options.task), engine.speech
    assert speech is not None
    if options.vad is not False:
        make_detector(options.vad, rate)
    if options.times == "segment" and not speech.has_timestamps:
        raise InputError("this model writes no timestamps; leave <<param>> out", code="unsupported", param="timestamps")
    if speech.frame_rule() is not None:
        for name in ("sampling_params", "temperature"):
            if getattr(options, name) not in (None, 0):
                raise _without_decoder(name)
    if options.no_speech_threshold not in (None, NO_SPEECH) and speech.no_speech_request() is None:
        reason = "this model does not tell the probability of no speech; leave <<param>> out"
        raise InputError(reason, code="unsupported", param="no_speech_threshold")
    for name in ("hotwords", "context", "prompt"):
        if getattr(options, name) and not speech.takes_context:
            raise InputError(
                "this model takes no words to expect in its prompt; leave <<param>> out", code="unsupported", param=name
            )


def check_file_options(engine: Engine, options: FileOptions) -> None:
    """`check_options` for files."""
    check_model(engine, options.task)
    speech = engine.speech
    assert speech is not None
    if options.times == "word" and options.aligner is None and not times_words(engine):
        reason = "this model has no cross-attention to time words by; give <<aligner=>> the folder of a CTC model"
        raise InputError(reason, code="unsupported", param="timestamps")
    if options.sequential and not speech.has_timestamps:
        raise InputError("this model writes no timestamps; leave <<param>> out", code="unsupported", param="sequential")
    if options.condition_on_previous_text and not (options.sequential and speech.takes_context):
        reason = "<<param>> needs sequential=True and a model whose prompt takes preceding text; leave it out"
        raise InputError(reason, param="condition_on_previous_text")
    if options.beam_size > 1 and speech.frame_rule() is not None:
        raise _without_decoder("beam_size")
    check_options(engine, options)


def check_live_options(engine: Engine, options: LiveOptions) -> None:
    """`check_options` for live streams."""
    check_options(engine, options)
    assert engine.speech is not None
    if options.condition_on_previous_text and not engine.speech.takes_context:
        reason = "this model's prompt takes no preceding text; leave <<param>> out"
        raise InputError(reason, param="condition_on_previous_text")
    if options.times == "word" and not times_words(engine):
        reason = "this model has no cross-attention to time words by; leave <<param>> out"
        raise InputError(reason, code="unsupported", param="timestamps")


def times_words(engine: Engine) -> bool:
    """Return whether the model tells by itself when words were spoken."""
    speech = engine.speech
    return speech is not None and (speech.alignment() is not None or speech.frame_rule() is not None)


def times_for_speakers(engine: Engine, options: SpeechOptions) -> Times:
    """Return the finest times that a model gives, from which the speakers of its text follow.

    Raises:
        InputError: it gives none.
    """
    speech = engine.speech
    assert speech is not None
    aligner = options.aligner if isinstance(options, FileOptions) else None
    if aligner is not None or times_words(engine):
        return "word"
    if not speech.has_timestamps:
        how = "leave <<param>> out" if isinstance(options, LiveOptions) else "give <<aligner=>> the folder of a CTC model"
        reason = f"this model gives no times, so that it is not known who says what; {how}"
        raise InputError(reason, code="unsupported", param="channel" if options.each_channel else "speakers")
    return "segment"


def _without_decoder(name: str) -> InputError:
    return InputError(
        "this model has no decoder, and its text is always the likeliest one; leave <<param>> out",
        code="unsupported",
        param=name,
    )


def known_language(engine: Engine, options: SpeechOptions) -> str | None:
    """Return the language's code, or None to detect it. Raise an error if the model cannot detect it, or needs it."""
    speech = engine.speech
    assert speech is not None
    if options.language is None or options.follows_language:
        speech.language_detection_request()
        speech.transcription_request(None, options.task, False, "")
        return None
    if not speech.takes_language and len(speech.languages) != 1:
        raise InputError("this model always detects the language; leave language out", code="unsupported", param="language")
    return language_code(options.language, speech.languages)


def expected_words(engine: Engine, options: SpeechOptions) -> str:
    """Return the words to expect without control tokens. They must leave half of the model's positions to the transcript.

    The error about their length names the longest.
    """
    text = engine.tokenizer.remove_special_tokens(options.words)
    count, limit = len(engine.tokenizer.encode_ordinary(text)), engine.max_model_len // 2 - 1
    if count > limit:
        texts = {name: getattr(options, name) for name in ("hotwords", "context", "prompt")}
        names = [name for name, value in texts.items() if value]
        subject = f"{names[0]} takes" if len(names) == 1 else f"{' and '.join(names)} together take"
        reason = f"{subject} {count} tokens, but only {limit} leave room for the transcript; shorten it"
        param = max(names, key=lambda name: len(texts[name]))
        raise InputError(reason, code="too_long", param=param, limit=limit, value=count)
    return text
