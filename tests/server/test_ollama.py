"""Ollama's API with the `ollama` package, whose types check every answer; skipped without it."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import httpx
import pytest
from http_server import CASES, IMAGE, MEDIA, listening, make_server, saying
from sensorium.callers.errors import InputError
from sensorium.server.config import ServerConfig
from sensorium.server.parsers.reasoning import FORMATS
from sensorium.server.protocol.ollama import EmbedBody, EmbeddingsBody, GenerateBody, OllamaChatBody, Options, ShowBody

ollama = pytest.importorskip("ollama")

PLAIN = {"model": "tiny-vl", "messages": [{"role": "user", "content": "hello"}]}
GREEDY = {"temperature": 0, "num_predict": 8}
IMAGE_DATA = base64.b64encode((MEDIA / IMAGE).read_bytes()).decode()
QUESTION = {"model": "tiny-vl", "messages": [
    {"role": "user", "content": CASES[IMAGE]["prompt"], "images": [IMAGE_DATA]}]}  # fmt: skip
LOOK = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "enum": ["here", "there"]}}, "required": ["place"],
}}}  # fmt: skip


def chat_of(http, **fields):
    """Return the answer of /v1/chat/completions."""
    found = http.post("/v1/chat/completions", json={**PLAIN, **fields})
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]


@pytest.fixture
def sdk(tiny):
    with ollama.Client(tiny[0], timeout=240) as sdk:
        yield sdk


def test_an_image_is_answered_whole_and_in_a_stream(sdk):
    fields = {"model": "tiny-vl", "options": {"temperature": 0, "num_predict": 96}}
    question = [{"role": "user", "content": CASES[IMAGE]["prompt"], "images": [MEDIA / IMAGE]}]
    found = sdk.chat(**fields, messages=question)
    assert found.message.content.strip() == CASES[IMAGE]["answer"]
    assert (found.model, found.done, found.done_reason, found.message.role) == ("tiny-vl", True, "stop", "assistant")
    assert found.prompt_eval_count > found.eval_count > 1
    assert found.total_duration == found.prompt_eval_duration + found.eval_duration
    chunks = [*sdk.chat(**fields, messages=question, stream=True)]
    assert "".join(chunk.message.content for chunk in chunks) == found.message.content
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert len(chunks) > 1  # several steps are one chunk if the client is slow
    assert (chunks[-1].eval_count, chunks[-1].prompt_eval_count) == (found.eval_count, found.prompt_eval_count)
    generated = sdk.generate(**fields, prompt=CASES[IMAGE]["prompt"], images=[MEDIA / IMAGE])
    assert generated.response == found.message.content
    parts = [*sdk.generate(**fields, prompt=CASES[IMAGE]["prompt"], images=[IMAGE_DATA], stream=True)]
    assert "".join(part.response for part in parts) == found.message.content


def test_streams_are_lines_of_json_by_default(http):
    response = http.post("/api/chat", json={**PLAIN, "options": GREEDY})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == chat_of(http, temperature=0, max_tokens=8)["content"]
    assert lines[-1]["done"]


def test_options_have_the_meaning_of_chats_fields(sdk, http):
    options = {"temperature": 1.3, "top_p": 0.9, "top_k": 30, "seed": 5, "num_predict": 12, "repeat_penalty": 1.2}
    fields = {"temperature": 1.3, "top_p": 0.9, "top_k": 30, "seed": 5, "max_tokens": 12, "repetition_penalty": 1.2}
    found = sdk.chat(**PLAIN, options=options)
    assert found.message.content.strip() == chat_of(http, **fields)["content"].strip()
    cut = sdk.chat(**QUESTION, options={**GREEDY, "num_predict": 2})
    assert (cut.done_reason, cut.eval_count) == ("length", 2)
    words = sdk.chat(**QUESTION, options=GREEDY).message.content
    letter = next(letter for letter in words[1:] if letter.isalpha())
    stopped = sdk.chat(**QUESTION, options={**GREEDY, "stop": [letter]})
    assert stopped.message.content == words[: words.index(letter)]
    assert Options(num_predict=-1, seed=-1).chat_fields() == dict.fromkeys(Options().chat_fields())
    assert sdk.chat(**QUESTION, options={**GREEDY, "num_ctx": 4096, "num_gpu": 1}, keep_alive="5m").message.content == words


def test_formats(sdk):
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    options = {"temperature": 0, "num_predict": 60}
    assert json.loads(sdk.chat(**PLAIN, format=schema, options=options).message.content) == {"a": 3}
    assert json.loads(sdk.generate("tiny-vl", "hello", format=schema, options=options).response) == {"a": 3}
    assert sdk.chat(**PLAIN, format="json", options=GREEDY).message.content.strip().startswith("{")
    with pytest.raises(ollama.ResponseError, match="format"):
        sdk.chat(**PLAIN, format={"type": "nothing"})


def test_log_probabilities(sdk):
    options = {"temperature": 0, "num_predict": 3}
    found = sdk.chat(**QUESTION, options=options, logprobs=True, top_logprobs=2)
    assert len(found.logprobs) == found.eval_count == 3
    assert "".join(entry.token for entry in found.logprobs) == found.message.content
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in found.logprobs)
    chunks = [*sdk.chat(**QUESTION, options=options, logprobs=True, top_logprobs=2, stream=True)]
    assert [entry for chunk in chunks for entry in chunk.logprobs or ()] == found.logprobs


def test_raw_and_empty_prompts(sdk, http):
    template = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    found = sdk.generate("tiny-vl", template, raw=True, options=GREEDY)
    fields = {"prompt": template, "temperature": 0, "max_tokens": 8}
    assert found.response == http.post("/v1/completions", json=fields).json()["choices"][0]["text"]
    assert sdk.generate("tiny-vl", "hello", system="Be brief.", options=GREEDY).prompt_eval_count > found.prompt_eval_count
    for loaded in (sdk.generate("tiny-vl"), sdk.chat("tiny-vl")):
        assert (loaded.done, loaded.done_reason) == (True, "load")


def test_thoughts_and_calls(tools, monkeypatch):
    """The model cannot call tools, so the engine's outputs are replaced."""
    server = tools[1]
    text = '<think>I look.</think>\n\nWait.<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
    monkeypatch.setitem(server.__dict__, "answer_format", replace(server.answer_format, reasoning=FORMATS["think"]))
    monkeypatch.setattr(server.llm, "generate", saying(server.llm.generate, text))
    with listening(server) as url, ollama.Client(url, timeout=240) as sdk:
        found = sdk.chat(**PLAIN, tools=[LOOK], think=True)
        assert (found.message.thinking, found.message.content.strip()) == ("I look.", "Wait.")
        (call,) = found.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", {"place": "here"})
        chunks = [*sdk.chat(**PLAIN, tools=[LOOK], stream=True)]
        assert "".join(chunk.message.thinking or "" for chunk in chunks) == "I look."
        assert [call for chunk in chunks for call in chunk.message.tool_calls or ()] == [call]
        assert sdk.chat(**PLAIN, tools=[LOOK], think=False).message.thinking is None
        result = {"role": "tool", "tool_name": "look", "content": "a tree", "images": [MEDIA / IMAGE]}
        later = sdk.chat("tiny-vl", [*PLAIN["messages"], found.message, result], tools=[LOOK])
        assert later.prompt_eval_count > found.prompt_eval_count


def test_messages_become_chat_messages():
    turns = [
        {"role": "user", "content": "Look.", "images": ["QUJD"]},
        {"role": "assistant", "content": "", "thinking": "I look.", "tool_calls": [
            {"function": {"name": "look", "arguments": {"place": "hé"}}}, {"function": {"name": "go", "arguments": {}}}]},
        {"role": "tool", "content": "gone", "tool_name": "go"},
        {"role": "tool", "content": "a tree"},
    ]  # fmt: skip
    body, places = OllamaChatBody.model_validate({"model": "m:latest", "messages": turns, "think": "high"}).chat_body()
    calls = [("call_1_0", "look", '{"place": "hé"}'), ("call_1_1", "go", "{}")]
    assert body.messages == [
        {"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}, {"type": "text", "text": "Look."}]},
        {"role": "assistant", "content": "", "reasoning_content": "I look.", "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": text}} for id, name, text in calls]},
        {"role": "tool", "content": "gone", "tool_call_id": "call_1_1", "name": "go"},
        {"role": "tool", "content": "a tree", "tool_call_id": "call_1_0"},
    ]  # fmt: skip
    assert (body.model, body.reasoning_effort, body.stream) == ("m", "high", True)
    assert places["messages[0].content[0]"] == "messages[0].images[0]"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"options": {"colour": 1}}, "unknown field 'colour'"),
        ({"options": {"mirostat": 2}}, "there is no Mirostat"),
        ({"template": "{{ .Prompt }}"}, "chat template"),
        ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "unknown field 'mood'"),
        ({"messages": [{"role": "user", "content": "a", "images": "QUJD"}]}, "list of base64 texts"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, "arguments"),
    ],
)
def test_what_is_refused(http, fields, reason):
    found = http.post("/api/chat", json={**PLAIN, **fields})
    assert found.status_code == 400
    assert found.json().keys() == {"error"}
    assert reason in found.json()["error"]


def test_errors_are_texts(sdk, http, tiny, monkeypatch):
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        sdk.chat("other", PLAIN["messages"])
    assert caught.value.status_code == 404
    broken = {**PLAIN["messages"][0], "images": [base64.b64encode(b"broken").decode()]}
    found = http.post("/api/chat", json={**PLAIN, "messages": [broken]})
    assert found.status_code == 400
    assert "messages[0].images[0]" in found.json()["error"]
    assert "options.temperature" in http.post("/api/chat", json={**PLAIN, "options": {"temperature": -1}}).json()["error"]
    assert "there is no POST" in http.post("/api/pull", json={}).json()["error"]
    with pytest.raises(InputError, match="raw prompt"):
        GenerateBody(model="m", prompt="a", system="b", raw=True).chat_body()
    real = tiny[1].llm.generate

    async def generate(*args, **options):
        outputs = real(*args, **options)
        yield await anext(outputs)
        await outputs.aclose()
        raise RuntimeError("a fault")

    monkeypatch.setattr(tiny[1].llm, "generate", generate)
    with pytest.raises(ollama.ResponseError, match="internal error"):
        list(sdk.chat(**QUESTION, stream=True))


def test_the_model_is_described(sdk, tiny):
    (listed,) = sdk.list().models
    (loaded,) = sdk.ps().models
    assert listed.model == loaded.model == "tiny-vl"
    assert listed.size == sum(file.stat().st_size for file in (MEDIA.parent / "tiny-vl").glob("*.safetensors")) > 0
    assert (loaded.context_length, loaded.size_vram) == (1024, 0)
    shown = sdk.show("tiny-vl:latest")
    assert {"completion", "vision"} <= {*shown.capabilities}
    assert shown.template == tiny[1].engine.tokenizer.chat_template
    assert shown.modelinfo[f"{shown.details.family}.context_length"] == 1024
    assert sdk.chat("tiny-vl:latest", PLAIN["messages"], options=GREEDY).model == "tiny-vl:latest"


def test_texts_are_embedded(sdk, http):
    texts = ["hello", "a red square"]
    expected = [one["embedding"] for one in http.post("/v1/embeddings", json={"input": texts}).json()["data"]]
    found = sdk.embed("tiny-vl:latest", texts)
    assert found.model == "tiny-vl:latest"
    for vector, other in zip(found.embeddings, expected, strict=True):
        assert [*vector] == pytest.approx(other, abs=1e-5)
    assert found.prompt_eval_count > 2
    assert found.total_duration > 0
    assert [*sdk.embeddings("tiny-vl", texts[1]).embedding] == pytest.approx(expected[1], abs=1e-5)
    assert len(sdk.embed("tiny-vl", "hello", dimensions=8).embeddings[0]) == 8
    long = "hello " * 4000
    cut = http.post("/v1/embeddings", json={"input": long, "truncate_prompt_tokens": -1}).json()
    assert sdk.embed("tiny-vl", long).prompt_eval_count == cut["usage"]["prompt_tokens"] > 1000
    with pytest.raises(ollama.ResponseError, match="input"):
        sdk.embed("tiny-vl", long, truncate=False)
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        sdk.embed("other", "hello")


def test_keys_are_needed(tiny):
    server = make_server(tiny[1].llm.llm, "tiny-vl", ServerConfig(api_key="s3cret"))
    with listening(server) as url:
        with ollama.Client(url) as sdk, pytest.raises(ollama.ResponseError, match="API key") as caught:
            sdk.chat(**PLAIN)
        assert caught.value.status_code == 401
        with ollama.Client(url, headers={"Authorization": "Bearer s3cret"}, timeout=240) as sdk:
            assert sdk.chat(**PLAIN, options=GREEDY).done
        version = httpx.get(f"{url}/api/version", headers={"Authorization": "Bearer s3cret"}).json()["version"]
        assert [part.isdigit() for part in version.split(".")] == [True] * 3


def test_every_field_of_the_types_is_known():
    types = ollama._types
    pairs = ((types.ChatRequest, OllamaChatBody), (types.GenerateRequest, GenerateBody))
    pairs += ((types.EmbedRequest, EmbedBody), (types.EmbeddingsRequest, EmbeddingsBody))
    for kind, body in (*pairs, (types.Options, Options), (types.ShowRequest, ShowBody)):
        for name in kind.model_fields:
            assert name in body.model_fields or name in body.refused or name in body.ignored, name
