"""Wrong values in every field of every body, and unknown fields: each is refused with a typed error, never with a 500."""

from __future__ import annotations

import json
import random
import time

import pytest
from http_server import image_url
from sensorium.callers.errors import InputError
from sensorium.callers.message_fields import check_messages
from sensorium.server.protocol.chat import ChatBody
from sensorium.server.protocol.completions import CompletionBody
from sensorium.server.protocol.pooling import ClassifyBody, EmbeddingBody, RerankBody, ScoreBody
from sensorium.server.protocol.responses import ResponsesBody
from sensorium.server.protocol.tokens import DetokenizeBody, PlanBody, TokenizeBody
from waiting import assert_idle

MESSAGES = [{"role": "user", "content": "a"}]
BODIES = {
    "/v1/chat/completions": (ChatBody, {"messages": MESSAGES, "max_tokens": 2}),
    "/v1/responses": (ResponsesBody, {"input": "a", "max_output_tokens": 2}),
    "/v1/completions": (CompletionBody, {"prompt": "a", "max_tokens": 2}),
    "/v1/embeddings": (EmbeddingBody, {"input": "a"}),
    "/score": (ScoreBody, {"queries": "a", "documents": ["a"]}),
    "/rerank": (RerankBody, {"query": "a", "documents": ["a"]}),
    "/classify": (ClassifyBody, {"input": "a"}),
    "/tokenize": (TokenizeBody, {"prompt": "a"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
    "/v1/media/plan": (PlanBody, {"messages": MESSAGES}),
}
DEEP = json.loads("[" * 90 + "]" * 90)
VALUES = [
    *(None, True, 0, -1, 3, 2**70, 1.5, float("inf"), float("nan"), "", "a", "\ud800", "\x00"),
    *([], [[]], [None], [True], [2**70], {}, {"a": 1}, {"": None}, {"type": "text"}, {"type": []}, {"url": 3}, {"content": []}),
    *({"content": [{"type": "image_url"}]}, [{"role": "user"}], [{"role": [], "content": {}}]),
    [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
    *({"json": {"$ref": "#"}}, {"regex": "("}, {"choice": []}),
    {"type": "json_schema", "json_schema": {"schema": {"type": 3}}},
    *(DEEP, {"a": DEEP}, [{"role": "user", "content": DEEP}]),
    [{"type": "function", "function": {"name": "a", "parameters": {"": DEEP}}}],
]
CASES = [(path, name, value) for path, (kind, _) in BODIES.items() for name in kind.model_fields for value in VALUES]


@pytest.mark.parametrize("part", range(4))
def test_wrong_values(http, tiny, part):
    seen = set()
    for path, name, value in random.Random(part).sample(CASES, 120):
        body = json.dumps({**BODIES[path][1], name: value})
        response = http.post(path, content=body, headers={"Content-Type": "application/json"})
        seen.add(response.status_code)
        assert response.status_code in (200, 400, 404), (path, name, value, response.text)
        if response.status_code != 200:
            assert set(response.json()["error"]) >= {"message", "type", "param", "code"}
    assert seen >= {200, 400}
    assert_idle(tiny[1].llm)


def user(*parts, **fields):
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "a"}], **fields}], "max_tokens": 1}


PICTURE = image_url("line1.png")
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1]}}, "required": ["n"]}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
PATHS = {
    "/v1/chat/completions": [
        user(),
        user({"type": "image_url", "image_url": {"url": PICTURE, "detail": "low"}}),
        user({"type": "file", "file": {"file_data": PICTURE}}),
        user() | {"stream": True, "stream_options": {"include_usage": True}},
        user() | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        user() | {"response_format": {"type": "text"}},
        user() | {"structured_outputs": {"choice": ["a", "b"]}},
        user() | {"repetition_detection": {"max_cycle": 8, "min_repeats": 2}},
        user() | {"mm_processor_kwargs": {"max_pixels": 4096}},
        {"messages": [{"role": "assistant", "content": "a", "tool_calls": [CALL]}, *user()["messages"]], "max_tokens": 1},
        user() | {"tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}], "tool_choice": "none"},
        user()
        | {
            "tools": [{"type": "function", "function": {"name": "look"}}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
        },
    ],
    "/v1/responses": [
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "max_output_tokens": 1},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": PICTURE}]}], "max_output_tokens": 1},
        {"input": "a", "text": {"format": {"type": "text"}}, "max_output_tokens": 1},
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "max_output_tokens": 40},
        {"input": "a", "reasoning": {"effort": "low"}, "max_output_tokens": 1},
        {
            "input": [
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a"}]},
                {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "a"},
                {"role": "user", "content": "a"},
            ],
            "max_output_tokens": 1,
        },
        {
            "input": "a",
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
            "tool_choice": {"type": "function", "name": "look"},
            "max_output_tokens": 40,
        },
    ],
    "/v1/completions": [{"prompt": "a", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}}],
    "/v1/embeddings": [
        {"input": {"text": "a"}},
        {"input": [{"content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]},
    ],
    "/score": [{"queries": {"text": "a"}, "documents": [{"text": "a"}]}],
    "/rerank": [{"query": {"text": "a"}, "documents": [{"text": "a"}]}],
    "/classify": [{"input": "a"}],
    "/tokenize": [{"prompt": "a"}, {"messages": user()["messages"]}],
    "/detokenize": [{"tokens": [5]}],
    "/v1/media/plan": [{"messages": user({"type": "image_url", "image_url": {"url": PICTURE}})["messages"]}],
}
FREE = ("schema", "parameters")
"""Fields whose objects are JSON schemas, which may have any key."""


def objects(value):
    """Yield each object inside a body whose fields have fixed names."""
    if isinstance(value, dict):
        yield value
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, one in entries:
        if name not in FREE:
            yield from objects(one)


@pytest.mark.parametrize(
    ("path", "number"), [(path, number) for path, bodies in PATHS.items() for number in range(len(bodies))]
)
def test_unknown_fields_are_refused_by_name_at_every_depth(http, path, number):
    body = PATHS[path][number]
    accepted = http.post(path, json=body)
    lacks = ("classif", "the chat template")  # what the model lacks is found after all fields are read
    assert accepted.status_code == 200 or any(text in accepted.text for text in lacks), accepted.text
    for given in objects(body):
        for name in ("colour", "user") if given is not body else ("colour",):
            given[name] = 1
            found = http.post(path, json=body)
            del given[name]
            assert found.status_code == 400, (given, found.text)
            assert name in found.json()["error"]["message"], (given, found.text)


def test_fields_of_messages_that_clients_send_back(http):
    """Answers of the `openai` package hold fields without a value; fields that the chat template reads are known."""
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    messages = [{"role": "assistant", "content": "a", **empty}, *MESSAGES]
    assert http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).status_code == 200
    check_messages([{"role": "user", "content": "a", "mood": "glad"}], "{{ message.mood }}")
    with pytest.raises(InputError, match="unknown field 'mood' of messages"):
        check_messages([{"role": "user", "content": "a", "mood": "glad"}], "{{ message.moods }}")


def test_no_error_has_a_path_of_the_server(http):
    """An unknown path names itself; errors about the model do not have its folder."""
    for path, body in ("/classify", {"json": {"input": "a"}}), ("/v1/audio/transcriptions", {"files": {"file": b"x"}}):
        assert "tiny-vl" not in http.post(path, **body).text
    assert "GET '/nothing'; see /openapi.json" in http.get("/nothing").text
    assert "GET '/v1/chat/completions'; see /openapi.json" in http.get("/v1/chat/completions").text


def test_a_message_of_many_unknown_fields_is_refused_at_once():
    message = {"role": "user", "content": "a"} | {f"field{i}": 1 for i in range(100_000)}
    began = time.monotonic()
    with pytest.raises(InputError, match="unknown field 'field0' of messages"):
        check_messages([message], "{{ messages }}" * 500)
    assert time.monotonic() - began < 10
