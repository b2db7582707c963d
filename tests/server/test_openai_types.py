"""Every field, item, tool and value that the `openai` package's types have is known: accepted, or refused with a reason."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from http_server import image_url
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_item_param, tool_param
from openai.types.responses.response_includable import ResponseIncludable
from openai.types.shared import reasoning as reasoning_types
from sensorium.callers.errors import InputError
from sensorium.engine.sampling_params import SamplingParams
from sensorium.server.protocol.chat import ChatBody
from sensorium.server.protocol.completions import CompletionBody
from sensorium.server.protocol.response_input import read_items
from sensorium.server.protocol.responses import ResponsesBody
from sensorium.server.protocol.tools import chat_choice, chat_tool
from sensorium.server.reasoning_signer import ReasoningSigner
from typing_extensions import get_type_hints

SIGNER = ReasoningSigner()
USER = {"role": "user", "content": "hello"}
BODIES = [
    (ResponsesBody, response_create_params.ResponseCreateParamsBase, {"input": "hello"}),
    (ChatBody, chat_params.CompletionCreateParamsBase, {"messages": [USER]}),
    (CompletionBody, completion_params.CompletionCreateParamsBase, {"prompt": "hello"}),
]


def kinds(union):
    """Return the values of `type` of the members of a union."""
    for member in get_args(union):
        kind = get_type_hints(member)["type"]
        yield from (
            value
            for value in [*get_args(kind), *(x for one in get_args(kind) for x in get_args(one))]
            if isinstance(value, str)
        )


@pytest.mark.parametrize(("body", "params", "plain"), BODIES)
def test_every_field_is_known(body, params, plain):
    for name in get_type_hints(params):
        known = name in body.model_fields or name in body.refused or name in body.ignored
        assert known, name
        body.model_validate({**plain, name: None} if name not in plain else plain)


# what clients send although nothing depends on it
ACCEPTED = [
    {"store": True},
    {"background": False},
    {"truncation": "auto"},
    {"truncation": "disabled"},
    {"max_tool_calls": 3},
    {"parallel_tool_calls": True},
    {"prompt_cache_key": "thread", "safety_identifier": "user", "prompt_cache_retention": "24h", "user": "u"},
    {"prompt_cache_options": {"mode": "implicit"}},
    {"client_metadata": {"x-codex-installation-id": "1"}},
    {"context_management": []},
    {"text": {"verbosity": "low"}},
    {"include": [], "tools": [], "reasoning": None},
    *({"service_tier": tier} for tier in ("auto", "default", "flex", "scale", "priority", "fast", "ultrafast")),
    *({"reasoning": {"effort": "low", "summary": summary}} for summary in ("auto", "concise", "detailed", None)),
]


@pytest.mark.parametrize("fields", ACCEPTED)
def test_fields_of_responses_on_which_nothing_depends(fields):
    """Some reach the chat template or the parser; the tokens are sampled alike."""
    body, *others = ResponsesBody.model_validate({"input": "hello", **fields}).chat_body(SIGNER)
    plain, *expected = ResponsesBody.model_validate({"input": "hello"}).chat_body(SIGNER)
    handed_on = {"parallel_tool_calls", "verbosity", "reasoning_effort"}
    assert body.model_dump(exclude=handed_on) == plain.model_dump(exclude=handed_on)
    assert others == expected
    assert body.sampling_params(SamplingParams()) == plain.sampling_params(SamplingParams())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"service_tier": "gold"}, "the known tiers are auto, default"),
        ({"moderation": {"model": "m"}}, "there is no moderation"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "every prefix is cached"),
        ({"reasoning": {"mode": "pro"}}, "there is one mode"),
        ({"reasoning": {"context": "all_turns"}}, "chat template decides"),
        ({"reasoning": {"summary": "long"}}, "give auto, concise or detailed"),
        ({"reasoning": {"colour": 1}}, "unknown field 'colour'"),
        ({"text": {"colour": 1}}, "unknown field 'colour'"),
        ({"text": {"verbosity": "loud"}}, "give low, medium, high"),
        ({"conversation": "conv_1"}, "no stored conversations"),
        ({"include": ["colour"]}, "known ones are message.output_text.logprobs"),
    ],
)
def test_fields_of_responses_that_are_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):  # an InputError, or pydantic's error with its text
        ResponsesBody.model_validate({"input": "hello", **fields}).chat_body(SIGNER)


def test_every_field_of_reasoning_is_known():
    for name in reasoning_types.Reasoning.model_fields:
        plain = ResponsesBody.model_validate({"input": "a"}).chat_body(SIGNER)
        assert ResponsesBody.model_validate({"input": "a", "reasoning": {name: None}}).chat_body(SIGNER) == plain


def test_every_value_of_include_is_known():
    accepted = {"reasoning.encrypted_content", "message.output_text.logprobs", "message.input_image.image_url"}
    values = set(get_args(ResponseIncludable))
    assert accepted < values
    for value in values:
        body = ResponsesBody.model_validate({"input": "hello", "include": [value]})
        if value in accepted:
            body.chat_body(SIGNER)
            continue
        with pytest.raises(InputError, match=f"include has {value}: ") as caught:
            body.chat_body(SIGNER)
        assert caught.value.info.param == "include"
    body = ResponsesBody.model_validate({"input": "hello", "include": ["reasoning.encrypted_content"]})
    assert body.chat_body(SIGNER)[0].num_logprobs is None


ITEMS = {
    "message": {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]},
    "function_call": {"call_id": "c", "name": "f", "arguments": "{}", "caller": {"type": "direct"}, "async": False},
    "function_call_output": {"call_id": "c", "name": "f", "output": "a"},
    "custom_tool_call": {"call_id": "c", "name": "f", "input": "a\nb", "caller": None},
    "custom_tool_call_output": {"call_id": "c", "output": "a"},
    "reasoning": {"summary": [], "encrypted_content": None, "content": None},
}


def test_every_type_of_an_item_is_known():
    names = set(kinds(response_input_item_param.ResponseInputItemParam))
    assert set(ITEMS) < names
    for name in names:
        item = {"type": name, "id": "x_1", "status": "completed", **ITEMS.get(name, {})}
        if name in ITEMS:
            read_items([item], SIGNER)
            continue
        with pytest.raises(InputError, match=f"{name}: ") as caught:
            read_items([USER, item], SIGNER)
        assert caught.value.info.param == "input[1]"
    for name, value in ("async", True), ("namespace", "files"), ("caller", {"type": "program", "caller_id": "p"}):
        with pytest.raises(InputError, match=f"{name}=.* cannot be honoured"):
            read_items([{"type": "function_call", **ITEMS["function_call"], name: value}], SIGNER)
    phases = [{**USER, "type": None, "phase": None}, {"role": "assistant", "content": "a", "phase": "commentary", "id": None}]
    assert [one["role"] for one in read_items(phases, SIGNER)[0]] == ["user", "assistant"]


def test_every_type_of_a_tool_is_known():
    names = set(kinds(tool_param.ToolParam))
    assert {"function", "custom", "web_search", "mcp", "local_shell", "namespace"} < names
    for name in names:
        tool = {"type": name, "name": "t"}
        if name in ("function", "custom"):
            assert chat_tool(tool, 0) == {"type": name, name: {"name": "t"}}
            assert chat_choice(tool) == {"type": name, name: {"name": "t"}}
            continue
        with pytest.raises(InputError, match=r"tools\[3\]") as refused:
            chat_tool(tool, 3)
        assert (refused.value.info.code, refused.value.info.value) == ("unsupported", name)
    for choice in ({"type": "mcp", "server_label": "a"}, {"type": "shell"}, {"type": "web_search_preview"}, {"type": "x"}):
        with pytest.raises(InputError, match="tool_choice") as caught:
            chat_choice(choice)
        assert caught.value.info.param == "tool_choice"


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"verbosity": "low"},
        {"service_tier": "priority"},
        {"modalities": ["text"]},
        {"metadata": {"a": "b"}, "prompt_cache_key": "a", "safety_identifier": "b"},
        {"reasoning_effort": "low"},
        {"moderation": None},
    ],
)
def test_fields_of_chat_on_which_nothing_depends(fields):
    body, plain = (ChatBody.model_validate({"messages": [USER], **more}) for more in (fields, {}))
    assert body.messages == plain.messages
    assert body.sampling_params(SamplingParams()) == plain.sampling_params(SamplingParams())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"modalities": ["text", "audio"]}, "answers are text"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "answers are text"),
        ({"web_search_options": {}}, "there is no web search"),
        ({"service_tier": "gold"}, "the known tiers"),
        ({"functions": []}, "give tools"),
        ({"moderation": {"model": "m"}}, "there is no moderation"),
    ],
)
def test_fields_of_chat_that_are_refused(fields, reason):
    with pytest.raises(ValueError, match=reason):
        ChatBody.model_validate({"messages": [USER], **fields})


def test_the_details_of_images(http):
    """As OpenAI's types have them, on images and on files; "original" is the size that the model's rules give."""

    def tokens(part):
        content = [part, {"type": "input_text", "text": "hello"}]
        fields = {"input": [{"role": "user", "content": content}], "max_output_tokens": 1, "temperature": 0}
        found = http.post("/v1/responses", json={"model": "tiny-vl", **fields})
        assert found.status_code == 200, found.text
        return found.json()["usage"]["input_tokens"]

    image = {"type": "input_image", "image_url": image_url(), "prompt_cache_breakpoint": {"mode": "explicit"}}
    file = {"type": "input_file", "filename": "a.png", "file_data": image_url()}
    expected = tokens(image)
    for detail in ("auto", "high", "original", None):
        assert tokens({**image, "detail": detail}) == tokens({**file, "detail": detail}) == expected
    assert tokens({**file, "detail": "low"}) == tokens({**image, "detail": "low"}) <= expected
    refused = http.post("/v1/responses", json={"input": [{"role": "user", "content": [{**image, "detail": "huge"}]}]}).json()
    assert "give low, high, auto or original" in refused["error"]["message"], json.dumps(refused)


def test_an_unknown_field_is_answered_with_fields_that_are_honoured():
    with pytest.raises(ValueError, match="unknown field 'colour'") as caught:
        ChatBody.model_validate({"messages": [{"role": "user", "content": "a"}], "colour": 1})
    words = str(caught.value).replace(",", " ").split()
    assert "temperature" in words
    assert set(words).isdisjoint(ChatBody.refused)
