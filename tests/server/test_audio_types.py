"""Transcriptions in the `openai` package's types, field by field, and vLLM's further fields of the forms."""

from __future__ import annotations

import asyncio
import io
import json
from base64 import b64encode

import family
import httpx
import numpy as np
import openai
import pytest
import soundfile
from http_server import error, listening, make_server, serving
from openai.types.audio import (
    Transcription,
    TranscriptionCreateParams,
    TranscriptionDiarized,
    TranscriptionStreamEvent,
    TranscriptionTextSegmentEvent,
    TranscriptionVerbose,
    Translation,
    TranslationVerbose,
    transcription_create_params,
    translation_create_params,
)
from parakeet import make_model, save
from pydantic import TypeAdapter
from sensorium import ConfigError, SamplingParams
from sensorium.mm.languages import LANGUAGES
from sensorium.pipelines.speech import speakers
from sensorium.server.protocol.audio import LISTS, AudioForm, TranscriptionForm
from tone_speakers import NETWORKS, conversation
from typing_extensions import get_type_hints

EVENT = TypeAdapter(TranscriptionStreamEvent)


def encoded(samples, rate=16_000):
    stream = io.BytesIO()
    soundfile.write(stream, samples, rate, format="WAV")
    return stream.getvalue()


SOUND = encoded(family.make_media("audio", (12_000,), 0))
SILENCE = encoded(np.zeros(40_000, np.float32))


@pytest.fixture(scope="module")
def served(whisper):
    with serving(whisper, "whisper", max_model_len=24) as served:
        yield served


CLIP = "data:audio/wav;base64," + b64encode(encoded(conversation(3.0, [(0.5, 2.5, 1)]).numpy())).decode()


@pytest.fixture(scope="module")
def post(served):
    def post(data=SOUND, kind="transcriptions", **fields):
        files = {"file": ("a.wav", data)}
        return httpx.post(f"{served[0]}/v1/audio/{kind}", files=files, data={"model": "whisper", **fields}, timeout=240)

    return post


def verbose(response, kind=TranscriptionVerbose):
    assert response.status_code == 200, response.text
    return kind.model_validate(response.json(), strict=True)


def test_speakers_have_the_packages_types(post, monkeypatch):
    monkeypatch.setattr(speakers, "load_speaker_networks", lambda folder: NETWORKS)
    data = encoded(conversation(14.0, [(1.0, 5.0, 0), (7.0, 12.0, 1)]).numpy())
    fields = {"response_format": "diarized_json", "vad": "false", "language": "en", "temperature": "0"}
    plain = post(data, **{**fields, "response_format": "verbose_json"}).json()
    found = verbose(post(data, **fields), TranscriptionDiarized)
    assert {part.speaker for part in found.segments} <= {"A", "B"}
    assert (found.duration, found.usage.seconds, found.text) == (14.0, 14.0, plain["text"])
    named = {"known_speaker_names[]": "Ann", "known_speaker_references[]": CLIP, "speakers": "2"}
    speakers_of = {part.speaker for part in verbose(post(data, **fields, **named), TranscriptionDiarized).segments}
    assert speakers_of <= {"Ann", "A"}
    srt = post(data, **{**fields, "response_format": "srt"}, speakers="true").text
    assert srt == "" or "[SPEAKER_0" in srt
    times = post(data, **{**fields, "response_format": "verbose_json"}, speakers="true").json()
    assert all(part["speaker"].startswith("SPEAKER_0") for part in times["segments"])
    each = verbose(post(data, **fields, channel="each"), TranscriptionDiarized)
    assert {part.speaker for part in each.segments} <= {"A"}
    lines = post(data, **fields, stream="true").text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    parts = [event for event in events if event["type"] == "transcript.text.segment"]
    segments = [TranscriptionTextSegmentEvent.model_validate(part, strict=True) for part in parts]
    assert [(one.text, one.speaker) for one in segments] == [(part.text, part.speaker) for part in found.segments]
    assert events[-1]["type"] == "transcript.text.done"


def test_a_server_without_weights_says_so(post, monkeypatch):
    def load(folder):
        raise ConfigError("there are no weights", param="speaker_model")

    monkeypatch.setattr(speakers, "load_speaker_networks", load)
    response = post(response_format="diarized_json")
    assert (response.status_code, error(response)["param"], error(response)["code"]) == (400, "speakers", "unsupported")


@pytest.mark.parametrize("data", [SOUND, SILENCE])
def test_every_form_has_the_packages_types(post, data):
    for vad in ("true", "false"):
        times = {"timestamp_granularities[]": ["word", "segment"]}
        found = verbose(post(data, vad=vad, response_format="verbose_json", **times))
        assert found.language in LANGUAGES.values()
        assert found.usage.seconds == found.duration == pytest.approx(0.75 if data is SOUND else 2.5)
        assert found.words is not None
        assert [one.id for one in found.segments] == list(range(len(found.segments)))
        Transcription.model_validate(post(data, vad=vad).json(), strict=True)
        Translation.model_validate(post(data, "translations", vad=vad).json(), strict=True)
        translated = verbose(post(data, "translations", vad=vad, response_format="verbose_json"), TranslationVerbose)
        assert translated.language == "english"
        events = post(data, vad=vad, stream="true").text.strip().split("\n\n")
        lines = [event.split("\n")[-1].removeprefix("data: ") for event in events]
        kinds = [EVENT.validate_json(line, strict=True).type for line in lines]
        assert (kinds[-1], {*kinds[:-1]} <= {"transcript.text.delta"}) == ("transcript.text.done", True)


@pytest.mark.parametrize(
    ("language", "name"),
    [
        ("de", "german"),
        ("DE", "german"),
        ("de-CH", "german"),
        ("German", "german"),
        ("zh-HK", "cantonese"),
        ("ja-JP", "japanese"),
    ],
)
def test_the_language_is_the_requested_one(post, language, name):
    for data in SOUND, SILENCE:
        assert verbose(post(data, language=language, response_format="verbose_json")).language == name
        assert verbose(post(data, **{"languages[]": language}, response_format="verbose_json")).language == name


def test_warnings_are_in_json(post):
    wave = family.make_media("audio", (12_000,), 0)
    found = post(encoded(np.stack([wave, -wave], 1))).json()
    assert "cancel each other out, so channel" in found["warnings"][0]
    assert "warnings" not in post().json()


def test_silence_has_the_language_that_detection_gives(post, served):
    engine = served[1].llm
    (detected,) = asyncio.run(engine.transcribe((np.zeros(16_000, np.float32), 16_000), vad=False))
    found = verbose(post(SILENCE, response_format="verbose_json"))
    assert (found.text, found.language) == ("", LANGUAGES[detected.language])
    assert served[1].silent_language == detected.language
    (python,) = asyncio.run(engine.transcribe(SILENCE))
    assert (python.text, python.language) == ("", None)  # Python has no answer where none was detected


def test_a_model_of_one_language(tmp_path):
    """It is named for silence too, and its own name is accepted in any spelling."""
    server = make_server(save(tmp_path, *make_model(0)), "parakeet", warm_up=False)
    with server.llm.llm, listening(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        create = client.audio.transcriptions.create
        for data in SOUND, SILENCE:
            for given in ({}, {"language": "en"}, {"language": "en-GB"}, {"language": "English"}):
                found = create(model="parakeet", file=("a.wav", data), response_format="verbose_json", **given)
                TranscriptionVerbose.model_validate(found.to_dict(), strict=True)
                assert found.language == "english"
        with pytest.raises(openai.BadRequestError, match="transcribes only English"):
            create(model="parakeet", file=("a.wav", SOUND), language="de-AT")
        (found,) = asyncio.run(server.llm.transcribe(SILENCE))
        assert (found.language, found.info.language) == ("en", "en")


def test_a_model_that_names_no_language(tmp_path):
    row = family.load_rows()["qwen3_asr"]
    server = make_server(family.save(row, tmp_path), "speech", warm_up=False)
    with server.llm.llm, listening(server) as url:
        files, fields = {"file": ("a.wav", SILENCE)}, {"response_format": "verbose_json"}
        found = httpx.post(f"{url}/v1/audio/transcriptions", files=files, data=fields, timeout=240)
        assert verbose(found).language == "unknown"
        found = httpx.post(f"{url}/v1/audio/transcriptions", files=files, data={**fields, "language": "fr-CA"}, timeout=240)
        assert verbose(found).language == "french"


def test_every_field_is_known():
    for form, params in (
        (TranscriptionForm, transcription_create_params.TranscriptionCreateParamsBase),
        (AudioForm, translation_create_params.TranslationCreateParams),
    ):
        for name, kind in get_type_hints(params).items():
            assert name == "file" or name in form.model_fields or name in form.refused, name
            is_list = str(kind).startswith(("typing.List", "typing.Sequence"))
            assert is_list == (name in LISTS), (name, kind)
    assert TranscriptionCreateParams


def test_sampling_fields(served, post):
    """As in vLLM, they are the parameters of the same names; beams are `n` of `use_beam_search`."""

    def python(params=None, **options):
        (found,) = asyncio.run(served[1].llm.transcribe(SOUND, "en", vad=False, sampling_params=params, **options))
        return found.text

    shared = {"language": "en", "vad": "false"}
    hot = {
        "temperature": 0.0,
        "top_k": 5,
        "seed": 4,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.1,
    }
    form = {name: str(value) for name, value in hot.items()} | {"temperature": "0.9", "frequency_penalty": "0.2"}
    expected = python(SamplingParams(max_tokens=None, **hot, frequency_penalty=0.2), temperature=0.9)
    assert post(**shared, **form).json()["text"] == expected != python()
    assert post(**shared, use_beam_search="true", n="3").json()["text"] == python(beam_size=3)
    assert post(**shared, use_beam_search="true", n="1").json()["text"] == python()
    words = {"keywords[]": ["one", "two"], "hotwords": "zero", "prompt": "a"}
    assert post(**shared, **words).json()["text"] == python(hotwords="zero one two", prompt="a")
    phrases = [("two five", 20.0), "seven"]
    expected = python(boost=phrases)
    assert "two five" in expected
    assert post(**shared, boost=json.dumps(phrases)).json()["text"] == expected
    several = python(boost=["nine nine", "eight"])
    assert post(**shared, **{"boost[]": ["nine nine", "eight"]}).json()["text"] == several


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": "2"}, "n"),
        ({"n": "0"}, "n"),
        ({"top_p": "3"}, "top_p"),
        ({"top_k": "many"}, "top_k"),
        ({"length_penalty": "2"}, "length_penalty"),
        ({"to_language": "de"}, "to_language"),
        ({"vllm_xargs": '{"a": 1}'}, "vllm_xargs"),
        ({"languages[]": ["de", "en"]}, "languages"),
        ({"languages[]": "de", "language": "en"}, "languages"),
        ({"language": "xx-YY"}, "language"),
        ({"response_format": "diarized_json", "speakers": "0"}, "speakers"),
        ({"response_format": "diarized_json", "speakers": "many"}, "speakers"),
        ({"known_speaker_names[]": "a"}, "known_speaker_references"),
        ({"known_speaker_names[]": "a", "known_speaker_references[]": "/etc/passwd"}, "known_speaker_references"),
        ({"known_speaker_names[]": "a", "known_speaker_references[]": "http://127.0.0.1/a.wav"}, "known_speaker_references"),
        ({"known_speaker_names[]": ["a", "a"], "known_speaker_references[]": [CLIP, CLIP]}, "known_speaker_names"),
        ({"response_format": "rttm"}, "response_format"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"stream": "true", "stream_include_usage": "true", "response_format": "diarized_json"}, "response_format"),
        ({"boost[]": ["Ann", " "]}, "boost"),
        ({"boost": '[["Ann", 99]]'}, "boost"),
        ({"boost": json.dumps(["Ann"] * 1001)}, "boost"),
        ({"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "0.7"}, "chunking_strategy.threshold"),
        ({"chunking_strategy[type]": "other"}, "chunking_strategy.type"),
    ],
)
def test_wrong_fields(post, fields, param):
    assert error(post(**fields))["param"] == param


@pytest.mark.parametrize(
    "fields",
    [
        {"chunking_strategy": "auto"},
        {"chunking_strategy[type]": "server_vad"},
        {"chunking_strategy": '{"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 300}'},
        {"length_penalty": "1.0", "vllm_xargs": "{}", "include_stop_str_in_output": "false", "use_beam_search": "false"},
        {"include[]": []},
    ],
)
def test_fields_on_which_nothing_depends(post, fields):
    assert post(**fields).status_code == 200
    assert post(kind="translations", to_language="en", **fields).status_code == 200
