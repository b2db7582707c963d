"""/v1/audio/transcriptions and /translations with the `openai` package, on a small random Whisper."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
import time
from dataclasses import replace

import family
import httpx
import openai
import pytest
import soundfile
from http_server import listening, make_server, openai_client, serving
from parakeet import make_model, make_transducer, save
from sensorium import EngineDeadError, SamplingParams
from sensorium.mm.tenants import tenant_of
from sensorium.pipelines.speech.results import Transcript
from sensorium.pipelines.speech.subtitles import WRITERS, SubtitleLayout
from sensorium.server.config import ServerConfig
from sensorium.server.endpoints import audio as audio_endpoint
from sensorium.server.state import Server
from waiting import assert_idle


@pytest.fixture(scope="module")
def served(whisper):
    with serving(whisper, "whisper", max_model_len=24) as served:
        yield served


@pytest.fixture(scope="module")
def server(served):
    return served[1]


@pytest.fixture(scope="module")
def url(served):
    return served[0]


@pytest.fixture(scope="module")
def client(url):
    with openai_client(url) as client:
        yield client


@pytest.fixture(scope="module")
def wav():
    stream = io.BytesIO()
    soundfile.write(stream, family.make_media("audio", (12_000,), 0), 16_000, format="WAV")
    return stream.getvalue()


def transcribe(server, wav, task="transcribe", **options):
    (found,) = asyncio.run(server.llm.transcribe(wav, task=task, **{"vad": False, **options}))
    assert found.error is None
    return found


def test_json_and_text(client, server, wav):
    expected = transcribe(server, wav, language="en")
    found = client.audio.transcriptions.create(model="whisper", file=("a.wav", wav), language="en", extra_body={"vad": "false"})
    assert found.text == expected.text
    assert found.usage.seconds == pytest.approx(0.75)
    fields = {"model": "whisper", "file": ("a.wav", wav), "language": "en", "extra_body": {"vad": "false"}}
    assert client.audio.transcriptions.create(**fields, response_format="text") == f"{expected.text}\n"


def test_seconds_of_sound_are_counted(client, url, wav):
    def value(name):
        text = httpx.get(f"{url}/metrics").text
        return float(re.search(rf'^sensorium_{name}\{{model_name="whisper"\}} (\S+)$', text, re.M)[1])

    before = value("audio_seconds_total"), value("real_time_factor_count")
    client.audio.transcriptions.create(model="whisper", file=("a.wav", wav))
    for _ in client.audio.transcriptions.create(model="whisper", file=("a.wav", wav), stream=True):
        pass
    until = time.monotonic() + 30  # the record of a stream is complete a moment after its last event
    while value("real_time_factor_count") < before[1] + 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert value("audio_seconds_total") == pytest.approx(before[0] + 1.5)
    assert value("real_time_factor_count") == before[1] + 2


def test_segments(client, server, wav):
    expected = transcribe(server, wav, language="en", timestamps=True)
    fields = {"model": "whisper", "file": ("a.wav", wav), "language": "en", "extra_body": {"vad": "false"}}
    found = client.audio.transcriptions.create(**fields, response_format="verbose_json")
    assert (found.text, found.language, found.duration) == (expected.text, "english", pytest.approx(0.75))
    assert [(one.id, one.start, one.text) for one in found.segments] == [
        (index, one.start, one.text) for index, one in enumerate(expected.segments)
    ]
    assert all(one.end <= 0.75 + 30 for one in found.segments)
    srt = client.audio.transcriptions.create(**fields, response_format="srt")
    vtt = client.audio.transcriptions.create(**fields, response_format="vtt")
    assert vtt.startswith("WEBVTT\n")
    if expected.segments:
        assert re.match(r"1\n00:00:\d\d,\d\d\d --> 00:00:\d\d,\d\d\d\n", srt)


def test_a_stream_has_the_text_of_all_windows(client, server):
    stream = io.BytesIO()
    soundfile.write(stream, family.make_media("audio", (4 * 16_000,), 1), 16_000, format="WAV")
    (expected,) = asyncio.run(server.llm.transcribe(stream.getvalue(), "en", vad=False))
    fields = {"model": "whisper", "file": ("a.wav", stream.getvalue()), "language": "en", "extra_body": {"vad": "false"}}
    *deltas, done = client.audio.transcriptions.create(**fields, stream=True)
    assert {event.type for event in deltas} == {"transcript.text.delta"}
    assert (done.type, done.text) == ("transcript.text.done", expected.text)
    assert "".join(event.delta for event in deltas) == expected.text
    assert_idle(server.llm)


def test_text_is_sent_while_the_rest_is_transcribed(client, server, wav, monkeypatch):
    arrived, (whole,) = threading.Event(), asyncio.run(server.llm.transcribe(wav, vad=False))

    async def transcribe(audio, language, on_text, **options):
        await asyncio.to_thread(on_text, 0, "one")
        await asyncio.to_thread(arrived.wait)
        await asyncio.to_thread(on_text, 0, " two")
        return [replace(whole, text="one two")]

    monkeypatch.setattr(server.llm, "transcribe", transcribe)
    events = client.audio.transcriptions.create(model="whisper", file=("a.wav", wav), stream=True)
    assert next(events).delta == "one"
    arrived.set()
    assert [getattr(event, "delta", None) or event.text for event in events] == [" two", "one two"]


def test_log_probabilities_of_tokens(client, server, wav):
    """They are those of the model's answer, in the response, in a stream's texts and in its whole text."""
    fields = {
        "model": "whisper",
        "file": ("a.wav", wav),
        "language": "en",
        "include": ["logprobs"],
        "extra_body": {"vad": "false"},
    }
    found = client.audio.transcriptions.create(**fields)
    (window,) = transcribe(server, wav, language="en").windows
    decode = server.engine.tokenizer.decode
    tokens = [token for token, _ in window.token_logprobs]
    assert tokens
    assert decode(tokens, False).strip() == found.text
    assert [entry.logprob for entry in found.logprobs] == pytest.approx([value for _, value in window.token_logprobs])
    assert b"".join(bytes(map(int, entry.bytes)) for entry in found.logprobs).decode("utf-8", "replace").strip() == found.text
    assert all(entry.logprob <= 0 for entry in found.logprobs)
    *deltas, done = client.audio.transcriptions.create(**fields, stream=True)
    assert [entry.to_dict() for entry in done.logprobs] == [entry.to_dict() for entry in found.logprobs]
    assert [entry.to_dict() for delta in deltas for entry in delta.logprobs] == [entry.to_dict() for entry in done.logprobs]
    assert client.audio.transcriptions.create(**{**fields, "include": []}).logprobs is None


@pytest.mark.parametrize("names", [["word", "segment"], ["segment"], ["word"]])
def test_a_stream_ends_with_the_times(client, server, wav, names):
    fields = {"model": "whisper", "file": ("a.wav", wav), "language": "en", "extra_body": {"vad": "false"}}
    times = {"timestamp_granularities": names}
    verbose = client.audio.transcriptions.create(**fields, **times, response_format="verbose_json").to_dict()
    *_, done = client.audio.transcriptions.create(**fields, **times, stream=True)
    for name in names:
        assert done.to_dict()[f"{name}s"] == verbose[f"{name}s"] != []
    *_, done = client.audio.transcriptions.create(**fields, stream=True)
    assert "segments" not in done.to_dict()


def test_each_text_of_a_stream_has_its_words(client):
    """Together they are those of the whole answer, also across windows."""
    stream = io.BytesIO()
    soundfile.write(stream, family.make_media("audio", (4 * 16_000,), 1), 16_000, format="WAV")
    fields = {"model": "whisper", "file": ("a.wav", stream.getvalue()), "language": "en", "extra_body": {"vad": "false"}}
    words = {"timestamp_granularities": ["word"]}
    whole = client.audio.transcriptions.create(**fields, **words, response_format="verbose_json").to_dict()
    *deltas, done = (event.to_dict() for event in client.audio.transcriptions.create(**fields, **words, stream=True))
    assert len(deltas) > 1
    assert all(delta["words"] for delta in deltas if delta["delta"].strip())
    assert [word for delta in deltas for word in delta["words"]] == done["words"] == whole["words"]
    for delta in deltas:
        assert "".join(word["word"] for word in delta["words"]) == "".join(delta["delta"].split())
    *plain, _ = client.audio.transcriptions.create(**fields, stream=True)
    assert not any("words" in event.to_dict() for event in plain)


def test_streams_in_the_form_of_vllm(url, server, wav):
    vllm = {"stream": "True", "stream_include_usage": "True", "stream_continuous_usage_stats": "True", "vad": "false"}
    vllm |= {"language": "en", "max_completion_tokens": "3"}
    found = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", wav)}, data=vllm, timeout=240).text
    *events, end, _ = found.split("\n\n")
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events]
    short = transcribe(server, wav, language="en", sampling_params=SamplingParams(temperature=0.0, max_tokens=3))
    assert end == "data: [DONE]"
    assert {chunk["object"] for chunk in chunks} == {"transcription.chunk"}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == short.text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-1:]] == ["stop"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)
    assert last["usage"]["prompt_tokens"] == len(short.output.prompt_token_ids)
    assert [chunk["usage"] for chunk in chunks] == [last["usage"]] * len(chunks)  # the audio is one window


@pytest.mark.parametrize("field", ["stream_include_usage", "stream_continuous_usage_stats"])
@pytest.mark.parametrize(("param", "value"), [("include", "logprobs"), ("timestamp_granularities", "word")])
def test_chunks_of_vllm_have_neither_times_nor_logprobs(url, wav, field, param, value):
    fields = {"stream": "true", field: "true", f"{param}[]": value}
    found = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", wav)}, data=fields, timeout=240)
    assert (found.status_code, found.json()["error"]["code"], found.json()["error"]["param"]) == (400, "unsupported", param)


def test_continuous_usage_counts_the_windows_so_far(url, server):
    stream = io.BytesIO()
    soundfile.write(stream, family.make_media("audio", (4 * 16_000,), 1), 16_000, format="WAV")
    (whole,) = asyncio.run(server.llm.transcribe(stream.getvalue(), "en", vad=False))
    counts = [window.num_tokens for window in whole.windows]
    fields = {"stream": "true", "stream_include_usage": "true", "vad": "false", "language": "en"}
    for continuous in ("true", "false"):
        fields["stream_continuous_usage_stats"] = continuous
        files = {"file": ("a.wav", stream.getvalue())}
        found = httpx.post(f"{url}/v1/audio/transcriptions", files=files, data=fields, timeout=240).text
        *chunks, last = [json.loads(event.removeprefix("data: ")) for event in found.split("\n\n")[:-2] if event[0] != ":"]
        assert last["usage"]["completion_tokens"] == sum(counts)
        if continuous == "false":
            assert not any("usage" in chunk for chunk in chunks)
            continue
        totals = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert totals == sorted(totals)
        assert {*totals} <= {sum(counts[: number + 1]) for number in range(len(counts))}
        assert len({*totals}) > 1
        assert totals[-1] == sum(counts)


def test_streams_that_fail(client, url, server, wav, monkeypatch):
    response = httpx.post(
        f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", b"x")}, data={"stream": "true"}, timeout=240
    )
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_media")
    translation = httpx.post(
        f"{url}/v1/audio/translations", files={"file": ("a.wav", wav)}, data={"stream": "true"}, timeout=240
    )
    assert (translation.status_code, translation.json()["error"]["param"]) == (400, "stream")

    async def fail(audio, language, on_text, **options):
        on_text(0, "half")
        raise EngineDeadError("the engine has failed")

    monkeypatch.setattr(server.llm, "transcribe", fail)
    events = client.audio.transcriptions.create(model="whisper", file=("a.wav", wav), stream=True)
    assert next(events).delta == "half"
    with pytest.raises(openai.APIError, match="the engine has failed"):
        next(events)


def test_a_file_that_is_cut_off(url, client, server, wav):
    """JSON has the text so far and the error, a stream ends with the error; formats without a place for it fail."""
    data = wav[: len(wav) // 2]
    fields = {"model": "whisper", "file": ("a.wav", data), "language": "en", "extra_body": {"vad": "false"}}
    for form, times in ("verbose_json", "segment"), ("json", "none"):
        (expected,) = asyncio.run(server.llm.transcribe(data, "en", vad=False, timestamps=times))
        found = client.audio.transcriptions.create(**fields, response_format=form)
        assert found.text == expected.text != ""
        assert found.error["message"] == "file: it is cut off (it has 12,022 of 24,044 bytes); download or export it again"
        assert (found.error["code"], found.error["param"]) == ("invalid_media", "file")
    assert not hasattr(client.audio.transcriptions.create(**{**fields, "file": ("a.wav", wav)}), "error")
    for form in "text", "srt":
        with pytest.raises(openai.BadRequestError, match="file: it is cut off") as refused:
            client.audio.transcriptions.create(**fields, response_format=form)
        assert refused.value.param == "file"
    events, texts = client.audio.transcriptions.create(**fields, stream=True), []
    with pytest.raises(openai.APIError, match="file: it is cut off"):
        texts.extend(event.delta for event in events)
    assert "".join(texts) == expected.text


def test_translations(client, server, wav):
    expected = transcribe(server, wav, "translate")
    found = client.audio.translations.create(model="whisper", file=("a.wav", wav), extra_body={"vad": "false"})
    assert found.text == expected.text
    spoken = transcribe(server, wav, "translate", language="de")
    asked = {"vad": "false", "language": "de"}
    assert client.audio.translations.create(model="whisper", file=("a.wav", wav), extra_body=asked).text == spoken.text
    verbose = client.audio.translations.create(
        model="whisper", file=("a.wav", wav), response_format="verbose_json", extra_body={"vad": "false"}
    )
    assert (verbose.duration, verbose.language) == (pytest.approx(0.75), "english")  # that of the translation


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"language": "klingon"}, "language"),
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": "-1"}, "temperature"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"stream": "true", "language": "klingon"}, "language"),
        ({"max_completion_tokens": "0"}, "max_completion_tokens"),
        ({"colour": "red"}, "colour"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "letter", "response_format": "verbose_json"}, "timestamp_granularities[0]"),
        ({"include[]": "logits"}, "include[0]"),
        ({"include[]": "logprobs", "response_format": "text"}, "include"),
        ({"chunking_strategy": "server_vad"}, "chunking_strategy"),
        ({"chunking_strategy": '{"type": "server_vad", "threshold": 0.9}'}, "chunking_strategy.threshold"),
        ({"chunking_strategy": '{"type": "server_vad"}', "vad": "false"}, "chunking_strategy"),
        ({"prompt": "\x00" * (2 << 20)}, None),
        ({f"f{number}": "" for number in range(100)}, None),
    ],
)
def test_wrong_fields(url, server, wav, fields, param):
    response = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", wav)}, data=fields, timeout=240)
    assert response.status_code == 400, response.text
    assert param is None or response.json()["error"]["param"] == param
    assert_idle(server.llm)


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
        assert found.json()["error"]["param"] == "file"
        assert found.json()["error"]["message"].startswith("file: ")
        assert "np." not in found.json()["error"]["message"]
    found = post(files={"file": ("a.wav", b"no audio")}, data={"language": "en", "stream": "true"})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "file")


def test_a_model_without_speech(http, wav):
    response = http.post("/v1/audio/transcriptions", files={"file": ("a.wav", wav)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert "does not transcribe speech; use /v1/chat/completions" in response.json()["error"]["message"]


def test_a_wrong_chunking_strategy_is_told_both_forms(url, wav):
    data = {"chunking_strategy": "manual"}
    response = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", wav)}, data=data, timeout=240)
    error = response.json()["error"]
    assert error["param"] == "chunking_strategy"
    assert "'auto' or an object" in error["message"]


@pytest.mark.parametrize(("given", "known"), [("chunking", "chunking_strategy"), ("includes", "include")])
def test_the_known_fields_have_those_with_one_value(url, wav, given, known):
    response = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", wav)}, data={given: "auto"}, timeout=240)
    assert f"did you mean {known}?" in response.json()["error"]["message"]


def test_a_speech_model_answers_no_chat(url):
    body = {"messages": [{"role": "user", "content": "hello"}]}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=240)
    assert "this model transcribes speech: send audio to /v1/audio/transcriptions" in response.json()["error"]["message"]
    response = httpx.post(f"{url}/v1/completions", json={"prompt": "hello"}, timeout=240)
    found = response.json()["error"]
    assert found["param"] == "prompt"
    assert "which is audio; send sound to /v1/audio/transcriptions" in found["message"]


def test_each_key_has_its_own_cache(server, wav, monkeypatch):
    salts, request = [], server.engine.request
    monkeypatch.setattr(server.engine, "request", lambda prompt, *rest, **options: (
        salts.append(prompt["cache_salt"]) or request(prompt, *rest, **options)
    ))  # fmt: skip
    keyed = Server(server.llm, ServerConfig(api_key=["one", "two"]), "whisper")
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
    first, second, third = (tenant_of(*one) for one in found)
    assert first == third != second


def test_a_model_without_a_decoder_takes_temperature_zero(tmp_path, wav):
    """Its answer is always the likeliest one, which is what clients that send `temperature=0` ask for."""
    server = make_server(save(tmp_path, *make_model(0)), "parakeet", warm_up=False)
    expected = transcribe(server, wav)
    with server.llm.llm, listening(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        fields = {"model": "parakeet", "file": ("a.wav", wav), "extra_body": {"vad": "false"}}
        assert client.audio.transcriptions.create(**fields, temperature=0).text == expected.text
        *_, done = client.audio.transcriptions.create(**fields, temperature=0, stream=True)
        assert done.text == expected.text
        for name, value in ("temperature", 0.5), ("max_completion_tokens", 3):
            with pytest.raises(openai.BadRequestError) as found:
                client.audio.transcriptions.create(**{**fields, "extra_body": {"vad": "false", name: value}})
            assert found.value.param == name


@pytest.mark.parametrize("kind", ["ctc", "tdt", "rnnt"])
def test_a_model_without_a_decoder(tmp_path, kind):
    """Text, times and streams are those of Python, and fields that need a decoder are refused by name."""
    stream = io.BytesIO()
    soundfile.write(stream, family.make_media("audio", (4 * 16_000,), 1), 16_000, format="WAV")
    found = make_model(0) if kind == "ctc" else make_transducer(0, kind)
    server = make_server(save(tmp_path, *found), "parakeet", warm_up=False)
    expected = transcribe(server, stream.getvalue(), timestamps="word")
    words = [word for one in expected.segments for word in one.words]
    assert len(words) > 2
    with server.llm.llm, listening(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        create, file = client.audio.transcriptions.create, ("a.wav", stream.getvalue())
        fields = {"model": "parakeet", "file": file, "extra_body": {"vad": "false"}}
        assert create(**fields).text == expected.text
        *deltas, done = create(**fields, stream=True)
        assert ("".join(event.delta for event in deltas), done.text) == (expected.text, expected.text)
        for times in ({}, {"timestamp_granularities": ["segment"]}, {"timestamp_granularities": ["segment", "word"]}):
            verbose = create(**fields, response_format="verbose_json", **times)
            assert [(one.start, one.end, one.text, one.avg_logprob) for one in verbose.segments] == [
                (one.start, one.end, one.text, one.avg_logprob) for one in expected.segments
            ]
            heard = None if "word" not in str(times) else [(one.word.strip(), one.start, one.end) for one in words]
            assert verbose.words == heard or [(one.word, one.start, one.end) for one in verbose.words] == heard
        assert verbose.segments[0].avg_logprob < 0
        for form, write in WRITERS.items():
            if form in ("srt", "vtt"):
                assert create(**fields, response_format=form) == f"{write(expected.timeline, SubtitleLayout())}\n"
        for name, value in ("language", "de"), ("top_p", 0.5), ("prompt", "a"), ("hotwords", "a"), ("temperature", 0.5):
            with pytest.raises(openai.BadRequestError) as refused:
                create(**{**fields, "extra_body": {"vad": "false", name: value}})
            assert refused.value.param == name
        said = "translation is not supported by this model, which can only transcribe"
        with pytest.raises(openai.BadRequestError, match=said) as refused:
            client.audio.translations.create(model="parakeet", file=file)
        assert refused.value.param == "model"
        assert_idle(server.llm)


def test_times_that_a_model_does_not_give_are_refused(tmp_path, wav):
    """The error names the field of the request."""
    row = family.load_rows()["qwen3_asr"]
    server = make_server(family.save(row, tmp_path), "speech", warm_up=False)
    with server.llm.llm, listening(server) as url:
        for fields, param in (
            ({"response_format": "srt"}, "response_format"),
            ({"response_format": "verbose_json", "timestamp_granularities[]": "segment"}, "timestamp_granularities"),
            ({"response_format": "verbose_json", "timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ):
            response = httpx.post(f"{url}/v1/audio/transcriptions", files={"file": ("a.wav", wav)}, data=fields, timeout=240)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


@pytest.mark.parametrize("times", [["word"], ["segment", "word"]])
def test_words(client, server, wav, times):
    expected = transcribe(server, wav, language="en", timestamps="word")
    found = client.audio.transcriptions.create(
        model="whisper",
        file=("a.wav", wav),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=times,
        extra_body={"vad": "false"},
    )
    words = [word for one in expected.segments for word in one.words]
    assert [(one.word, one.start, one.end) for one in found.words] == [(one.word.strip(), one.start, one.end) for one in words]
    assert (found.segments is None) == (times == ["word"])


def test_subtitles_without_speech_are_empty():
    silent = Transcript("", None, (), None, None)
    assert audio_endpoint._response("srt", silent, "transcribe", (), "").body == b""
    assert audio_endpoint._response("vtt", silent, "transcribe", (), "").body == b"WEBVTT\n"
