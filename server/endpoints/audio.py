"""/v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError

from ...callers.errors import ErrorInfo, InputError, SensoriumError, naming_param
from ...engine.sampling_params import SamplingParams
from ...mm.languages import LANGUAGES
from ...mm.media import gate
from ...mm.media.isolate import watching
from ...mm.media.ledger import Ledger
from ...mm.media.policy import MediaPolicy, MediaUrl
from ...mm.parse import MediaSource
from ...mm.tenants import tenant_of
from ...pipelines.llm import AsyncLLM
from ...pipelines.option_types import SpeechTask, TranscribeKeywords
from ...pipelines.speech.diarized import diarized_fields
from ...pipelines.speech.options import TEMPERATURES, Times, read_speakers
from ...pipelines.speech.subtitles import WRITERS, SubtitleLayout
from ...pipelines.transcribe import Segment, Transcript, WindowResult, Word
from ..errors import error_object, validation_error
from ..forms import read_form
from ..guard import PRIORITY
from ..model_routes import lease_model, with_model
from ..protocol.audio import LISTS, AudioForm, TranscriptionForm
from ..request_record import count_audio
from ..state import Server, cache_salt, new_id, priority_of, server_of, services_of, unless_disconnected
from ..streams import open_stream
from ..uploaded_files import open_files, read_file
from .tokens import run_interruptible

_VLLM_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
_WITH_ERROR = ("json", "verbose_json", "diarized_json")  # formats that can hold an error beside the text
F = TypeVar("F", bound=AudioForm)


async def transcriptions(request: Request) -> Response:
    """Transcribe an audio file in the language spoken."""
    async with _reading(request, TranscriptionForm) as (form, audio):
        return await with_model(request, form.model, bool(form.stream), partial(_transcribe, request, form, audio))


async def _transcribe(request: Request, form: TranscriptionForm, audio: bytes) -> Response:
    if form.timestamp_granularities and form.response_format != "verbose_json" and not form.stream:
        reason = "<<param>> needs response_format=verbose_json, or stream=true; set one of them"
        raise InputError(reason, param="timestamp_granularities")
    speech = server_of(request).engine.speech
    if form.has_logprobs and speech is not None and speech.frame_rule() is not None:
        reason = "this model has no decoder, whose tokens would have log probabilities; leave logprobs out of <<param>>"
        raise InputError(reason, code="unsupported", param="include")
    if form.stream:
        return await _stream(request, form, audio)
    return await _respond(request, form, audio, "transcribe", form.timestamp_granularities or ())


async def translations(request: Request) -> Response:
    """Translate the speech of an audio file into English. As in vLLM, `language` is the language spoken."""
    async with _reading(request, AudioForm) as (form, audio):
        return await with_model(request, form.model, False, partial(_respond, request, form, audio, "translate"))


@asynccontextmanager
async def _reading(request: Request, kind: type[F]) -> AsyncIterator[tuple[F, bytes]]:
    """Yield the fields of a form and its file. A line of a batch is JSON, which names its file by `file_id` or `file_url`.

    The bytes of a download count in the engine's budget of media until the block ends.
    """
    if PRIORITY not in request.scope:
        async with read_form(request, kind, LISTS) as (body, file):
            audio = await file.read()
        yield body, audio
        return
    body, file_id, url = await _read_line(request, kind)
    await lease_model(request, body.model)
    with server_of(request).engine.inputs.media.budget.open(tenant_of(cache_salt(request, None))) as ledger:
        ledger.background = True
        yield body, await _read_file(request, file_id, url, ledger)


async def _read_line(request: Request, kind: type[F]) -> tuple[F, str | None, str]:
    """Return the fields of a line, the id of its file or None, and the URL. `file_url` is vLLM's name for a URL."""
    fields: dict[str, Any] = await request.json()
    file, url = fields.pop("file_id", None), fields.pop("file_url", None)
    source = url if file is None else file
    if (file is None) == (url is None) or not isinstance(source, str):
        reason = "<<param>> is missing; give file_id, the id of an uploaded file with the purpose user_data, or file_url"
        raise InputError(reason, param="file_id")
    try:
        form = kind.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None
    return form, file, source


async def _read_file(request: Request, file_id: str | None, url: str, ledger: Ledger) -> bytes:
    services = services_of(request)
    if file_id is None:
        with _naming_file("file_url"):
            fetch = partial(_fetch, url, server_of(request).engine.config.media, ledger)
            return await run_interruptible(request, services.downloaders, fetch)
    assert services.store is not None
    (stored,) = await open_files(request, services.store, {file_id: "file_id"})
    return b"".join(await read_file(services.store, stored))


def _fetch(url: str, policy: MediaPolicy, ledger: Ledger) -> bytes:
    """Return the bytes of a URL. The current Interrupt ends the download."""
    with watching(ledger.close):
        data = gate.load(MediaSource("audio", 0, MediaUrl(url)), policy, ledger).data
    assert isinstance(data, bytes)
    return data


async def _respond(request: Request, form: AudioForm, audio: bytes, task: SpeechTask, times: Sequence[str] = ()) -> Response:
    """Transcribe and write the response. `times`: the requested ones of segments and words."""
    server = server_of(request)
    options = _options(request, form)
    options["timestamps"] = _timestamps(server, form.response_format, times)
    with _naming_file():
        work = server.llm.transcribe(audio, form.spoken, task, priority=priority_of(request), **options)
        (transcript,) = await unless_disconnected(request, work)
        if transcript.error is not None and not (transcript.duration and form.response_format in _WITH_ERROR):
            raise transcript.error.exception()
    count_audio(transcript.duration)
    language = ""
    if form.response_format == "verbose_json":
        language = "english" if task == "translate" else await _language_name(server, transcript.language)
    has_logprobs = isinstance(form, TranscriptionForm) and form.has_logprobs
    logprobs = _logprobs(server.llm, transcript.windows) if has_logprobs else None
    return _response(form.response_format, transcript, task, times, language, logprobs)


async def _language_name(server: Server, code: str | None) -> str:
    """Return the English name of a language, as OpenAI's API writes it.

    Without speech, it is what the model's detection takes silence for; "unknown" for a model that does not tell.
    """
    speech = server.engine.speech
    if code is None and speech is not None and speech.language_detection_request() is not None:
        if server.silent_language is None:
            rate = speech.decode_spec.rate
            params = SamplingParams(temperature=0.0, max_tokens=1)
            (silence,) = await server.llm.transcribe((np.zeros(rate, np.float32), rate), sampling_params=params, vad=False)
            server.silent_language = silence.language
        code = server.silent_language
    if code is None or speech is None:
        return "unknown"
    return LANGUAGES.get(code) or speech.languages.get(code, code).lower()


@contextmanager
def _naming_file(field: str = "file") -> Iterator[None]:
    """Name the field of the file in errors: in messages about media, and as `param` of input errors that have none."""
    try:
        with naming_param(field):
            yield
    except SensoriumError as error:
        if error.info.param == "speaker_model":
            raise no_speakers() from error
        error.info = _with_file_name(error.info, field)
        raise


def no_speakers() -> InputError:
    """Return the error of a request for speakers, if the server has no networks for it."""
    reason = "this server does not tell speakers apart; <<param>> needs the networks that its option speaker_model names"
    return InputError(reason, code="unsupported", param="speakers")


def _with_file_name(error: ErrorInfo, field: str = "file") -> ErrorInfo:
    """Return an error about media with the name of the field before its message; others unchanged."""
    if error.modality is None:
        return error
    return replace(error, text=f"{field}: {error.without_item().text}", param=error.param or field)


def _timestamps(server: Server, response_format: str, times: Sequence[str]) -> Times:
    """Return the argument `timestamps` of `transcribe`. "verbose_json" has segments if the model can time them.

    Raises:
        InputError: the model cannot give the times that the request needs.
    """
    segments, words = server.transcript_times
    if "word" in times and not words:
        reason = "this model gives no times of words; leave word out of <<param>>"
        raise InputError(reason, code="unsupported", param="timestamp_granularities")
    if segments == "none" and (times or response_format in WRITERS):
        what, param = ("timestamp_granularities", times) if times else ("response_format", response_format)
        raise InputError(
            f"<<param=>>{param} needs times, which this model does not give; use json or text", code="unsupported", param=what
        )
    if "word" in times:
        return "word"
    return segments if times or response_format in (*WRITERS, "verbose_json") else "none"


def _options(request: Request, form: AudioForm) -> TranscribeKeywords:
    """Return the options of `transcribe` that all forms have."""
    server = server_of(request)
    options: TranscribeKeywords = {"prompt": form.prompt, "hotwords": form.words, "vad": form.detects_speech}
    options["boost"] = form.boost
    options["adapter"] = server.adapter_of(form.model)
    options.update({"track": form.track, "channel": form.channel, "cache_salt": cache_salt(request, form.cache_salt)})
    if form.temperature:  # with 0, hotter answers follow where the first one fails, as OpenAI's do
        options["temperature"] = form.temperature
    if isinstance(form, TranscriptionForm) and form.tells_speakers:
        options["speakers"] = True if form.speakers is None else read_speakers(form.speakers)
        options["speaker_model"] = services_of(request).config.speaker_model
        options["known_speaker_names"], options["known_speaker_references"] = form.known_speaker_names, form.clips
    sampling = form.sampling
    if form.beam_size > 1:
        options["beam_size"] = form.beam_size
    speech = server.engine.speech
    if (sampling or form.beam_size > 1) and speech is not None and speech.frame_rule() is not None:
        field = "max_completion_tokens" if "max_tokens" in sampling else next(iter(sampling), "n")
        reason = "this model has no decoder, and its text is always the likeliest one"
        raise InputError(f"{reason}; leave <<param>> out", code="unsupported", param=field)
    if sampling:
        options["temperature"] = form.temperature or TEMPERATURES
        options["sampling_params"] = SamplingParams(**{"temperature": 0.0, "max_tokens": None, **sampling})
    return options


async def _stream(request: Request, form: TranscriptionForm, audio: bytes) -> Response:
    """Send text as soon as it is final. An error before the first text has its own status."""
    if form.response_format not in ("json", "diarized_json"):
        raise InputError("stream=true needs <<param=>>json or diarized_json; set one of them", param="response_format")
    if form.as_vllm and form.response_format == "diarized_json":
        reason = "vLLM's chunks have no place for speakers; set <<param=>>json, or leave out stream_include_usage and so on"
        raise InputError(reason, code="unsupported", param="response_format")
    if form.as_vllm and (form.include or form.timestamp_granularities):
        param = "include" if form.include else "timestamp_granularities"
        reason = "vLLM's chunks have no place for <<param>>; leave it out, or the fields stream_include_usage and so on"
        raise InputError(reason, code="unsupported", param=param)
    server = server_of(request)
    options, times = _options(request, form), form.timestamp_granularities or ()
    if times:
        options["timestamps"] = _timestamps(server, form.response_format, times)
    is_diarized = form.response_format == "diarized_json"
    details = EventDetails(form.has_continuous_usage, form.has_logprobs, times, is_diarized)
    events = transcript_events(server.llm, audio, form.spoken, options, details)

    def chunks(first: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        whole = _resume(first, events)
        return _vllm_chunks(whole, server.name, form) if form.as_vllm else whole

    with _naming_file():
        return await open_stream(request, events, chunks, with_done=form.as_vllm)


async def _vllm_chunks(
    events: AsyncGenerator[dict[str, Any], None], name: str, form: TranscriptionForm
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield a stream's events as vLLM's chunks, which its load generator reads."""
    head = {"id": new_id("trsc-"), "object": "transcription.chunk", "created": int(time.time()), "model": name}
    async with aclosing(events):
        async for event in events:
            is_last = event["type"] == "transcript.text.done"
            usage = {_VLLM_USAGE[key]: value for key, value in event.get("usage", {}).items() if key != "type"}
            choice = {"delta": {"content": event.get("delta", "")}, "finish_reason": "stop" if is_last else None}
            always = {"usage": usage} if form.has_continuous_usage else {}
            yield {**head, "choices": [{**choice, "stop_reason": None}], **always}
            if is_last and form.stream_include_usage:
                yield {**head, "choices": [], "usage": usage}


async def _resume(first: dict[str, Any], events: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[dict[str, Any], None]:
    async with aclosing(events):
        yield first
        with _naming_file():
            async for event in events:
                yield event


@dataclass(frozen=True)
class EventDetails:
    """Options of the events of a streamed transcription: what they have beside their text.

    Args:
        usage: each text comes with the usage of the windows so far.
        logprobs: each text comes with the log probabilities of the windows since the last one, the whole text with all.
        times: the whole text comes with "word"s, "segment"s, or both, and each text with its words.
        speakers: before the whole text, an event for each segment names its speaker.
    """

    usage: bool = False
    logprobs: bool = False
    times: Sequence[str] = ()
    speakers: bool = False


async def transcript_events(
    llm: AsyncLLM,
    audio: object,
    language: str | None,
    options: TranscribeKeywords,
    details: EventDetails = EventDetails(),
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a streamed transcription: text as soon as it is final, and the whole text."""
    loop, texts, windows = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None](), list[WindowResult]()
    words = list[Word]()  # that were not sent
    num_sent = 0  # windows whose log probabilities were sent

    def on_text(_: int, text: str) -> None:  # called in other threads, as `on_window`
        nonlocal num_sent
        more: dict[str, Any] = {"usage": _token_usage(windows)} if details.usage else {}
        if details.logprobs:
            more["logprobs"], num_sent = _logprobs(llm, windows[num_sent:]), len(windows)
        if "word" in details.times:
            more["words"] = [_word(word) for word in words]
            words.clear()
        loop.call_soon_threadsafe(texts.put_nowait, {"type": "transcript.text.delta", "delta": text, **more})

    def on_window(_: int, window: WindowResult) -> None:
        windows.append(window)

    def on_segments(_: int, segments: Sequence[Segment]) -> None:
        words.extend(word for segment in segments for word in segment.words or ())

    options = {**options, "on_text": on_text, "on_window": on_window, "on_segments": on_segments}
    work = asyncio.ensure_future(llm.transcribe(audio, language, **options))
    work.add_done_callback(lambda _: texts.put_nowait(None))
    try:
        while (text := await texts.get()) is not None:
            yield text
        (transcript,) = await work
        if transcript.error is not None:
            raise transcript.error.exception()
        count_audio(transcript.duration)
        for segment in diarized_fields(transcript.timeline)["segments"] if details.speakers else ():
            yield segment
        done = {"type": "transcript.text.done", "text": transcript.text, "usage": _token_usage(transcript.windows)}
        more = {"logprobs": _logprobs(llm, transcript.windows)} if details.logprobs else {}
        yield {**done, **more, **(_times(transcript, details.times) if details.times else {})}
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _logprobs(llm: AsyncLLM, windows: Sequence[WindowResult]) -> list[dict[str, Any]]:
    """Return OpenAI's entries of the tokens of windows, in order. Where windows overlap, both have tokens."""
    tokenizer = llm.engine.tokenizer
    pairs = [pair for window in windows for pair in window.token_logprobs]
    return [
        {"token": tokenizer.decode([token], False), "logprob": value, "bytes": list(tokenizer.token_bytes(token))}
        for token, value in pairs
    ]


def _token_usage(windows: Sequence[WindowResult]) -> dict[str, Any]:
    """Return OpenAI's usage in tokens. The prompt is that of the last window, as in vLLM."""
    prompt = windows[-1].num_prompt_tokens if windows else 0
    tokens = sum(window.num_tokens for window in windows)
    return {"type": "tokens", "input_tokens": prompt, "output_tokens": tokens, "total_tokens": prompt + tokens}


def _response(
    response_format: str,
    transcript: Transcript,
    task: str,
    times: Sequence[str],
    language: str,
    logprobs: list[dict[str, Any]] | None = None,
) -> Response:
    """Write a transcript; `language` is its name. As with OpenAI, "verbose_json" has segments unless only words were requested.

    JSON has `warnings` about an odd file. If the file is broken or cut off, it has `error`, and the text before the fault.
    """
    if response_format == "text":
        return PlainTextResponse(f"{transcript.text}\n")
    if response_format == "diarized_json":
        return JSONResponse(_diarized(transcript))
    if response_format in WRITERS:
        written = WRITERS[response_format](transcript.timeline, SubtitleLayout())
        return PlainTextResponse(f"{written}\n" if written else "")
    body: dict[str, Any] = {"text": transcript.text}
    if response_format == "verbose_json":
        body = {"task": task, "language": language, "duration": transcript.duration, **body, **_times(transcript, times)}
    if logprobs is not None:
        body["logprobs"] = logprobs
    if transcript.warnings:
        body["warnings"] = list(transcript.warnings)
    body["usage"] = {"type": "duration", "seconds": transcript.duration}
    if transcript.error is not None:
        body["error"] = error_object(_with_file_name(transcript.error))
    return JSONResponse(body)


def _diarized(transcript: Transcript) -> dict[str, Any]:
    body = diarized_fields(transcript.timeline)
    if transcript.warnings:
        body["warnings"] = list(transcript.warnings)
    if transcript.error is not None:
        body["error"] = error_object(_with_file_name(transcript.error))
    return body


def _times(transcript: Transcript, times: Sequence[str]) -> dict[str, Any]:
    """Return the segments, unless only words were requested, and the words if they were."""
    body, segments = dict[str, Any](), transcript.segments or ()
    if "segment" in times or not times:
        body["segments"] = [_segment(index, segment, transcript.duration) for index, segment in enumerate(segments)]
    if "word" in times:
        words = [word for segment in segments for word in segment.words or ()]
        body["words"] = [_word(word) for word in words]
    return body


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.word.strip(), "start": word.start, "end": word.end}


def _segment(index: int, segment: Segment, duration: float) -> dict[str, Any]:
    """Return OpenAI's object of a segment. Its type has numbers only: 0 stands for a value that the model does not tell."""
    names = ("seek", "start", "text", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    fields: dict[str, Any] = {name: getattr(segment, name) for name in names}
    end = duration if segment.end is None else segment.end
    numbers = {name: 0.0 if fields[name] is None else fields[name] for name in ("avg_logprob", "no_speech_prob")}
    speaker = {} if segment.speaker is None else {"speaker": segment.speaker}
    return {"id": index, **fields, **numbers, "end": end, "tokens": list(segment.tokens), **speaker}
