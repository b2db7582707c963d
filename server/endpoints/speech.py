"""/v1/audio/speech and /v1/audio/voices."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ...callers.errors import InputError, naming_field
from ...pipelines.option_types import SpeakKeywords
from ...pipelines.speak import Speech
from ...pipelines.speech.sound_writer import MEDIA_TYPES, SoundWriter
from ..events import STREAM_HEADERS
from ..model_routes import with_model
from ..protocol.speech import SpeechBody
from ..state import server_of, unless_disconnected
from ..streams import open_stream

_NO_VOICES = "this model does not turn texts into speech; load one that does"


async def voices(request: Request, model: str | None = None) -> Response:
    """Return the names of a model's voices. The model is loaded before if need be."""
    return await with_model(request, model, False, partial(_list_voices, request, model))


async def _list_voices(request: Request, model: str | None) -> Response:
    server = server_of(request)
    server.check_model(model)
    return JSONResponse({"voices": [] if server.engine.voices is None else list(server.engine.voices.names)})


async def speech(body: SpeechBody, request: Request) -> Response:
    """Speak a text. The sound is sent sentence by sentence, as bytes of a file or as events."""
    server = server_of(request)
    server.check_model(body.model)
    if server.engine.voices is None:
        raise InputError(_NO_VOICES, code="unsupported", param="model")
    options: SpeakKeywords = {
        "voice": body.voice_name,
        "speed": body.speed,
        "language": body.language,
        "phonemes": body.phonemes,
        "seed": body.seed,
    }
    parts = _checked(server.llm.stream_speak(body.input, **options))
    writer = SoundWriter(body.response_format, server.engine.voices.rule.rate)

    async def events(first: Speech) -> AsyncGenerator[Mapping[str, Any], None]:
        async with aclosing(_sound(first, parts, writer)) as sound:
            async for data in sound:
                yield {"type": "speech.audio.delta", "audio": b64encode(data).decode()}
        yield {"type": "speech.audio.done"}

    if body.stream_format == "sse":
        return await open_stream(request, parts, events, with_done=False)
    first = await unless_disconnected(request, anext(parts))
    sound = _sound(first, parts, writer)
    return StreamingResponse(sound, media_type=MEDIA_TYPES[body.response_format], headers=STREAM_HEADERS)


async def _sound(first: Speech, parts: AsyncGenerator[Speech, None], writer: SoundWriter) -> AsyncGenerator[bytes, None]:
    """Yield the bytes of the parts, as far as there are any."""
    async with aclosing(parts):
        if data := await asyncio.to_thread(writer.write, first.samples):
            yield data
        async for part in parts:
            if data := await asyncio.to_thread(writer.write, part.samples):
                yield data
        if data := await asyncio.to_thread(writer.close):
            yield data


async def _checked(parts: AsyncGenerator[Speech, None]) -> AsyncGenerator[Speech, None]:
    """Yield the parts, and raise the error of one that failed. Errors name the fields of the body."""
    with naming_field("messages", "input"):
        async with aclosing(parts):
            async for part in parts:
                if part.error is not None:
                    raise part.error.exception()
                yield part
