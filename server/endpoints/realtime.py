"""/v1/realtime: transcription sessions over a WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from fastapi import WebSocket
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketDisconnect

from ...callers.errors import ConfigError, InputError, SensoriumError, hint, short_repr
from ...engine.frontend.adapters import AdapterLease
from ...pipelines.option_types import LiveKeywords, TranscribeKeywords
from ...pipelines.speech.decode import FATAL
from ...pipelines.speech.live_input import Gap, LiveEvent
from ...pipelines.speech.live_speakers import live_voices
from ...pipelines.speech.live_voices import LiveVoices
from ...pipelines.speech.merge import join_texts
from ...pipelines.speech.options import LiveOptions
from ...pipelines.speech.segments import Segment
from ..errors import HttpError, error_object, error_response, validation_error
from ..guard import TENANT
from ..large_json import loads
from ..model_routes import lease_model
from ..protocol.audio import check_clips
from ..protocol.realtime import (
    EVENTS,
    AudioInput,
    BufferAppend,
    BufferClear,
    Format,
    SessionUpdate,
    Transcription,
    TurnDetection,
    read_audio,
)
from ..state import Server, Services, new_id, server_of, services_of
from .audio import no_speakers, transcript_events

MAX_MESSAGE_BYTES = 16 << 20
_MAX_VALUES = 4096  # commas and opening brackets of a message
_LARGE = 1 << 16  # characters or bytes above which a thread reads a message or its audio
_MAX_BUFFER_BYTES = 16 << 20  # PCM that is not committed yet
_PROTOCOL = "realtime"


async def realtime(websocket: WebSocket) -> None:
    """Serve a session. A refused one gets an HTTP status; an accepted one is closed with a WebSocket code."""
    services = services_of(websocket)
    services.realtime_sessions += 1
    try:
        try:
            server = await _admit(websocket, services)
        except ClientDisconnect:
            return
        except (HttpError, SensoriumError) as error:
            await websocket.send_denial_response(error_response(error))
            return
        await _serve(websocket, server)
    finally:
        services.realtime_sessions -= 1


async def no_session(websocket: WebSocket) -> None:
    """Refuse the WebSocket of any other path."""
    reason = f"there is no WebSocket {short_repr(websocket.scope['path'], 100)}; open /v1/realtime"
    await websocket.send_denial_response(error_response(HttpError(404, reason, "not_found")))


async def _serve(websocket: WebSocket, server: Server) -> None:
    try:
        session = RealtimeSession(websocket, server, websocket.scope[TENANT], websocket.query_params.get("model"))
    except SensoriumError as error:
        await websocket.send_denial_response(error_response(error))
        return
    offered = websocket.scope["subprotocols"]
    await websocket.accept(_PROTOCOL if _PROTOCOL in offered else None)
    await session.run()


async def _admit(websocket: WebSocket, services: Services) -> Server:
    """Return the model of a session. Raise HttpError for a wrong model or intent, or too many sessions."""
    limit = services.config.max_realtime_sessions
    if websocket.query_params.get("intent", "transcription") != "transcription":
        raise HttpError(400, "intent must be transcription; sessions with answers are not supported", "invalid_input", "intent")
    name = websocket.query_params.get("model")
    if services.pool.is_fixed:
        server_of(websocket).adapter_of(name)  # which may be a name that resolvers look for
    else:
        services.pool.find(name)
    if services.realtime_sessions > limit:
        raise HttpError(429, f"{limit} sessions are open (max_realtime_sessions); try again later", "overloaded")
    await lease_model(websocket, name)
    server = server_of(websocket)
    server.adapter_of(name)  # notes it in the log
    return server


@dataclass(frozen=True, eq=False)
class _Adapter:
    """The adapter that a session names. Its content stays the same while the session names it."""

    name: str
    lease: AdapterLease


@dataclass
class _Live:
    """A live stream: its settings, and a queue of samples that it has not taken yet, which None ends.

    `begin`: where the stream begins, in seconds of the session's audio. `voices`: of its speakers, if these are told apart.
    """

    settings: AudioInput
    begin: float
    voices: LiveVoices | None = None
    adapter: _Adapter | None = None
    blocks: asyncio.Queue[bytes | Gap | None] = field(default_factory=lambda: asyncio.Queue(8))
    task: asyncio.Task[None] | None = None
    cleared: bool = False


@dataclass
class _Item:
    """A stretch of speech. `text`: its final text. `sent`: the text that the client has received."""

    begin: float
    id: str = field(default_factory=lambda: new_id("item_"))
    end: float = 0.0
    text: str = ""
    sent: str = ""
    error: dict[str, Any] | None = None


class RealtimeSession:
    """One session: a task reads the client's events, another one transcribes and sends.

    Args:
        model: the model or adapter that transcribes, unless the settings name another one.

    Raises:
        ConfigError: the model does not transcribe.
    """

    def __init__(self, websocket: WebSocket, server: Server, salt: str | None, model: str | None = None) -> None:
        self._socket, self._server, self._salt, self._model = websocket, server, salt, model
        self._id, self._lock = new_id("sess_"), asyncio.Lock()
        self._settings = AudioInput(format=Format(), transcription=Transcription(), turn_detection=TurnDetection())
        self._jobs = asyncio.Queue[Callable[[], Awaitable[None]]](1)
        self._live: _Live | None = None
        self._appended = False  # audio after the last commit
        self._buffer, self._received = bytearray(), 0.0  # PCM that is not committed; seconds of audio
        self._last_item: str | None = None
        self._voices: LiveVoices | None = None  # of the speakers that the session has heard
        self._adapter: _Adapter | None = None
        self._adapter = self._adapter_of(self._settings)
        self._stream(self._settings, None)  # checks that the model transcribes

    async def run(self) -> None:
        """Serve until the client leaves, is idle, reads nothing, or the engine fails."""
        code, tasks = 1000, [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._work())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except (TimeoutError, WebSocketDisconnect):
            code = 1001
        except Exception as error:
            code = 1011
            error_object(error)  # writes an internal error to the log
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(Exception):
                async with asyncio.timeout(1):
                    await self._socket.close(code)

    async def _read(self) -> None:
        await self._send("session.created", session=self._description())
        while True:
            async with asyncio.timeout(self._server.config.realtime_idle_seconds):
                message = await self._socket.receive()
            if message["type"] != "websocket.receive":
                return
            event_id = None
            try:
                text = message.get("text")
                is_large = isinstance(text, str) and len(text) > _LARGE
                event = await asyncio.to_thread(_parse, text, loads) if is_large else _parse(text)
                event_id = event.get("event_id")
                await self._handle(event)
            except (SensoriumError, RequestValidationError) as error:
                error_fields = error_object(error)
                await self._send("error", error={**error_fields, "event_id": event_id if isinstance(event_id, str) else None})

    async def _handle(self, fields: dict[str, Any]) -> None:
        kind = fields.get("type")
        if not isinstance(kind, str) or kind not in EVENTS:
            raise InputError(
                f"unknown event type {short_repr(kind, 100)}; {hint(kind, EVENTS)}",
                code="unknown_name",
                value=kind,
                param="type",
            )
        try:
            event = EVENTS[kind].model_validate(fields)
        except ValidationError as error:
            raise validation_error(error) from None
        if isinstance(event, SessionUpdate):
            await self._update(event)
        elif isinstance(event, BufferAppend):
            await self._append(event.audio)
        elif isinstance(event, BufferClear):
            self._clear()
            await self._send("input_audio_buffer.cleared")
        else:
            await self._commit()

    async def _update(self, event: SessionUpdate) -> None:
        """Change the settings that the event has. They hold for audio that is sent later."""
        audio_input = event.session.audio.input if event.session.audio else None
        changes = {name: getattr(audio_input, name) for name in audio_input.model_fields_set} if audio_input else {}
        for name, default in (("format", Format()), ("transcription", Transcription())):
            if name in changes:
                changes[name] = changes[name] or default
        settings = self._settings.model_copy(update=changes)
        assert settings.transcription is not None
        adapter, voices = self._adapter_of(settings), await self._voices_for(settings)
        self._stream(settings, None, voices=voices)
        if settings != self._settings and self._live is not None:
            await self._live.blocks.put(None)
            self._live = None
            self._appended = False
        self._settings, self._voices, self._adapter = settings, voices, adapter
        await self._send("session.updated", session=self._description())

    async def _voices_for(self, settings: AudioInput) -> LiveVoices | None:
        """Return the voices for new settings: those heard so far, unless other speakers are asked for.

        Raises:
            InputError: there are no networks, a clip is wrong, or there is no turn detection.
        """
        before, now = self._settings.transcription or Transcription(), settings.transcription or Transcription()
        if now.speakers is not False and settings.turn_detection is None:
            raise InputError("<<param>> need turn_detection, which is off; set it, or leave them out", param="speakers")
        if now.speaker_settings == before.speaker_settings:
            return self._voices
        clips = check_clips(now.known_speaker_references or [])
        model, names = self._server.config.speaker_model, now.known_speaker_names or ()
        options = LiveOptions(
            speakers=now.speakers, speaker_model=model, known_speaker_names=names, known_speaker_references=clips
        )
        try:
            return await asyncio.to_thread(live_voices, self._server.llm.engine, options)
        except ConfigError as error:
            if error.info.param != "speaker_model":
                raise
            raise no_speakers() from error

    async def _append(self, audio: str) -> None:
        """Take samples. While the live stream's buffer is full, this waits, and nothing is read from the socket."""
        assert self._settings.format is not None
        audio_format, rate = self._settings.format, self._settings.format.hertz
        data = (
            await asyncio.to_thread(read_audio, audio, audio_format) if len(audio) > _LARGE else read_audio(audio, audio_format)
        )
        if self._settings.turn_detection is None:
            if len(self._buffer) + len(data) > _MAX_BUFFER_BYTES:
                reason = f"more than {_MAX_BUFFER_BYTES} bytes of PCM are not committed; commit or clear the buffer"
                raise InputError(reason, code="overloaded", param="audio")
            self._buffer += data
            self._appended = bool(self._buffer)
            self._received += len(data) / (2 * rate)
            return
        self._appended = self._appended or bool(data)
        live = self._live
        if live is None:
            live = self._live = _Live(self._settings, self._received, self._voices, self._adapter)
            await self._jobs.put(partial(self._run_live, live))
        self._received += len(data) / (2 * rate)
        for start in range(0, len(data), 2 * rate):
            if not live.cleared:
                await live.blocks.put(data[start : start + 2 * rate])

    async def _commit(self) -> None:
        """End the turn. Without turn detection, the buffer is transcribed as one item."""
        is_empty, self._appended = not self._appended, False
        if is_empty:
            raise InputError("the buffer is empty; append audio before a commit", param="type")
        if self._settings.turn_detection is not None:
            if self._live is not None:
                await self._live.blocks.put(Gap(0))
            return
        data, settings, item = bytes(self._buffer), self._settings, _Item(0.0)
        assert settings.format is not None
        item.end = len(data) / (2 * settings.format.hertz)
        self._buffer.clear()
        await self._commit_item(item)
        await self._jobs.put(partial(self._run_buffer, data, settings, self._adapter, item))

    def _clear(self) -> None:
        self._buffer.clear()
        self._appended = False
        if self._live is not None:
            self._live.cleared = True
            if self._live.task is not None:
                self._live.task.cancel()
            while not self._live.blocks.empty():  # so that a waiting `put` can finish
                self._live.blocks.get_nowait()
            self._live = None

    async def _work(self) -> None:
        while True:
            job = await self._jobs.get()
            try:
                await job()
            except SensoriumError as error:
                await self._send("error", error={**error_object(error), "event_id": None})
                if error.info.code in FATAL:
                    raise

    async def _run_live(self, live: _Live) -> None:
        if live.cleared:
            return
        live.task = asyncio.ensure_future(self._transcribe(live))
        try:
            await asyncio.wait({live.task})
        finally:
            live.task.cancel()
        if live.cleared:
            return
        try:
            live.task.result()
        except SensoriumError:
            if self._live is live:  # not a later stream
                self._clear()
            raise

    async def _transcribe(self, live: _Live) -> None:
        item: _Item | None = None
        lease = await _loaded(live.adapter)
        async with aclosing(self._stream(live.settings, lease, live.blocks, live.voices)) as events:
            async for event in events:
                if event.kind == "speech_started":
                    item = _Item(event.start)
                    fields = {"item_id": item.id, "audio_start_ms": round(1000 * (live.begin + event.start))}
                    await self._send("input_audio_buffer.speech_started", **fields)
                elif item is not None:
                    await self._send_event(item, event, live)
                    item = None if event.kind == "turn_ended" else item

    async def _send_event(self, item: _Item, event: LiveEvent, live: _Live) -> None:
        """Send what an event of a live stream adds to its item."""
        if event.kind == "partial":
            await self._send_text(item, join_texts([item.text, event.text[: event.stable_upto]]))
        elif event.kind == "final":
            for segment in event.segments or ():
                await self._send_segment(item, segment, live)
            item.text = join_texts([item.text, event.text])
            item.error = item.error or (None if event.error is None else error_object(event.error))
            await self._send_text(item, item.text)
        elif event.kind == "speech_stopped":
            item.end = event.end
            fields = {"item_id": item.id, "audio_end_ms": round(1000 * (live.begin + event.end))}
            await self._send("input_audio_buffer.speech_stopped", **fields)
            await self._commit_item(item)
        elif event.kind == "turn_ended":
            await self._complete(item)

    async def _send_segment(self, item: _Item, segment: Segment, live: _Live) -> None:
        """Send a segment of final text with its speaker. Times are seconds of the session's audio."""
        times = {"start": round(live.begin + segment.start, 3), "end": round(live.begin + (segment.end or segment.start), 3)}
        fields = {"item_id": item.id, "content_index": 0, "id": new_id("seg_"), "text": segment.text, **times}
        await self._send(f"{_ITEM}.input_audio_transcription.segment", **fields, speaker=segment.speaker or "unknown")

    async def _run_buffer(self, data: bytes, settings: AudioInput, adapter: _Adapter | None, item: _Item) -> None:
        assert settings.format is not None
        samples = await asyncio.to_thread(_as_floats, data) if len(data) > _LARGE else _as_floats(data)
        transcription = settings.transcription or Transcription()
        options: TranscribeKeywords = {"vad": False, "cache_salt": self._salt}
        options.update({"prompt": transcription.prompt, "hotwords": " ".join(transcription.keywords or ())})
        options["boost"], sound = transcription.boost, (samples, settings.format.hertz)
        try:
            options["adapter"] = await _loaded(adapter)
            events = transcript_events(self._server.llm, sound, transcription.language or None, options)
            async with aclosing(events):
                async for event in events:
                    item.text = event.get("text") or item.text + event.get("delta", "")
                    await self._send_text(item, item.text)
        except (TimeoutError, WebSocketDisconnect):  # the client does not read, or has left
            raise
        except Exception as error:
            item.error = error_object(error)
            if isinstance(error, SensoriumError) and error.info.code in FATAL:
                await self._complete(item)
                raise
        await self._complete(item)

    def _stream(
        self,
        settings: AudioInput,
        adapter: AdapterLease | None,
        blocks: asyncio.Queue[bytes | Gap | None] | None = None,
        voices: LiveVoices | None = None,
    ) -> AsyncGenerator[LiveEvent, None]:
        """Return the events of a live stream. An option that the model cannot honour is an InputError."""
        assert settings.format is not None
        pause = 0.5 if settings.turn_detection is None else settings.turn_detection.silence_duration_ms / 1000
        transcription, limit = settings.transcription or Transcription(), self._server.config.max_realtime_sessions
        options: LiveKeywords = {"pause": pause, "turn_events": True, "cache_salt": self._salt, "max_sessions": limit}
        words = " ".join(transcription.keywords or ())
        options.update({"language": transcription.language or None, "prompt": transcription.prompt, "hotwords": words})
        options["boost"], options["adapter"] = transcription.boost, adapter
        if voices is not None:
            options.update({"speakers": True, "voices": voices})
        source = _taken(blocks or asyncio.Queue())
        return self._server.llm.stream_transcribe(source, settings.format.hertz, **options)

    def _adapter_of(self, settings: AudioInput) -> _Adapter | None:
        """Return the adapter that transcribes, None for the model itself. Raise InputError for a model of another name."""
        name = (None if settings.transcription is None else settings.transcription.model) or self._model
        if self._adapter is not None and self._adapter.name == name:
            return self._adapter
        try:
            adapter = self._server.adapter_of(name)
        except HttpError as error:
            param = "session.audio.input.transcription.model"
            raise InputError(error.message, code="unknown_name", value=name, param=param) from None
        lease = self._server.engine.adapters.lease(adapter)
        return None if adapter is None or lease is None else _Adapter(adapter, lease)

    async def _send_text(self, item: _Item, text: str) -> None:
        if len(text) > len(item.sent):
            delta, item.sent = text[len(item.sent) :], text
            await self._send(f"{_ITEM}.input_audio_transcription.delta", item_id=item.id, content_index=0, delta=delta)

    async def _commit_item(self, item: _Item) -> None:
        previous, self._last_item = self._last_item, item.id
        await self._send("input_audio_buffer.committed", item_id=item.id, previous_item_id=previous)
        content = [{"type": "input_audio", "transcript": None}]
        message = {"id": item.id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user"}
        for kind in ("added", "done"):
            await self._send(f"{_ITEM}.{kind}", previous_item_id=previous, item={**message, "content": content})

    async def _complete(self, item: _Item) -> None:
        kind, fields = f"{_ITEM}.input_audio_transcription", {"item_id": item.id, "content_index": 0}
        if item.error is not None:
            await self._send(f"{kind}.failed", **fields, error=item.error)
            return
        usage = {"type": "duration", "seconds": round(item.end - item.begin, 3)}
        await self._send(f"{kind}.completed", **fields, transcript=item.text, usage=usage)

    def _description(self) -> dict[str, Any]:
        settings = self._settings.model_dump(exclude=_UNTOLD)
        settings["transcription"]["model"] = self._server.name if self._adapter is None else self._adapter.name
        settings["format"]["rate"] = 24_000 if settings["format"]["type"] == "audio/pcm" else None
        settings["format"] = {name: value for name, value in settings["format"].items() if value is not None}
        kind = {"type": "transcription", "object": "realtime.transcription_session", "id": self._id}
        return {**kind, "audio": {"input": {**settings, "noise_reduction": None}}, "include": None}

    async def _send(self, kind: str, **fields: Any) -> None:
        text = json.dumps({"type": kind, "event_id": new_id("event_"), **fields})
        async with self._lock, asyncio.timeout(self._server.config.send_seconds):
            await self._socket.send_text(text)


_ITEM = "conversation.item"
_UNTOLD: Any = {"model": True, "format": {"model"}, "turn_detection": {"model"}, "transcription": {"known_speaker_references"}}


async def _loaded(adapter: _Adapter | None) -> AdapterLease | None:
    """Load the adapter if it is not loaded, and return its lease. Errors: see `RequestAdapters.load`."""
    if adapter is None:
        return None
    await asyncio.to_thread(adapter.lease.load)
    return adapter.lease


async def _taken(blocks: asyncio.Queue[bytes | Gap | None]) -> AsyncGenerator[bytes | Gap, None]:
    while (block := await blocks.get()) is not None:
        yield block


def _as_floats(data: bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.frombuffer(data, "<i2").astype(np.float32) / np.float32(32768)


def _parse(text: object, parse: Callable[[bytes], Any] = json.loads) -> dict[str, Any]:
    """Return a client's event.

    Raises:
        InputError: it is no JSON object, or too large.
    """
    if not isinstance(text, str):
        raise InputError("a message must be text with a JSON object; audio is base64 in input_audio_buffer.append")
    if len(text) > MAX_MESSAGE_BYTES or sum(map(text.count, ",[{")) > _MAX_VALUES:
        raise InputError(f"the message has more than {MAX_MESSAGE_BYTES} bytes or {_MAX_VALUES} values; send smaller ones")
    try:
        message = parse(text.encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise InputError("the message is not a JSON object; send an event with a type")
    return message
