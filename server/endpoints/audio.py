"""/v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import ValidationError
from starlette.datastructures import UploadFile

from ...mm.errors import InputError
from ...pipelines.speech.subtitles import WRITERS, SubtitleLayout
from ...pipelines.transcribe import Segment, Transcript
from ..errors import HttpError
from ..protocol.audio import LISTS, AudioForm, TranscriptionForm
from ..state import cache_salt, server_of, unless_disconnected

F = TypeVar("F", bound=AudioForm)
_MAX_FIELDS, _MAX_FIELD_BYTES = 64, 1 << 20


async def transcriptions(request: Request) -> Response:
    """Transcribe an audio file in the language spoken."""
    form, audio = await _read(request, TranscriptionForm)
    times = "word" if "word" in (form.timestamp_granularities or ()) else "segment"
    always = bool(form.timestamp_granularities) or form.response_format in ("srt", "vtt")
    if form.timestamp_granularities and form.response_format != "verbose_json":
        reason = "timestamp_granularities needs response_format=verbose_json; set it"
        raise InputError(reason, param="timestamp_granularities")
    return await _respond(request, form, audio, "transcribe", times, always, form.language)


async def translations(request: Request) -> Response:
    """Translate the speech of an audio file into English."""
    form, audio = await _read(request, AudioForm)
    return await _respond(request, form, audio, "translate", "segment", form.response_format in ("srt", "vtt"), None)


async def _read(request: Request, kind: type[F]) -> tuple[F, bytes]:
    """Return the fields of a form and its file."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        reason = "the body must be a form with the header Content-Type: multipart/form-data"
        raise HttpError(415, reason, "unsupported_media_type")
    form = await request.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_MAX_FIELD_BYTES)
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise InputError("file is missing; give an audio file as the part `file` of the form", param="file")
        fields: dict[str, Any] = {}
        for key in form:
            name = key.removesuffix("[]")
            if name != "file":
                fields[name] = form.getlist(key) if name in LISTS else form.get(key)
        try:
            return kind.model_validate(fields), await file.read()
        except ValidationError as error:
            places = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
            raise RequestValidationError(places) from None
    finally:
        await form.close()


async def _respond(
    request: Request, form: AudioForm, audio: bytes, task: str, times: str, always: bool, language: str | None
) -> Response:
    """Transcribe and write the response. `times` are needed if `always`, and otherwise given if the model can."""
    server = server_of(request)
    server.check_model(form.model)
    speech = server.engine.llm.speech
    wanted = always or (form.response_format == "verbose_json" and speech is not None and speech.has_timestamps)
    options: dict[str, Any] = {"prompt": form.prompt, "hotwords": form.hotwords, "vad": form.vad}
    options["cache_salt"] = cache_salt(request, form.cache_salt)
    if form.temperature:  # with 0, hotter answers follow where the first one fails, as OpenAI's do
        options["temperature"] = form.temperature
    work = server.engine.transcribe(audio, language, task, timestamps=times if wanted else "none", **options)
    (transcript,) = await unless_disconnected(request, work)
    if transcript.error is not None:
        raise transcript.error.exception()
    return _response(form.response_format, transcript, task)


def _response(form: str, transcript: Transcript, task: str) -> Response:
    if form == "text":
        return PlainTextResponse(f"{transcript.text}\n")
    if form in WRITERS:
        return PlainTextResponse(f"{WRITERS[form](transcript, SubtitleLayout())}\n")
    body: dict[str, Any] = {"text": transcript.text}
    if form == "verbose_json":
        segments = transcript.segments or ()
        body = {"task": task, "language": transcript.language, "duration": transcript.duration, **body}
        body["segments"] = [_segment(index, one, transcript.duration) for index, one in enumerate(segments)]
        if any(one.words is not None for one in segments):
            words = [word for one in segments for word in one.words or ()]
            body["words"] = [{"word": one.word.strip(), "start": one.start, "end": one.end} for one in words]
    body["usage"] = {"type": "duration", "seconds": transcript.duration}
    return JSONResponse(body)


def _segment(index: int, segment: Segment, duration: float) -> dict[str, Any]:
    names = ("seek", "start", "text", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    found: dict[str, Any] = {name: getattr(segment, name) for name in names}
    end = duration if segment.end is None else segment.end
    return {"id": index, **found, "end": end, "tokens": list(segment.tokens)}
