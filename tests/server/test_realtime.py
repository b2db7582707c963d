"""/v1/realtime with the `openai` package, whose types check every event, on the shipped speech model."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from functools import partial

import numpy as np
import openai
import pytest
import soundfile
import torch
from http_server import TINY, listening, make_server, openai_client
from lora import write
from openai.types.realtime import RealtimeServerEvent
from parakeet import make_model, make_transducer, save
from pydantic import TypeAdapter
from safetensors import safe_open
from sensorium import EngineDeadError, InputError
from sensorium.engine.speaker_networks import SpeakerNetworks
from sensorium.pipelines.speech import live_session, speakers
from sensorium.pipelines.speech.live_slots import PassSlots, StreamSlot
from sensorium.pipelines.speech.merge import join_texts
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints import realtime
from sensorium.server.endpoints.realtime import RealtimeSession, _Live
from sensorium.server.protocol.realtime import Format, read_audio
from sensorium.server.state import Server
from tone_speakers import ToneNet
from torch.nn import functional as F
from waiting import LONG, assert_idle, wait_until

connect = pytest.importorskip("websockets.sync.client").connect
from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402

EVENT = TypeAdapter(RealtimeServerEvent)
RATE = 24_000
SEGMENT = "conversation.item.input_audio_transcription.segment"
DELTA, COMPLETED, FAILED = (f"conversation.item.input_audio_transcription.{kind}" for kind in ("delta", "completed", "failed"))


@pytest.fixture(scope="module")
def server(tiny_asr):
    return tiny_asr[1]


@pytest.fixture(scope="module")
def url(tiny_asr):
    return tiny_asr[0]


@pytest.fixture(scope="module")
def client(url):
    with openai_client(url) as client:
        yield client


@pytest.fixture(scope="module")
def talk():
    """Return PCM at 24 kHz: two files, each with silence after it."""
    parts = []
    for path in sorted((TINY.parent / "speech").glob("*.flac"))[:2]:
        samples, rate = soundfile.read(path, dtype="float32")
        places = np.arange(len(samples) * RATE // rate) * rate / RATE
        parts += [np.interp(places, np.arange(len(samples)), samples), np.zeros(2 * RATE)]
    return (np.concatenate(parts) * 32767).astype("<i2").tobytes()


def encoded(data):
    return base64.b64encode(data).decode()


def session(**audio):
    return {"type": "transcription", "audio": {"input": audio}}


def append(connection, data):
    for start in range(0, len(data), RATE // 5):
        connection.input_audio_buffer.append(audio=encoded(data[start : start + RATE // 5]))


def until(connection, kind, count=1):
    """Return the events up to the `count`-th one of a kind, and check their form."""
    events = []
    while sum(event.type == kind for event in events) < count:
        event = connection.recv()
        EVENT.validate_python(event.to_dict())
        assert event.type == kind or event.type not in ("error", FAILED), event
        events.append(event)
    return events


def expected(server, data, **options):
    """Return the final texts of a live stream."""

    async def run():
        async def blocks():
            yield data

        events = [event async for event in server.llm.stream_transcribe(blocks(), RATE, turn_events=True, **options)]
        texts = [""]
        for event in events:
            if event.kind == "final":
                texts[-1] = join_texts([texts[-1], event.text])
            if event.kind == "turn_ended":
                texts.append("")
        return texts[:-1]

    return asyncio.run(run())


def test_turns_are_transcribed_as_they_end(client, server, talk):
    with client.realtime.connect(model="tiny-asr") as connection:
        (created,) = until(connection, "session.created")
        assert created.session.audio.input.turn_detection.type == "server_vad"
        assert created.session.audio.input.transcription.model == "tiny-asr"
        detection = {"type": "server_vad", "silence_duration_ms": 700}
        connection.session.update(session=session(format={"type": "audio/pcm", "rate": RATE}, turn_detection=detection))
        (updated,) = until(connection, "session.updated")
        assert updated.session.audio.input.turn_detection.silence_duration_ms == 700
        connection.input_audio_buffer.commit()
        assert "empty" in until(connection, "error")[-1].error.message
        append(connection, talk)
        texts = expected(server, talk, pause=0.7)
        events = until(connection, COMPLETED, len(texts))
    items = list(dict.fromkeys(event.item_id for event in events if hasattr(event, "item_id")))
    done = [event for event in events if event.type == COMPLETED]
    assert [event.transcript for event in done] == texts
    assert len(texts) >= 2
    assert all(texts)
    previous, last = None, 0
    for item in items:
        own = [event for event in events if getattr(event, "item_id", None) == item]
        kinds = [event.type.removeprefix("input_audio_buffer.") for event in own if event.type != DELTA]
        assert kinds == ["speech_started", "speech_stopped", "committed", COMPLETED]
        started, stopped, committed, completed = (event for event in own if event.type != DELTA)
        assert last <= started.audio_start_ms < stopped.audio_end_ms <= len(talk) / 2 / RATE * 1000
        assert "".join(event.delta for event in own if event.type == DELTA) == completed.transcript
        assert completed.usage.seconds == pytest.approx((stopped.audio_end_ms - started.audio_start_ms) / 1000, abs=0.01)
        assert committed.previous_item_id == previous
        previous, last = item, stopped.audio_end_ms
    assert_idle(server.llm)


def test_without_turn_detection_a_commit_ends_the_turn(client, server, talk):
    samples = np.frombuffer(talk, "<i2").astype(np.float32) / 32768
    (whole,) = asyncio.run(server.llm.transcribe((samples, RATE), vad=False))

    async def run():
        other = openai.AsyncOpenAI(base_url=client.base_url, api_key="none")
        async with other, other.realtime.connect(model="tiny-asr") as connection:
            await connection.session.update(session=session(turn_detection=None))
            await connection.input_audio_buffer.append(audio=encoded(talk[: 2 * RATE]))
            await connection.input_audio_buffer.clear()
            await connection.input_audio_buffer.commit()
            await connection.input_audio_buffer.append(audio=encoded(talk))
            await connection.input_audio_buffer.commit()
            events = []
            while not events or events[-1].type != COMPLETED:
                events.append(await connection.recv())
            return events

    events = asyncio.run(run())
    kinds = [event.type for event in events]
    start = ["session.created", "session.updated", "input_audio_buffer.cleared", "error", "input_audio_buffer.committed"]
    assert kinds[:5] == start
    assert events[1].session.audio.input.turn_detection is None
    assert "empty" in events[3].error.message
    assert events[-1].transcript == "".join(event.delta for event in events if event.type == DELTA) == whole.text
    assert whole.text
    assert events[-1].item_id == events[4].item_id
    assert events[-1].usage.seconds == pytest.approx(len(samples) / RATE, abs=0.01)


@pytest.mark.parametrize("kind", ["ctc", "tdt"])
def test_a_model_without_a_decoder(tmp_path, talk, kind):
    found = make_model(0) if kind == "ctc" else make_transducer(0, kind)
    server = make_server(save(tmp_path, *found), "parakeet", warm_up=False)
    samples = np.frombuffer(talk, "<i2").astype(np.float32) / 32768
    with server.llm.llm, listening(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        (whole,) = asyncio.run(server.llm.transcribe((samples, RATE), vad=False))
        texts = expected(server, talk, pause=0.5)
        assert whole.text
        assert len(texts) >= 2
        for detection, transcripts in ((None, [whole.text]), ({"type": "server_vad"}, texts)):
            with client.realtime.connect(model="parakeet") as connection:
                connection.session.update(session=session(turn_detection=detection))
                append(connection, talk)
                if detection is None:
                    connection.input_audio_buffer.commit()
                events = until(connection, COMPLETED, len(transcripts))
            assert [event.transcript for event in events if event.type == COMPLETED] == transcripts
            assert "".join(event.delta for event in events if event.type == DELTA) == "".join(transcripts)
        with client.realtime.connect(model="parakeet") as connection:
            connection.session.update(session=session(transcription={"language": "de"}))
            *_, error = (connection.recv() for _ in range(2))
            assert (error.type, "language" in error.error.message) == ("error", True)
        assert_idle(server.llm)


def test_a_commit_ends_a_turn_of_speech_and_clear_drops_one(client, talk):
    with client.realtime.connect(model="tiny-asr") as connection:
        append(connection, talk[: 8 * RATE])
        until(connection, "input_audio_buffer.speech_started")
        connection.input_audio_buffer.clear()
        until(connection, "input_audio_buffer.cleared")
        append(connection, talk[: 8 * RATE])
        connection.input_audio_buffer.commit()
        events = until(connection, COMPLETED)
        started = next(event for event in events if event.type == "input_audio_buffer.speech_started")
        assert started.audio_start_ms >= 4000  # after the audio that was dropped


class LoudnessNet(ToneNet):
    """A segmentation network that hears one speaker."""

    def activity(self, windows):
        loud = windows.unfold(1, 2 * self.first_frame + 1, self.frame_step).abs().amax(2) > 0.02
        return torch.stack([loud, torch.zeros_like(loud), torch.zeros_like(loud)], 2).float()


class LoudnessVoices:
    """A speaker encoder whose vectors tell quiet speech from loud speech."""

    dim = 2

    def features(self, samples):
        return F.pad(samples, (200, 200)).unfold(0, 400, 160).square().mean(1, keepdim=True)

    def embed(self, frames):
        return torch.tensor([[1.0, 0.0] if own.mean() > 1e-3 else [0.0, 1.0] for own in frames])


def test_speakers_keep_their_labels_in_a_session(client, talk, monkeypatch):
    networks = SpeakerNetworks(LoudnessNet(), LoudnessVoices())
    monkeypatch.setattr(speakers, "load_speaker_networks", lambda folder: networks)
    loud = np.frombuffer(talk[: 9 * RATE], "<i2")
    quiet = (0.2 * loud).astype("<i2")
    with client.realtime.connect(model="tiny-asr") as connection:
        heard = []
        for part, transcription in ((loud, {"speakers": True}), (quiet, None), (loud, {"speakers": True, "keywords": ["on"]})):
            if transcription is not None:
                connection.session.update(session=session(transcription=transcription))
                (*_, updated) = until(connection, "session.updated")
                told = updated.session.audio.input.transcription.to_dict()
                assert told["speakers"] is True
                assert "known_speaker_references" not in told
            else:
                connection.input_audio_buffer.clear()
                until(connection, "input_audio_buffer.cleared")
            append(connection, np.concatenate([part, np.zeros(2 * RATE, "<i2")]).tobytes())
            heard.append(until(connection, COMPLETED))
    for events, speaker in zip(heard, ("SPEAKER_00", "SPEAKER_01", "SPEAKER_00"), strict=True):
        parts = [event for event in events if event.type == SEGMENT]
        assert {part.speaker for part in parts} == {speaker}
        assert " ".join(part.text for part in parts).split() == events[-1].transcript.split()
        assert {part.item_id for part in parts} == {events[-1].item_id}
        started = next(event for event in events if event.type == "input_audio_buffer.speech_started")
        assert abs(1000 * parts[0].start - started.audio_start_ms) < 500
        assert all(part.start <= part.end for part in parts)


def test_speakers_without_networks_are_refused(client):
    with client.realtime.connect(model="tiny-asr") as connection:
        for transcription, detection, param, code in (
            ({"speakers": True}, {"type": "server_vad"}, "speakers", "unsupported"),
            ({"speakers": True}, None, "speakers", "invalid_input"),
            ({"speakers": 0}, {"type": "server_vad"}, "speakers", "invalid_value"),
            ({"known_speaker_names": ["a"]}, {"type": "server_vad"}, "speakers", "invalid_input"),
            (
                {"speakers": 1, "known_speaker_names": ["a"], "known_speaker_references": ["/etc/passwd"]},
                {"type": "server_vad"},
                "known_speaker_references",
                "invalid_value",
            ),
        ):
            connection.session.update(session=session(transcription=transcription, turn_detection=detection))
            event = connection.recv()
            while event.type != "error":
                event = connection.recv()
            assert (event.error.param, event.error.code) == (param, code)
        connection.session.update(session=session(transcription={"speakers": False}))
        until(connection, "session.updated")


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ("nonsense", None),
        ("[1]", None),
        (b"\0\0", None),
        ("[" * 100_000, None),
        ({"type": "response.create"}, "type"),
        ({"type": []}, "type"),
        ({"type": "session.update"}, "session"),
        ({"type": "\ud800", "\ud800": "\ud800"}, "type"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "session.type"),
        ({"type": "session.update", "session": session(colour=1)}, "session.audio.input.colour"),
        ({"type": "session.update", "session": session(turn_detection={"type": "semantic_vad"})}, None),
        (
            {"type": "session.update", "session": session(turn_detection={"type": "server_vad", "threshold": 0.9})},
            "session.audio.input.turn_detection.threshold",
        ),
        (
            {"type": "session.update", "session": session(noise_reduction={"type": "near_field"})},
            "session.audio.input.noise_reduction",
        ),
        ({"type": "session.update", "session": session(format={"type": "audio/pcm", "rate": 8000})}, None),
        ({"type": "session.update", "session": session(transcription={"language": "klingon"})}, "language"),
        ({"type": "session.update", "session": session(transcription={"model": "gpt"})}, None),
        ({"type": "session.update", "session": session(transcription={"boost": ["Ann", " "]})}, "boost"),
        ({"type": "session.update", "session": {**session(), "include": ["x"]}}, "session.include"),
        ({"type": "input_audio_buffer.append", "audio": "#"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "", "more": 1}, "more"),
    ],
)
def test_wrong_events_are_refused_and_the_session_goes_on(url, event, param):
    with connect(f"{url}/v1/realtime".replace("http", "ws"), max_size=None) as socket:
        assert json.loads(socket.recv())["type"] == "session.created"
        named = {**event, "event_id": "mine"} if isinstance(event, dict) else event
        socket.send(json.dumps(named) if isinstance(named, dict) else named)
        found = json.loads(socket.recv())
        EVENT.validate_python(found)
        assert (found["type"], found["error"]["type"]) == ("error", "invalid_request_error"), found
        assert found["error"]["event_id"] == ("mine" if isinstance(event, dict) else None)
        assert param is None or found["error"]["param"] == param, found
        socket.send(json.dumps({"type": "input_audio_buffer.clear"}))
        assert json.loads(socket.recv())["type"] == "input_audio_buffer.cleared"


def test_who_may_connect(server, url):
    odd = "a/b=+é"
    keyed = Server(server.llm, ServerConfig(api_key=["one", odd], max_realtime_sessions=1), "tiny-asr")
    key = {"Authorization": "Bearer one"}
    protocols = ["realtime", "openai-insecure-api-key.one"]
    with listening(keyed) as url:
        address = f"{url}/v1/realtime".replace("http", "ws")

        def status(address=address, **options):
            with pytest.raises(InvalidStatus) as found, connect(address, **options):
                pass
            error = json.loads(found.value.response.body)["error"]
            return found.value.response.status_code, error["code"]

        assert status() == (401, "invalid_api_key")
        assert status(additional_headers={"Authorization": "Bearer two"}) == (401, "invalid_api_key")
        assert status(subprotocols=["realtime", "openai-insecure-api-key.two"]) == (401, "invalid_api_key")
        assert status(additional_headers=key, origin="http://evil.example") == (403, "wrong_origin")
        assert status(f"{address}?model=gpt", additional_headers=key) == (404, "model_not_found")
        assert status(f"{address}?intent=translation", additional_headers=key) == (400, "invalid_input")
        assert status(additional_headers=key, origin="http://[") == (403, "wrong_origin")
        assert status(subprotocols=["realtime", "sensorium-api-key-base64url.A"]) == (401, "invalid_api_key")
        name = base64.urlsafe_b64encode(odd.encode()).decode().rstrip("=")
        with connect(address, subprotocols=["realtime", f"sensorium-api-key-base64url.{name}"], origin=url) as socket:
            assert json.loads(socket.recv())["type"] == "session.created"
        wait_until(lambda: not keyed.services.realtime_sessions)
        with connect(address, subprotocols=protocols, origin=url) as socket:
            assert socket.subprotocol == "realtime"
            assert json.loads(socket.recv())["type"] == "session.created"
            assert status(additional_headers=key) == (429, "overloaded")


def test_a_model_without_speech_is_refused(tiny):
    with pytest.raises(InvalidStatus) as found, connect(f"{tiny[0]}/v1/realtime".replace("http", "ws")):
        pass
    assert found.value.response.status_code == 400
    wait_until(lambda: not tiny[1].services.realtime_sessions)


def test_an_idle_session_is_closed(server):
    with listening(Server(server.llm, ServerConfig(realtime_idle_seconds=0.01), "tiny-asr")) as url:
        socket = connect(f"{url}/v1/realtime".replace("http", "ws"))
        socket.recv()
        with pytest.raises(ConnectionClosed):
            socket.recv()


class SlowSocket:
    """A client that sends one event and reads nothing."""

    def __init__(self):
        self.closed = []

    async def receive(self):
        await asyncio.Event().wait()

    async def send_text(self, text):
        await asyncio.Event().wait()

    async def close(self, code):
        self.closed.append(code)


def test_a_client_that_reads_nothing_is_disconnected(server):
    async def run():
        socket = SlowSocket()
        slow = Server(server.llm, ServerConfig(send_seconds=0.01), "tiny-asr")
        await RealtimeSession(socket, slow, None).run()
        return socket.closed

    assert asyncio.run(run()) == [1001]


@pytest.mark.parametrize("detection", [True, False])
def test_a_client_that_leaves_ends_the_work(server, url, talk, monkeypatch, detection):
    """It leaves while the engine computes: the step that runs is the last one."""
    core, reached, go_on = server.engine.loop.core, threading.Event(), threading.Event()
    step = core.step

    def held():
        reached.set()
        go_on.wait(LONG)
        return step()

    with connect(f"{url}/v1/realtime".replace("http", "ws")) as socket:
        socket.recv()
        if not detection:
            socket.send(json.dumps({"type": "session.update", "session": session(turn_detection=None)}))
        monkeypatch.setattr(core, "step", held)
        socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": encoded(talk)}))
        if not detection:
            socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
        assert reached.wait(LONG)
    go_on.set()
    wait_until(lambda: server.services.realtime_sessions == 0 and not server.engine.loop._names)
    assert_idle(server.llm)


def test_sessions_share_the_slots_of_partial_passes(server, client, talk, monkeypatch):
    """A session waits while a stream of Python has the only slot, and leaves the queue when its client leaves."""
    slots = PassSlots(1)
    monkeypatch.setattr(live_session, "slots_of", lambda engine: slots)
    other = StreamSlot(slots, lambda: None)
    assert other.acquire()
    with client.realtime.connect(model="tiny-asr") as connection:
        append(connection, talk[: 6 * RATE])
        wait_until(lambda: slots._waiting)
    wait_until(lambda: not slots._waiting)
    with client.realtime.connect(model="tiny-asr") as connection:
        append(connection, talk[: 6 * RATE])
        wait_until(lambda: slots._waiting)
        other.release()
        append(connection, talk[6 * RATE :])
        until(connection, COMPLETED)
    wait_until(lambda: not server.services.realtime_sessions)
    assert other.acquire()
    assert_idle(server.llm)


def test_each_key_has_its_own_cache(server, talk, monkeypatch):
    salts, request = [], server.engine.request
    monkeypatch.setattr(server.engine, "request", lambda prompt, *rest, **options: (
        salts.append(prompt.get("cache_salt")) or request(prompt, *rest, **options)
    ))  # fmt: skip
    keyed = Server(server.llm, ServerConfig(api_key=["one", "two"]), "tiny-asr")
    with listening(keyed) as url:
        for key in ("one", "two"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key).realtime.connect(model="tiny-asr") as connection:
                connection.session.update(session=session(turn_detection=None))
                connection.input_audio_buffer.append(audio=encoded(talk[: 2 * RATE]))
                connection.input_audio_buffer.commit()
                until(connection, COMPLETED)
                connection.session.update(session=session(turn_detection={"type": "server_vad"}))
                append(connection, talk)
                until(connection, COMPLETED)
            wait_until(lambda: not keyed.services.realtime_sessions)
            salts.append("end")
    one, two = (set(part.split()) for part in " ".join(map(str, salts)).split("end")[:2])
    assert len(one) == len(two) == 1
    assert not one & two
    assert "None" not in one | two


def test_an_engine_that_fails_ends_the_session(client, server, talk, monkeypatch):
    async def fail(handle):
        raise EngineDeadError("the engine has failed")

    monkeypatch.setattr(server.llm, "answer", fail)
    with client.realtime.connect(model="tiny-asr") as connection:
        connection.input_audio_buffer.append(audio=encoded(talk))
        kinds = [""]
        while kinds[-1] != "error":
            kinds.append(connection.recv().type)
        with pytest.raises(ConnectionClosed) as found:
            connection.recv()
    assert found.value.rcvd.code == 1011


def test_an_engine_that_fails_on_a_buffer_ends_the_session(client, server, talk, monkeypatch):
    async def fail(*args, **options):
        raise EngineDeadError("the engine has failed")

    monkeypatch.setattr(server.llm, "transcribe", fail)
    with client.realtime.connect(model="tiny-asr") as connection:
        connection.session.update(session=session(turn_detection=None))
        connection.input_audio_buffer.append(audio=encoded(talk[: 2 * RATE]))
        connection.input_audio_buffer.commit()
        kinds = []
        with pytest.raises(ConnectionClosed) as found:
            kinds.extend(event.type for event in iter(connection.recv, None))
    assert kinds[-2:] == [FAILED, "error"]
    assert found.value.rcvd.code == 1011


def test_an_error_of_an_old_stream_keeps_later_audio(server, monkeypatch):
    async def run():
        found = RealtimeSession(SlowSocket(), server, None)
        old, later = _Live(found._settings, 0.0), _Live(found._settings, 1.0)
        found._live, found._buffer = later, bytearray(b"later")

        async def fail(live):
            raise InputError("x")

        monkeypatch.setattr(found, "_transcribe", fail)
        with pytest.raises(InputError):
            await found._run_live(old)
        assert (found._live, bytes(found._buffer)) == (later, b"later")
        with pytest.raises(InputError):
            await found._run_live(later)
        assert (found._live, bytes(found._buffer)) == (None, b"")

    asyncio.run(run())


def test_audio_without_turn_detection_counts_in_later_times(server, talk):
    async def run():
        found = RealtimeSession(SlowSocket(), server, None)
        detection = found._settings
        found._settings = detection.model_copy(update={"turn_detection": None})
        await found._append(encoded(talk[: 4 * RATE]))
        found._settings = detection
        await found._append(encoded(talk[: 2 * RATE]))
        assert (found._live.begin, found._received) == (2.0, 3.0)

    asyncio.run(run())


def test_a_large_message_is_parsed_in_a_thread(url, monkeypatch):
    threads = []

    def recorded(*args, parse=realtime._parse):
        threads.append("asyncio" in threading.current_thread().name)
        return parse(*args)

    monkeypatch.setattr(realtime, "_parse", recorded)
    with connect(f"{url}/v1/realtime".replace("http", "ws"), max_size=None) as socket:
        socket.recv()
        for text in "é" * (1 << 20) + "é", "":
            socket.send(json.dumps({"type": "input_audio_buffer.clear", "event_id": text}, ensure_ascii=False))
            assert json.loads(socket.recv())["type"] == "input_audio_buffer.cleared"
    assert threads == [True, False]


def test_large_audio_is_read_in_a_thread(client, monkeypatch, talk):
    reading = {"read_audio": [], "_as_floats": []}
    real = {name: getattr(realtime, name) for name in reading}

    def recorded(name, *args):
        reading[name].append("asyncio" in threading.current_thread().name)
        return real[name](*args)

    for name in reading:
        monkeypatch.setattr(realtime, name, partial(recorded, name))
    with client.realtime.connect(model="tiny-asr") as connection:
        connection.session.update(session=session(turn_detection=None))
        for size in (1 << 14, 1 << 17):
            connection.input_audio_buffer.append(audio=encoded(talk[:size]))
            connection.input_audio_buffer.commit()
            until(connection, COMPLETED)
    assert reading == {"read_audio": [False, True], "_as_floats": [False, True]}


def test_large_base64_is_read_in_chunks():
    data = bytes(range(256)) * 4096
    text, form = encoded(data), Format(type="audio/pcm", rate=RATE)
    assert read_audio(text, form) == data
    wide = np.frombuffer(read_audio(text, Format(type="audio/pcmu")), "<i2").reshape(4096, 256)
    assert (wide == wide[0]).all()
    assert wide[0].tolist() == np.frombuffer(read_audio(encoded(data[:256]), Format(type="audio/pcmu")), "<i2").tolist()
    for wrong in (f"AA=={text}", f"{text[: 1 << 18]}AA=={text}", f"{text[:-1]}", f"{text}=", f"{text}A===", "=", "é" * 8):
        with pytest.raises(InputError, match="not base64"):
            read_audio(wrong, form)


def test_an_item_that_fails(client, server, monkeypatch, talk):
    async def fail(audio, language, on_text, **options):
        raise ValueError("secret")

    monkeypatch.setattr(server.llm, "transcribe", fail)
    with client.realtime.connect(model="tiny-asr") as connection:
        connection.session.update(session=session(turn_detection=None))
        connection.input_audio_buffer.append(audio=encoded(talk[: 2 * RATE]))
        connection.input_audio_buffer.commit()
        failed = until(connection, FAILED)[-1]
        assert failed.error.code == "internal"
        assert "secret" not in failed.error.message
        connection.input_audio_buffer.clear()
        until(connection, "input_audio_buffer.cleared")


def test_a_session_may_name_an_adapter_that_resolvers_look_for(client, server, monkeypatch, talk):
    asked = []
    monkeypatch.setattr(server.engine.adapters, "_resolvers", (lambda name: asked.append(name),))
    with client.realtime.connect(model="sql") as connection:
        connection.session.update(session=session(turn_detection=None))
        until(connection, "session.updated")
        connection.input_audio_buffer.append(audio=encoded(talk[: 2 * RATE]))
        connection.input_audio_buffer.commit()
        failed = until(connection, FAILED)[-1].error
        assert (failed.code, failed.param, set(asked)) == ("model_not_found", "model", {"sql"})


def make_adapter(folder, seed):
    """Write an adapter of the shipped model's decoder."""
    gen = torch.Generator().manual_seed(seed)
    with safe_open(TINY.parent / "tiny-asr" / "model.safetensors", "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in [*tensors.keys()] if name.endswith("fc1.weight")}
    pairs = {
        name.removesuffix(".weight"): (torch.randn(4, inputs, generator=gen), torch.randn(outputs, 4, generator=gen))
        for name, (outputs, inputs) in shapes.items()
    }
    return write(folder, "", pairs)


@pytest.mark.parametrize("detection", [None, {"type": "server_vad"}])
def test_a_session_keeps_the_content_of_its_adapter(tmp_path, talk, detection):
    """Another one that begins after the name was loaded again, or that names another adapter in between, gets the new one."""
    folders = {name: str(make_adapter(tmp_path / name, seed)) for seed, name in enumerate(("first", "second"))}
    server = make_server(
        TINY.parent / "tiny-asr", "tiny-asr", ServerConfig(adapters={"red": folders["first"]}), enable_lora=True, warm_up=False
    )
    adapters = server.engine.adapters

    def said(connection):
        connection.input_audio_buffer.clear()  # ends the stream, whose text is the context of later speech
        until(connection, "input_audio_buffer.cleared")
        append(connection, talk)
        if detection is None:
            connection.input_audio_buffer.commit()
        return [event.transcript for event in until(connection, COMPLETED, turns) if event.type == COMPLETED]

    with server.llm.llm:
        turns = 1 if detection is None else len(expected(server, talk, pause=0.5))
        server.load_adapters(server.services.pool.models[0].adapters)
        with listening(server) as url, openai_client(url) as client, client.realtime.connect(model="red") as connection:
            connection.session.update(session=session(turn_detection=detection))
            until(connection, "session.updated")
            before = said(connection)
            adapters.load("red", folders["second"])
            assert said(connection) == before
            with client.realtime.connect(model="red") as other:
                other.session.update(session=session(turn_detection=detection))
                after = said(other)
                assert after != before
            adapters.unload("red")
            assert said(connection) == before
            adapters.load("red", folders["second"])
            for model in ("tiny-asr", "red"):
                connection.session.update(session=session(transcription={"model": model}))
                until(connection, "session.updated")
            assert said(connection) == after
        assert_idle(server.llm)


@pytest.mark.parametrize(
    ("kind", "codes", "samples"),
    [
        ("audio/pcmu", [0x00, 0x80, 0x7F, 0xFF, 0x8F, 0xA5], [-32124, 32124, 0, 0, 16764, 6652]),
        ("audio/pcma", [0x55, 0xD5, 0x2A, 0xAA, 0x80, 0x45], [-8, 8, -32256, 32256, 5504, -264]),
    ],
)
def test_g711(kind, codes, samples):
    form = Format(type=kind)
    assert form.hertz == 8000
    assert np.frombuffer(read_audio(encoded(bytes(codes)), form), "<i2").tolist() == samples
