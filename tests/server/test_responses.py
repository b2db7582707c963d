"""/v1/responses with the `openai` package, whose types check every response and event."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from dataclasses import replace

import family
import httpx
import openai
import pytest
import soundfile
from http_server import CASES, IMAGE, MEDIA, TINY, error, image_url, listening, make_server, saying
from openai.types.responses import Response, ResponseStreamEvent
from oracle import build_checkpoint
from PIL import Image
from pydantic import BaseModel, TypeAdapter
from sensorium import SamplingParams
from sensorium.callers.errors import ErrorInfo, InputError
from sensorium.server.parsers.reasoning import FORMATS
from sensorium.server.protocol.response_input import read_items
from sensorium.server.reasoning_signer import ReasoningSigner
from waiting import assert_idle

URL = image_url()
IMAGE_PART = {"type": "input_image", "image_url": URL, "detail": "auto"}
PLAIN = {"model": "tiny-vl", "input": "hello", "temperature": 0.0, "max_output_tokens": 8}
LOOK = {"type": "function", "name": "look", "strict": True, "parameters": {
    "type": "object", "properties": {"place": {"enum": ["here", "there"]}}, "required": ["place"],
    "additionalProperties": False,
}}  # fmt: skip
CALL = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "a tree"}
EVENT, SIGNER = TypeAdapter(ResponseStreamEvent), ReasoningSigner()


def question(*parts):
    return [{"role": "user", "content": [*parts, {"type": "input_text", "text": CASES[IMAGE]["prompt"]}]}]


def post(http, **fields):
    return http.post("/v1/responses", json={**PLAIN, **fields})


def stream(http, **fields):
    """Return the events of a stream, and check their form."""
    response = post(http, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        EVENT.validate_python(event)
    return events


def without_ids(value):
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {name: without_ids(one) for name, one in value.items() if name not in changing}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("part", [IMAGE_PART, {"type": "input_file", "filename": IMAGE, "file_data": URL}])
def test_an_image_is_answered(client, http, part):
    fields = {"input": question(part), "max_output_tokens": 96}
    found = client.responses.create(**{**PLAIN, **fields})
    assert found.output_text.strip() == CASES[IMAGE]["answer"]
    assert (found.status, found.output[0].status, found.incomplete_details) == ("completed", "completed", None)
    assert found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    raw = post(http, **fields).json()
    Response.model_validate(raw, strict=True)
    assert 0 < raw["usage"]["input_tokens_details"]["image_tokens"] < found.usage.input_tokens


def test_a_stream_has_the_same_response(http):
    fields = {"instructions": "Be brief.", "metadata": {"a": "b"}, "input": question(IMAGE_PART)}
    fields["max_output_tokens"] = 4
    events, whole = stream(http, **fields), post(http, **fields).json()
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds.count("output_text.delta") > 1
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert whole["output"][0]["content"][0]["text"] == text
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert "completed_at" not in whole
    assert (whole["instructions"], whole["metadata"]) == ("Be brief.", {"a": "b"})
    last = events[-1]["response"]
    last["usage"]["input_tokens_details"] = whole["usage"]["input_tokens_details"]  # the second one is cached
    assert without_ids(last) == without_ids(whole)


def test_the_packages_own_stream(client):
    async def run():
        other = openai.AsyncOpenAI(base_url=client.base_url, api_key="none")
        async with other, other.responses.stream(**PLAIN) as events:
            kinds = [event.type async for event in events]
            return kinds, await events.get_final_response()

    kinds, found = asyncio.run(run())
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert found.output_text == client.responses.create(**PLAIN).output_text


def test_structured_output(client, http):
    class Number(BaseModel):
        n: bool

    found = client.responses.parse(model="tiny-vl", input="hello", text_format=Number, max_output_tokens=60, temperature=0)
    assert isinstance(found.output_parsed, Number)
    form = {"format": {"type": "json_object"}, "verbosity": "medium"}
    assert post(http, text=form, max_output_tokens=100).json()["text"] == form


def test_logprobs_are_those_of_the_text(http):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 4}
    fields["input"] = question(IMAGE_PART)
    (part,) = post(http, **fields).json()["output"][0]["content"]
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"]
    assert [len(one["top_logprobs"]) for one in part["logprobs"]] == [2] * 4
    events = stream(http, **fields)
    deltas = [one for event in events if event["type"].endswith("text.delta") for one in event["logprobs"]]
    assert deltas == part["logprobs"]


def test_forced_tool_calls(tools):
    client, _ = tools
    choices = [{"type": "function", "name": "look"}, "required"]
    choices.append({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}] * 2})
    other = {"type": "function", "name": "wait", "parameters": None, "strict": None}
    for choice in choices:
        offered = [LOOK, other] if isinstance(choice, dict) else [LOOK]
        fields = {**PLAIN, "tools": offered, "tool_choice": choice, "max_output_tokens": 80, "parallel_tool_calls": False}
        (call,) = client.responses.create(**fields).output
        assert (call.type, call.name, call.status) == ("function_call", "look", "completed")
        assert json.loads(call.arguments)["place"] in ("here", "there")
        events = list(client.responses.create(**fields, stream=True))
        deltas = "".join(one.delta for one in events if one.type == "response.function_call_arguments.delta")
        (done,) = (one for one in events if one.type == "response.function_call_arguments.done")
        assert deltas == done.arguments == call.arguments


def test_reasoning_text_and_calls_are_items(tools, monkeypatch):
    """The model cannot call tools, so the engine's outputs are replaced."""
    client, server = tools
    call = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
    form = replace(server.answer_format, reasoning=FORMATS["think"])
    monkeypatch.setitem(server.__dict__, "answer_format", form)
    monkeypatch.setattr(server.llm, "generate", saying(server.llm.generate, f"<think>hm</think>Wait.\n{call}\n{call}\n"))
    fields = {**PLAIN, "tools": [LOOK], "max_output_tokens": 2}
    found = client.responses.create(**fields)
    Response.model_validate(found.to_dict(), strict=True)
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (found.output[0].content[0].text, found.output_text) == ("hm", "Wait.")
    assert json.loads(found.output[3].arguments) == {"place": "here"}
    assert len({item.id for item in found.output} | {item.call_id for item in found.output[2:]}) == 6
    assert found.usage.output_tokens_details.reasoning_tokens > 0
    events = list(client.responses.create(**fields, stream=True))
    assert "".join(one.delta for one in events if one.type == "response.reasoning_text.delta") == "hm"
    assert without_ids(events[-1].response.to_dict()["output"]) == without_ids(found.to_dict()["output"])

    turn = {"role": "assistant", "reasoning_content": "hm", "content": found.output[1].to_dict()["content"]}
    conversation = [*(item.to_dict() for item in found.output)]
    conversation += [{"type": "function_call_output", "call_id": item.call_id, "output": "a tree"} for item in found.output[2:]]
    messages, _ = read_items(conversation, SIGNER)
    assert {name: messages[0][name] for name in turn} == turn
    assert [one["function"]["name"] for one in messages[0]["tool_calls"]] == ["look", "look"]
    assert [(one["role"], one["content"]) for one in messages[1:]] == [("tool", "a tree")] * 2
    assert [one["tool_call_id"] for one in messages[1:]] == [one["id"] for one in messages[0]["tool_calls"]]


def test_a_turn_is_one_message():
    def say(text):
        return {"role": "assistant", "content": text}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    assert read_items([say("a"), say("b")], SIGNER)[0] == [say("a"), say("b")]
    assert len(read_items([call, call, {"type": "message", **say("b")}], SIGNER)[0]) == 1
    assert len(read_items([call, {"role": "user", "content": "a"}, call], SIGNER)[0]) == 3


def test_audio_is_an_input_part(tmp_path):
    """A random Qwen2-Audio answers a file of audio as in Python, also through chat; usage counts its tokens."""
    stream = io.BytesIO()
    soundfile.write(stream, family.make_media("audio", (12_000,), 0), 16_000, format="WAV")
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(stream.getvalue()).decode(), "format": "wav"}}
    server = make_server(build_checkpoint(tmp_path, "qwen2_audio"), "audio", max_model_len=256, warm_up=False)
    with server.llm.llm as llm, listening(server) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        messages = [{"role": "user", "content": [part, {"type": "text", "text": "hello"}]}]
        (expected,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
        fields = {"model": "audio", "temperature": 0, "extra_body": {"ignore_eos": True}}
        answer = client.chat.completions.create(messages=messages, max_tokens=6, **fields)
        items = [{"role": "user", "content": [part, {"type": "input_text", "text": "hello"}]}]
        found = client.responses.create(input=items, max_output_tokens=6, **fields)
    assert answer.choices[0].message.content == found.output_text == expected.outputs[0].text
    assert answer.usage.prompt_tokens_details.audio_tokens == expected.items[0].num_tokens > 0
    assert found.usage.input_tokens_details.audio_tokens == expected.items[0].num_tokens


def test_files_are_input_parts(client):
    """A file is an image or a PDF, whose pages are images."""
    data = io.BytesIO()
    Image.open(MEDIA / IMAGE).convert("RGB").save(data, "PDF", resolution=144.0, quality=95)
    pdf = f"data:application/pdf;base64,{base64.b64encode(data.getvalue()).decode()}"
    for name, url in (IMAGE, URL), ("scan.pdf", pdf):
        part = {"type": "input_file", "filename": name, "file_data": url}
        found = client.responses.create(model="tiny-vl", input=question(part), temperature=0, max_output_tokens=96)
        assert found.output_text.strip() == CASES[IMAGE]["answer"]
        assert found.usage.input_tokens_details.image_tokens > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"colour": 1}, "colour"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["web_search_call.results"]}, "include"),
        ({"top_logprobs": 999}, "logprobs"),
        ({"input": []}, None),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": "a", "colour": 1}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "encrypted_content": "a"}]}, "input[0]"),
        ({"input": question({"type": "input_image", "file_id": "f", "detail": "auto"})}, "input[0].content[0]"),
        ({"input": question(IMAGE_PART, {**IMAGE_PART, "image_url": "data:,x"}), "instructions": "a"}, "input[0].content[1]"),
        ({"input": [{"role": "king", "content": "a"}], "instructions": "a"}, "input[0]"),
        ({"instructions": "\ud800"}, "instructions"),
        ({"input": "hello " * 4000}, "input"),
        ({"input": [CALL, CALL | {"arguments": "{"}, OUTPUT]}, "input[1]"),
        ({"input": [CALL, OUTPUT | {"output": [{"type": "colour"}]}]}, "input[1].output[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{**LOOK, "defer_loading": True}]}, "tools"),
        ({"tools": [LOOK]}, "tools"),  # the template has no calls
        ({"tool_choice": {"type": "function", "name": "look"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "look"}]}}, "tool_choice"),
        ({"metadata": {"a": float("nan")}}, "metadata"),
        ({"metadata": {"a": "\ud800"}}, "metadata"),
        ({"tools": [{**LOOK, "parameters": {"maximum": float("inf")}}], "tool_choice": "none"}, "tools"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"verbosity": "loud"}}, "text"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
    ],
)
def test_wrong_fields(http, tiny, fields, param):
    content = json.dumps({**PLAIN, **fields})
    response = http.post("/v1/responses", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert param is None or error["param"] == param, error
    assert_idle(tiny[1].llm)


def test_too_many_images_are_a_fault_of_the_input():
    server = make_server(TINY, "tiny-vl", max_model_len=1024, warm_up=False, limit_mm_per_prompt={"image": 1})
    with server.llm.llm, listening(server) as url:
        found = httpx.post(f"{url}/v1/responses", json={**PLAIN, "input": question(IMAGE_PART, IMAGE_PART)}, timeout=240)
    assert found.json()["error"]["message"] == "At most 1 image(s) may be provided in one prompt, not 2"
    assert found.json()["error"]["param"] == "input"


def test_media_that_cannot_be_read(http):
    for streamed in (False, True):
        response = post(http, input=question(IMAGE_PART, {**IMAGE_PART, "image_url": "/etc/passwd"}), stream=streamed)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["index"]) == (400, "invalid_media", 1)


def test_an_error_in_the_middle_of_a_stream(http, tiny, monkeypatch):
    engine = tiny[1].llm
    generate = engine.generate

    async def failing(*args, **options):
        async for output in generate(*args, **options):
            yield output
            yield replace(output, error=ErrorInfo("engine_dead", "the engine has failed"))
            return

    monkeypatch.setattr(engine, "generate", failing)
    last = stream(http, ignore_eos=True)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "the engine has failed"}
    assert post(http, ignore_eos=True, top_logprobs=1).status_code == 503


def test_items_of_other_types():
    with pytest.raises(InputError, match="web_search_call"):
        read_items([{"type": "web_search_call"}], SIGNER)


@pytest.mark.parametrize("value", [0, 1, "false"])
def test_only_false_says_that_beams_are_off(http, value):
    found = error(http.post("/v1/responses/input_tokens", json={"input": "a", "use_beam_search": value}))
    assert (found["code"], found["param"]) == ("unsupported", "use_beam_search")
