"""/v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from ...engine.sampling_params import SamplingParams
from ...mm.errors import ErrorInfo, InputError, SensoriumError, naming_param
from ...pipelines.llm import AsyncLLM
from ...pipelines.speech.arguments import TEMPERATURES
from ...pipelines.speech.subtitles import WRITERS, SubtitleLayout
from ...pipelines.transcribe import Segment, Transcript, WindowResult
from ..errors import error_object
from ..events import event_stream
from ..forms import read_form
from ..protocol.audio import LISTS, AudioForm, TranscriptionForm
from ..state import Server, cache_salt, first_output, new_id, server_of, unless_disconnected

_VLLM_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "completion_tokens", "total_tokens": "total_tokens"}
_WITH_ERROR = ("json", "verbose_json")  # formats that can hold an error beside the text
F = TypeVar("F", bound=AudioForm)


async def transcriptions(request: Request) -> Response:
    """Transcribe an audio file in the language spoken."""
    form, audio = await _read(request, TranscriptionForm)
    if form.timestamp_granularities and form.response_format != "verbose_json":
        reason = "timestamp_granularities needs response_format=verbose_json; set it"
        raise InputError(reason, param="timestamp_granularities")
    if form.stream:
        return await _stream(request, form, audio)
    return await _respond(request, form, audio, "transcribe", form.timestamp_granularities or ())


async def translations(request: Request) -> Response:
    """Translate the speech of an audio file into English. As in vLLM, `language` is the language spoken."""
    form, audio = await _read(request, AudioForm)
    return await _respond(request, form, audio, "translate")


async def _read(request: Request, kind: type[F]) -> tuple[F, bytes]:
    """Return the fields of a form and its file."""
    async with read_form(request, kind, LISTS) as (form, file):
        return form, await file.read()


async def _respond(request: Request, form: AudioForm, audio: bytes, task: str, times: Sequence[str] = ()) -> Response:
    """Transcribe and write the response. `times`: the requested ones of segments and words."""
    server = server_of(request)
    options = {**_options(request, form), "timestamps": _timestamps(server, form.response_format, times)}
    with _naming_file():
        work = server.engine.transcribe(audio, form.language, task, **options)
        (transcript,) = await unless_disconnected(request, work)
        if transcript.error is not None and not (transcript.duration and form.response_format in _WITH_ERROR):
            raise transcript.error.exception()
    return _response(form.response_format, transcript, task, times)


@contextmanager
def _naming_file() -> Iterator[None]:
    """Name the form field `file` in errors: in messages about media, and as `param` of input errors that have none."""
    try:
        with naming_param("file"):
            yield
    except SensoriumError as error:
        error.info = _with_file_name(error.info)
        raise


def _with_file_name(error: ErrorInfo) -> ErrorInfo:
    """Return an error about media with "file: " before its message; others unchanged."""
    return error if error.modality is None else replace(error, message=f"file: {error.reason}", param=error.param or "file")


def _timestamps(server: Server, response_format: str, times: Sequence[str]) -> str:
    """Return the argument `timestamps` of `transcribe`. "verbose_json" has segments if the model can time them.

    Raises:
        InputError: the model cannot give the times that the request needs.
    """
    segments, words = server.transcript_times
    if "word" in times and not words:
        reason = "this model gives no times of words; leave word out of timestamp_granularities"
        raise InputError(reason, param="timestamp_granularities")
    if segments == "none" and (times or response_format in WRITERS):
        what, param = ("timestamp_granularities", times) if times else ("response_format", response_format)
        raise InputError(f"{what}={param} needs times, which this model does not give; use json or text", param=what)
    if "word" in times:
        return "word"
    return segments if response_format in (*WRITERS, "verbose_json") else "none"


def _options(request: Request, form: AudioForm) -> dict[str, Any]:
    """Return the arguments of `transcribe` that all forms have."""
    server = server_of(request)
    server.check_model(form.model)
    options: dict[str, Any] = {"prompt": form.prompt, "hotwords": form.hotwords, "vad": form.vad}
    options["cache_salt"] = cache_salt(request, form.cache_salt)
    if form.temperature:  # with 0, hotter answers follow where the first one fails, as OpenAI's do
        options["temperature"] = form.temperature
    if form.max_completion_tokens is not None:
        speech = server.engine.llm.speech
        if speech is not None and speech.frame_rule() is not None:
            reason = "this model has no decoder whose tokens could be limited; leave max_completion_tokens out"
            raise InputError(reason, param="max_completion_tokens")
        options["temperature"] = form.temperature or TEMPERATURES
        options["sampling_params"] = SamplingParams(temperature=0.0, max_tokens=form.max_completion_tokens)
    return options


async def _stream(request: Request, form: TranscriptionForm, audio: bytes) -> Response:
    """Send text as soon as it is final. An error before the first text has its own status."""
    if form.response_format != "json":
        raise InputError("stream=true needs response_format=json; set it", param="response_format")
    server = server_of(request)
    events = transcript_events(server.engine, audio, form.language, _options(request, form), form.has_continuous_usage)
    with _naming_file():
        first = await unless_disconnected(request, first_output(events))
    whole = _resume(first, events)
    return event_stream(_vllm_chunks(whole, server.name, form) if form.as_vllm else whole, with_done=form.as_vllm)


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


async def transcript_events(
    engine: AsyncLLM, audio: object, language: str | None, options: dict[str, Any], with_usage: bool = False
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of a streamed transcription: text as soon as it is final, and the whole text.

    `with_usage`: each text comes with the usage of the windows so far.
    """
    loop, texts, windows = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any] | None](), list[WindowResult]()

    def on_text(_: int, text: str) -> None:  # called in other threads, as `on_window`
        usage = {"usage": _token_usage(windows)} if with_usage else {}
        loop.call_soon_threadsafe(texts.put_nowait, {"type": "transcript.text.delta", "delta": text, **usage})

    def on_window(_: int, window: WindowResult) -> None:
        windows.append(window)

    work = asyncio.ensure_future(engine.transcribe(audio, language, on_text=on_text, on_window=on_window, **options))
    work.add_done_callback(lambda _: texts.put_nowait(None))
    try:
        while (text := await texts.get()) is not None:
            yield text
        (transcript,) = await work
        if transcript.error is not None:
            raise transcript.error.exception()
        yield {"type": "transcript.text.done", "text": transcript.text, "usage": _token_usage(transcript.windows)}
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def _token_usage(windows: Sequence[WindowResult]) -> dict[str, Any]:
    """Return OpenAI's usage in tokens. The prompt is that of the last window, as in vLLM."""
    prompt = windows[-1].num_prompt_tokens if windows else 0
    tokens = sum(window.num_tokens for window in windows)
    return {"type": "tokens", "input_tokens": prompt, "output_tokens": tokens, "total_tokens": prompt + tokens}


def _response(form: str, transcript: Transcript, task: str, times: Sequence[str]) -> Response:
    """Write a transcript. As with OpenAI, "verbose_json" has segments unless only words were requested.

    It has `error` if the file is broken or cut off; the text is then that of the audio before the fault.
    """
    if form == "text":
        return PlainTextResponse(f"{transcript.text}\n")
    if form in WRITERS:
        return PlainTextResponse(f"{WRITERS[form](transcript, SubtitleLayout())}\n")
    body: dict[str, Any] = {"text": transcript.text}
    if form == "verbose_json":
        segments = transcript.segments or ()
        body = {"task": task, "language": transcript.language, "duration": transcript.duration, **body}
        if "segment" in times or not times:
            body["segments"] = [_segment(index, one, transcript.duration) for index, one in enumerate(segments)]
        if "word" in times:
            words = [word for one in segments for word in one.words or ()]
            body["words"] = [{"word": one.word.strip(), "start": one.start, "end": one.end} for one in words]
    body["usage"] = {"type": "duration", "seconds": transcript.duration}
    if transcript.error is not None:
        body["error"] = error_object(_with_file_name(transcript.error))
    return JSONResponse(body)


def _segment(index: int, segment: Segment, duration: float) -> dict[str, Any]:
    names = ("seek", "start", "text", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    found: dict[str, Any] = {name: getattr(segment, name) for name in names}
    end = duration if segment.end is None else segment.end
    return {"id": index, **found, "end": end, "tokens": list(segment.tokens)}
