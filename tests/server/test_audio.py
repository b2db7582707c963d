"""/v1/audio/transcriptions and /translations with the `openai` package, on a small random Whisper."""

from __future__ import annotations

import asyncio
import io
import re

import family
import httpx
import openai
import pytest
import soundfile
from http_server import listening, make_server
from sensorium.server.config import ServerConfig
from sensorium.server.state import Server
from waiting import assert_idle


@pytest.fixture(scope="module")
def server(whisper):
    server = make_server(whisper, "whisper", max_num_seqs=4, max_model_len=24, warm_up=False)
    with server.engine.llm:
        yield server


@pytest.fixture(scope="module")
def url(server):
    with listening(server) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def wav():
    stream = io.BytesIO()
    soundfile.write(stream, family.make_media("audio", (12_000,), 0), 16_000, format="WAV")
    return stream.getvalue()


PLAIN = {"vad": False, "language": "en"}


def transcribe(server, wav, task="transcribe", **options):
    (found,) = asyncio.run(server.engine.transcribe(wav, task=task, **{"vad": False, **options}))
    assert found.error is None
    return found


def test_json_and_text(client, server, wav):
    expected = transcribe(server, wav, language="en")
    found = client.audio.transcriptions.create(model="whisper", file=("a.wav", wav), language="en", extra_body={"vad": "false"})
    assert found.text == expected.text
    assert found.usage.seconds == pytest.approx(0.75)
    fields = {"model": "whisper", "file": ("a.wav", wav), "language": "en", "extra_body": {"vad": "false"}}
    assert client.audio.transcriptions.create(**fields, response_format="text") == f"{expected.text}\n"


def test_segments(client, server, wav):
    expected = transcribe(server, wav, language="en", timestamps=True)
    fields = {"model": "whisper", "file": ("a.wav", wav), "language": "en", "extra_body": {"vad": "false"}}
    found = client.audio.transcriptions.create(**fields, response_format="verbose_json")
    assert (found.text, found.language, found.duration) == (expected.text, "en", pytest.approx(0.75))
    assert [(one.id, one.start, one.text) for one in found.segments] == [
        (index, one.start, one.text) for index, one in enumerate(expected.segments)
    ]
    assert all(one.end <= 0.75 + 30 for one in found.segments)
    srt = client.audio.transcriptions.create(**fields, response_format="srt")
    vtt = client.audio.transcriptions.create(**fields, response_format="vtt")
    assert vtt.startswith("WEBVTT\n")
    if expected.segments:
        assert re.match(r"1\n00:00:\d\d,\d\d\d --> 00:00:\d\d,\d\d\d\n", srt)


def test_translations(client, server, wav):
    expected = transcribe(server, wav, "translate")
    found = client.audio.translations.create(model="whisper", file=("a.wav", wav), extra_body={"vad": "false"})
    assert found.text == expected.text
    verbose = client.audio.translations.create(
        model="whisper", file=("a.wav", wav), response_format="verbose_json", extra_body={"vad": "false"}
    )
    assert verbose.duration == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "klingon"}, "language"),
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "-1"}, "temperature"),
        ({"stream": "true"}, "stream"),
        ({"colour": "red"}, "colour"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "timestamp_granularities.0"),
        ({"include[]": "logprobs"}, "include"),
        ({"prompt": "\x00" * (2 << 20)}, None),
        ({f"f{number}": "" for number in range(100)}, None),
    ],
)
def test_wrong_fields(url, server, wav, fields, param):
    response = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", wav)}, data=fields, timeout=240)
    assert response.status_code == 400, response.text
    assert param is None or response.json()["error"]["param"] == param
    assert_idle(server.engine.llm)


def test_wrong_bodies(url):
    def post(**body):
        return httpx.post(f"{url}/v1/audio/transcriptions", timeout=240, **body)

    assert post(json={}).status_code == 415
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    for content in (b"", b"nonsense", b"--x\r\n\r\n"):
        assert post(content=content, headers=headers).status_code == 400
    assert post(content=b"", headers={"Content-Type": "multipart/form-data"}).status_code == 400
    assert post(files={"other": b"x"}).json()["error"]["param"] in ("file", "other")
    assert post(files={"file": b"x"}, data={"model": "gpt"}).status_code == 404
    for data in (b"", b"not an audio file", b"RIFF\xff\xff\xff\xffWAVE"):
        found = post(files={"file": ("a.wav", data)}, data={"language": "en"})
        assert found.status_code == 400, found.text
        assert found.json()["error"]["code"] in ("invalid_media", "invalid_input")


def test_a_model_without_speech(http, wav):
    response = http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav)})
    assert response.status_code == 400
    assert "does not transcribe" in response.json()["error"]["message"]


def test_each_key_has_its_own_cache(server, wav, monkeypatch):
    salts, request = [], server.engine.llm.request
    monkeypatch.setattr(server.engine.llm, "request", lambda prompt, *rest, **options: (
        salts.append(prompt["cache_salt"]) or request(prompt, *rest, **options)
    ))  # fmt: skip
    keyed = Server(server.engine, ServerConfig(api_key=["one", "two"]), "whisper")
    with listening(keyed) as url:
        for key, fields in (("one", {}), ("two", {}), ("one", {"cache_salt": "x"})):
            fields |= {"vad": "false", "response_format": "verbose_json", "timestamp_granularities[]": "word"}
            headers = {"Authorization": f"Bearer {key}"}
            files = {"file": ("a.wav", wav)}
            response = httpx.post(f"{url}/v1/audio/transcriptions", files=files, data=fields, headers=headers, timeout=240)
            assert response.status_code == 200, response.text
            salts.append("end")
    requests = "|".join(salts).split("|end")  # of each call
    found = [set(filter(None, one.split("|"))) for one in requests[:-1]]
    assert [len(one) for one in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_words(client, server, wav):
    expected = transcribe(server, wav, language="en", timestamps="word")
    found = client.audio.transcriptions.create(
        model="whisper",
        file=("a.wav", wav),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word"],
        extra_body={"vad": "false"},
    )
    words = [word for one in expected.segments for word in one.words]
    assert [(one.word, one.start, one.end) for one in found.words] == [(one.word.strip(), one.start, one.end) for one in words]
