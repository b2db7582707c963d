"""/v1/audio/speech: formats, streams, and errors that name the fields of the body."""

from __future__ import annotations

import io
import json
from base64 import b64decode

import httpx
import kokoro_files
import numpy as np
import pytest
import soundfile
import torch
from http_server import TINY, error, openai_client, serving, serving_models
from sensorium import InputError
from sensorium.pipelines.speech.sound_writer import MEDIA_TYPES, SoundWriter
from sensorium.server.config import ServerConfig

PHONEMES = "hɛlˈO wˈɜɹld, ðˈɪs ɪz ɐ lˈɔŋ sˈɛntəns wˈɪð mˈɛni wˈɜɹdz. ænd ðˈɪs ɪz ɐnˈʌðəɹ wˈʌn, jˈɛs."


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kokoro") / "model"
    kokoro_files.write_checkpoint(folder, kokoro_files.random_tensors())
    with serving(folder, "kokoro") as served:
        yield served


@pytest.fixture(scope="module")
def http(served):
    with httpx.Client(base_url=served[0], timeout=240) as client:
        yield client


@pytest.fixture(scope="module")
def samples(served):
    (speech,) = served[1].llm.llm.speak(phonemes=PHONEMES, voice="bm_ben", seed=3, use_tqdm=False)
    assert speech.error is None
    return speech.samples.clamp(-1, 1).numpy()


def post(http, **body):
    return http.post("/v1/audio/speech", json={"phonemes": PHONEMES, "voice": "bm_ben", "seed": 3, **body})


def read(data):
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
    assert rate in (24_000, 48_000)
    return samples, rate


@pytest.mark.parametrize("kind", MEDIA_TYPES)
def test_formats(http, samples, kind):
    response = post(http, response_format=kind)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == MEDIA_TYPES[kind]
    if kind == "pcm":
        np.testing.assert_allclose(np.frombuffer(response.content, "<i2") / 32767, samples, atol=1 / 32767)
    elif kind in ("wav", "flac"):
        np.testing.assert_allclose(read(response.content)[0], samples, atol=2 / 32767)
    elif kind != "aac":  # which soundfile does not read
        decoded, rate = read(response.content)
        assert len(decoded) / rate == pytest.approx(len(samples) / 24_000, abs=0.2)
        assert 0.5 < decoded.std() / samples.std() < 1.5
    else:
        assert response.content[:2] in (b"\xff\xf1", b"\xff\xf9")


def test_parts_of_a_file_are_the_whole(samples):
    """The bytes do not depend on how the samples are divided."""
    for kind in MEDIA_TYPES:
        wholes = []
        for size in (len(samples), 5000):
            writer = SoundWriter(kind, 24_000)
            parts = [writer.write(part) for part in torch.from_numpy(samples).split(size)]
            wholes.append(b"".join([*parts, writer.close()]))
        if kind == "opus":  # its streams have random numbers
            assert abs(len(wholes[0]) - len(wholes[1])) < 100
        else:
            assert wholes[0] == wholes[1], kind
    with pytest.raises(InputError) as caught:
        SoundWriter("midi", 24_000)
    assert caught.value.info.param == "response_format"


def test_events(http, samples):
    with http.stream("POST", "/v1/audio/speech", json={
        "phonemes": PHONEMES, "voice": "bm_ben", "seed": 3, "response_format": "pcm", "stream_format": "sse",
    }) as response:  # fmt: skip
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["speech.audio.delta"] * 2 + ["speech.audio.done"]
    data = b"".join(b64decode(event["audio"]) for event in events[:-1])
    np.testing.assert_allclose(np.frombuffer(data, "<i2") / 32767, samples, atol=1 / 32767)


def test_clients_of_openai(served, samples):
    with openai_client(served[0]) as client:
        body = {"phonemes": PHONEMES, "seed": 3}
        response = client.audio.speech.create(
            model="kokoro", voice="bm_ben", input=None, response_format="pcm", extra_body=body
        )
        np.testing.assert_allclose(np.frombuffer(response.content, "<i2") / 32767, samples, atol=1 / 32767)


def test_voices(http):
    assert http.get("/v1/audio/voices").json() == {"voices": list(kokoro_files.VOICES)}


def test_the_model_that_is_named_speaks(http, tmp_path):
    """A server of one model refuses other names. A server of several loads the named model to list its voices."""
    assert error(post(http, model="other"), 404)["code"] == "model_not_found"
    assert error(http.get("/v1/audio/voices", params={"model": "other"}), 404)["code"] == "model_not_found"
    kokoro_files.write_checkpoint(tmp_path / "model", kokoro_files.random_tensors())
    models = [{"name": "tiny-vl", "path": str(TINY)}, {"name": "kokoro", "path": str(tmp_path / "model")}]
    with serving_models(ServerConfig(models=models)) as (url, _), httpx.Client(base_url=url, timeout=240) as several:
        assert several.get("/v1/audio/voices").json() == {"voices": []}
        named = several.get("/v1/audio/voices", params={"model": "kokoro"})
        assert named.json() == {"voices": list(kokoro_files.VOICES)}
        assert post(several, model="kokoro", response_format="pcm").content


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"voice": "eva"}, "voice"),
        ({"voice": {"id": "eva"}}, "voice"),
        ({"speed": 9.0}, "speed"),
        ({"response_format": "midi"}, "response_format"),
        ({"phonemes": "ü"}, "phonemes"),
        ({"phonemes": None, "input": " "}, "input"),
        ({"phonemes": None}, "phonemes"),
        ({"input": "both"}, "phonemes"),
        ({"instructions": "whisper"}, "instructions"),
        ({"pitch": 3}, "pitch"),
    ],
)
def test_errors(http, body, param):
    assert error(post(http, **body))["param"] == param


def test_models_without_voices(tiny):
    response = httpx.post(f"{tiny[0]}/v1/audio/speech", json={"input": "Hello"}, timeout=240)
    assert error(response)["param"] == "model"
    assert httpx.get(f"{tiny[0]}/v1/audio/voices", timeout=240).json() == {"voices": []}
