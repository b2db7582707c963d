"""/v1/messages with the `anthropic` package, whose types check every message and event; skipped without it."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from typing import get_args

import httpx
import pytest
from http_server import CASES, IMAGE, MEDIA, error, image_url, listening, make_server, saying
from PIL import Image
from pydantic import TypeAdapter
from sensorium.callers.errors import InputError
from sensorium.server.config import ServerConfig
from sensorium.server.parsers.reasoning import FORMATS
from sensorium.server.protocol.message_blocks import _OTHER_KINDS, _ROLES, read_turns
from sensorium.server.protocol.messages import CountBody, MessagesBody, as_input
from sensorium.server.reasoning_signer import ReasoningSigner
from typing_extensions import get_type_hints

anthropic = pytest.importorskip("anthropic")
types = anthropic.types

SIGNER = ReasoningSigner(b"k" * 32)
PLAIN = {"model": "tiny-vl", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0.0}
EVENT = TypeAdapter(types.RawMessageStreamEvent)
LOOK = {"name": "look", "description": "Looks.", "input_schema": {
    "type": "object", "properties": {"place": {"enum": ["here", "there"]}}, "required": ["place"],
    "additionalProperties": False,
}}  # fmt: skip


def source(name=IMAGE):
    data = base64.b64encode((MEDIA / name).read_bytes()).decode()
    return {"type": "base64", "media_type": "image/png", "data": data}


def user(*blocks):
    return [{"role": "user", "content": [*blocks]}]


QUESTION = user({"type": "image", "source": source()}, {"type": "text", "text": CASES[IMAGE]["prompt"]})


def post(http, path="/v1/messages", **fields):
    return http.post(path, json={**PLAIN, **fields}, headers={"anthropic-version": "2023-06-01"})


def stream(http, **fields):
    """Return the events of a stream, and check their form."""
    response = post(http, stream=True, **fields)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = [block.split("\n") for block in response.text.removesuffix("\n\n").split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in events]
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_python(event)
    return events


@pytest.fixture
def sdk(tiny):
    with anthropic.Anthropic(base_url=tiny[0], api_key="none", max_retries=0, timeout=240) as client:
        yield client


def test_an_image_is_answered_whole_and_in_a_stream(sdk, http):
    fields = {"model": "tiny-vl", "messages": QUESTION, "max_tokens": 96, "extra_body": {"temperature": 0}}
    found = sdk.messages.create(**fields)
    assert found.content[0].text.strip() == CASES[IMAGE]["answer"]
    assert (found.stop_reason, found.stop_sequence, found.role, found.model) == ("end_turn", None, "assistant", "tiny-vl")
    types.Message.model_validate(post(http, messages=QUESTION, max_tokens=96).json(), strict=True)
    with sdk.messages.stream(**fields) as events:
        kinds = [event.type for event in events]
        final = events.get_final_message()
    assert final.content[0].text == found.content[0].text
    assert final.usage.output_tokens == found.usage.output_tokens
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert {"content_block_start", "content_block_delta", "content_block_stop", "message_delta", "text"} < set(kinds)
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": image_url()}}, {"type": "text", "text": CASES[IMAGE]["prompt"]},
    ]}], "max_tokens": 96, "temperature": 0}).json()  # fmt: skip
    assert chat["choices"][0]["message"]["content"] == found.content[0].text
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]


def test_tokens_are_counted_as_they_are_used(sdk, http):
    for messages in (QUESTION, PLAIN["messages"], QUESTION + [{"role": "assistant", "content": "It"}]):
        used = post(http, messages=messages, system=[{"type": "text", "text": "Be brief."}]).json()["usage"]
        counted = sdk.messages.count_tokens(
            model="tiny-vl", messages=messages, system=[{"type": "text", "text": "Be brief."}]
        ).input_tokens
        assert counted == used["input_tokens"] + used["cache_read_input_tokens"]
    wrong = [{"role": "user", "content": [{"type": "image", "source": {**source(), "data": "AAAA"}}]}]
    found = error(post(http, "/v1/messages/count_tokens", messages=wrong))
    assert found["code"] == "invalid_media"
    assert found["message"].startswith("messages[0].content[0]: ")


def test_reasons_for_stopping(http):
    words = post(http, messages=QUESTION, max_tokens=40).json()["content"][0]["text"]
    letter = words.strip()[3]
    found = post(http, messages=QUESTION, max_tokens=40, stop_sequences=[letter]).json()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", letter)
    assert found["content"][0]["text"] == words[: words.index(letter)]
    found = post(http, messages=QUESTION, max_tokens=2).json()
    assert (found["stop_reason"], found["usage"]["output_tokens"]) == ("max_tokens", 2)
    found = post(http, max_tokens=100_000, ignore_eos=True).json()
    assert found["stop_reason"] == "model_context_window_exceeded"
    found = post(http, max_tokens=0).json()
    assert (found["content"], found["stop_reason"], found["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    events = stream(http, max_tokens=0)
    assert [event["type"] for event in events] == ["message_start", "ping", "message_delta", "message_stop"]


def test_an_answer_is_continued(http):
    whole = post(http, messages=QUESTION, max_tokens=40).json()["content"][0]["text"]
    head = {"role": "assistant", "content": whole[:2]}
    turns = [*QUESTION, head]
    question = {"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": image_url()}}, {"type": "text", "text": CASES[IMAGE]["prompt"]},
    ]}  # fmt: skip
    chat = {"messages": [question, head], "continue_final_message": True, "temperature": 0, "max_tokens": 40}
    expected = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    assert "".join(block["text"] for block in post(http, messages=turns, max_tokens=40).json()["content"]) == expected


def test_forced_tools(tools):
    server = tools[1]
    for choice in {"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "look"}:
        with listening(server) as url, httpx.Client(base_url=url, timeout=240) as http:
            fields = {"tools": [{**LOOK, "cache_control": {"type": "ephemeral"}}], "tool_choice": choice, "max_tokens": 80}
            found = post(http, **fields).json()
            (block,) = found["content"]
            assert (block["type"], block["name"], found["stop_reason"]) == ("tool_use", "look", "tool_use")
            assert block["input"]["place"] in ("here", "there")
            events = stream(http, **fields)
            parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
            assert json.loads("".join(parts)) == block["input"]


def test_thoughts_texts_and_calls_are_blocks(tools, monkeypatch):
    """The model cannot call tools, so the engine's outputs are replaced."""
    server = tools[1]
    text = '<think>I look.</think>\n\nWait.<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'
    monkeypatch.setitem(server.__dict__, "answer_format", replace(server.answer_format, reasoning=FORMATS["think"]))
    monkeypatch.setattr(server.llm, "generate", saying(server.llm.generate, text))
    with listening(server) as url, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=240) as client:
        fields = {"model": "tiny-vl", "messages": PLAIN["messages"], "max_tokens": 2000, "tools": [LOOK]}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        found = client.messages.create(**fields, thinking=thinking)
        thought, said, call = found.content
        assert (thought.thinking, said.text.strip(), call.input) == ("I look.", "Wait.", {"place": "here"})
        assert server.services.reasoning_signer.verify(thought.signature, "") == "I look."
        assert found.stop_reason == "tool_use"
        with client.messages.stream(**fields, thinking=thinking) as events:
            final = events.get_final_message()
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[0] == thought
        assert final.content[2].input == call.input
        hidden = client.messages.create(**fields, thinking={**thinking, "display": "omitted"}).content[0]
        assert (hidden.thinking, hidden.signature) == ("", thought.signature)
        none = client.messages.create(**fields, thinking={"type": "disabled"})
        assert [block.type for block in none.content] == ["text", "tool_use"]
        with client.messages.stream(**fields, thinking={"type": "disabled"}) as events:
            assert [block.type for block in events.get_final_message().content] == ["text", "tool_use"]
        # the next turn has all of them, and an image in the tool's result
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "image", "source": source()}]}
        turns = [*PLAIN["messages"], {"role": "assistant", "content": [hidden, said, call]}, *user(result)]
        later = client.messages.create(**{**fields, "messages": turns}, thinking=thinking).usage
        text = [{"type": "tool_result", "tool_use_id": call.id, "content": ""}]
        turns[-1] = {"role": "user", "content": text}
        without = client.messages.count_tokens(model="tiny-vl", messages=turns, tools=[LOOK]).input_tokens
        assert later.input_tokens + later.cache_read_input_tokens > without + 5


def test_turns_become_chat_messages():
    turns = [
        {"role": "user", "content": "Look."},
        {"role": "user", "content": [{"type": "document", "title": "Notes", "source": {
            "type": "text", "media_type": "text/plain", "data": "a note"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "", "signature": SIGNER.sign("I look.")},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"place": "hé"}},
            {"type": "tool_use", "id": "t2", "name": "look", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [
                {"type": "text", "text": "a tree"}, {"type": "image", "source": source(), "cache_control": None}]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
            {"type": "text", "text": "Go on."},
        ]},
    ]  # fmt: skip
    messages, places = read_turns(turns, SIGNER, 1)
    call = {"type": "function", "function": {"name": "look", "arguments": '{"place": "hé"}'}}
    assert messages == [
        {"role": "user", "content": [
            {"type": "text", "text": "Look."}, {"type": "text", "text": "Notes\n"}, {"type": "text", "text": "a note"}]},
        {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [
            {"id": "t1", **call}, {"id": "t2", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "t1", "content": [
            {"type": "text", "text": "a tree"}, {"type": "image", "source": source()}]},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": "Go on."},
    ]  # fmt: skip
    assert places["messages[1].content[2]"] == "messages[1].content[0]"
    assert places["messages[2].tool_calls[1]"] == "messages[2].content[3]"
    assert places["messages[5].content[0]"] == "messages[3].content[2]"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0. has the type 'web_search_20250305'"),
        ({"tools": [{"name": "look"}]}, "input_schema must be a JSON schema"),
        ({"tool_choice": {"type": "required"}}, "known ones are auto, any, none, tool"),
        ({"tool_choice": {"type": "tool"}}, "give .*name"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens is missing"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}, "max_tokens": 2000}, "must be above thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format is"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "edits no conversations"),
        ({"messages": user({"type": "mcp_tool_use"})}, "runs no tools"),
        ({"messages": user({"type": "thinking", "thinking": "", "signature": ""})}, "in a turn of the user"),
        ({"messages": user({"type": "document", "source": {"type": "text", "data": 1}})}, "give a string"),
        ({"messages": user({"type": "text", "text": "a", "colour": 1})}, "unknown field 'colour'"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "give user, assistant or system"),
    ],
)
def test_what_is_refused(fields, reason):
    with pytest.raises(InputError, match=reason):
        CountBody.model_validate({**PLAIN, **fields}).chat_body(SIGNER)


def test_fields_and_values_reach_the_chat():
    fields = {
        "system": "Be brief.", "stop_sequences": ["x"], "metadata": {"user_id": "u"}, "service_tier": "standard_only",
        "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        "thinking": {"type": "disabled"}, "tools": [LOOK], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "top_k": 3,
    }  # fmt: skip
    body, places = MessagesBody.model_validate({**PLAIN, **fields}).chat_body(SIGNER)
    assert [message["role"] for message in body.messages] == ["system", "user"]
    assert (body.stop, body.top_k, body.reasoning_effort, body.max_tokens) == (["x"], 3, "high", 8)
    assert (body.tool_choice, body.parallel_tool_calls, body.include_reasoning) == ("auto", False, False)
    assert body.chat_template_kwargs == {"enable_thinking": False, "thinking": False}
    assert body.response_format["json_schema"]["schema"] == {"type": "object"}
    assert places["messages[0]"] == "system"
    assert MessagesBody.model_validate(PLAIN).chat_body(SIGNER)[0].chat_template_kwargs == {}


def test_every_field_and_block_of_the_types_is_known():
    for params, body in (
        (types.message_create_params.MessageCreateParamsBase, MessagesBody),
        (types.message_count_tokens_params.MessageCountTokensParams, CountBody),
    ):
        for name in get_type_hints(params):
            assert name in body.model_fields or name in body.refused or name in body.ignored, name
    kinds = set()
    for member in get_args(types.content_block_param.ContentBlockParam):
        hint = get_type_hints(member)["type"]
        kinds |= {value for one in (hint, *get_args(hint)) for value in get_args(one) if isinstance(value, str)}
    assert len(kinds) > 12
    for kind in kinds - {name for names in _ROLES.values() for name in names}:
        assert kind in _OTHER_KINDS, kind
    assert as_input('{"a": 1}') == {"a": 1}
    assert as_input('{"a": ') == as_input("[1]") == {}


def test_the_model_is_listed(sdk):
    (model,) = sdk.models.list().data
    assert (model.id, model.type, model.display_name) == ("tiny-vl", "model", "tiny-vl")
    assert sdk.models.retrieve("tiny-vl") == model
    with pytest.raises(anthropic.NotFoundError):
        sdk.models.retrieve("claude")


def test_errors_have_the_shape_of_the_api(sdk, http):
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as caught:
        sdk.messages.create(model="claude", messages=PLAIN["messages"], max_tokens=8)
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        sdk.messages.create(model="tiny-vl", messages=[{"role": "user", "content": "word " * 3000}], max_tokens=8)
    assert caught.value.request_id == caught.value.body["request_id"] == caught.value.response.headers["x-request-id"]
    raw = post(http, colour=1)
    assert raw.status_code == 400
    assert raw.json() == {"type": "error", "request_id": raw.headers["request-id"], "error": {
        "type": "invalid_request_error", "code": "unknown_name", "message": raw.json()["error"]["message"]}}  # fmt: skip
    assert raw.json()["error"]["message"].startswith("unknown field 'colour'")
    assert (
        error(http.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}))["type"]
        == "invalid_request_error"
    )
    assert error(http.get("/v1/messages"), 405)["type"] == "invalid_request_error"
    assert error(http.post("/v1/messages", json={**PLAIN, "max_tokens": None}))["message"].startswith("max_tokens")


def test_keys_are_those_of_the_api(tiny):
    server = make_server(tiny[1].llm.llm, "tiny-vl", ServerConfig(api_key="s3cret"))
    with listening(server) as url:
        wrong = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
        with wrong, pytest.raises(anthropic.AuthenticationError, match="API key"):
            wrong.messages.create(model="tiny-vl", messages=PLAIN["messages"], max_tokens=2)
        for options in ({"api_key": "s3cret"}, {"auth_token": "s3cret", "api_key": None}):
            with anthropic.Anthropic(base_url=url, max_retries=0, **options) as client:
                found = client.messages.create(model="tiny-vl", messages=PLAIN["messages"], max_tokens=2)
                assert found.usage.output_tokens == 1


def test_a_failure_within_a_stream_is_an_event(tiny, monkeypatch):
    _, server = tiny

    async def generate(*args, **options):
        outputs = real(*args, **options)
        yield await anext(outputs)
        await outputs.aclose()
        raise RuntimeError("a fault")

    real = server.llm.generate
    monkeypatch.setattr(server.llm, "generate", generate)
    with httpx.Client(base_url=tiny[0], timeout=240) as http:
        text = post(http, stream=True, max_tokens=8, ignore_eos=True).text
    last = json.loads(text.strip().split("\n")[-1].removeprefix("data: "))
    assert "event: error" in text
    assert last["error"]["type"] == "api_error"
    assert "a fault" not in text


def test_a_pdf_is_its_pages(http):
    pytest.importorskip("pypdfium2")
    image = Image.open(MEDIA / IMAGE).convert("RGB")
    buffer = io.BytesIO()
    image.save(buffer, "pdf", save_all=True, append_images=[image])
    pdf = {"type": "base64", "media_type": "application/pdf", "data": base64.b64encode(buffer.getvalue()).decode()}
    one = post(http, "/v1/messages/count_tokens", messages=user({"type": "image", "source": source()})).json()["input_tokens"]
    two = post(http, "/v1/messages/count_tokens", messages=user({"type": "document", "source": pdf})).json()["input_tokens"]
    text = post(http, "/v1/messages/count_tokens", messages=user({"type": "text", "text": ""})).json()["input_tokens"]
    assert two - text > 1.5 * (one - text)
    assert post(http, messages=user({"type": "document", "source": pdf})).status_code == 200
