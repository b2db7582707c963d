"""Conversations of several turns as coding agents send them: Codex with its whole history, the Agents SDK with its items.

The shapes are those of Codex's `ResponsesApiRequest` and `ResponseItem`, and of the `openai` package's types.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from http_server import error, image_url, listening, make_server, saying
from openai.types.responses import Response
from sensorium.callers.errors import ConfigError, InputError
from sensorium.server import reasoning_signer
from sensorium.server.config import ServerConfig
from sensorium.server.parsers.reasoning import FORMATS
from sensorium.server.protocol.response_input import read_items
from sensorium.server.protocol.responses import ResponsesBody
from sensorium.server.protocol.tools import as_arguments
from sensorium.server.reasoning_signer import ReasoningSigner, stored_signer

CALL = {"type": "function_call", "call_id": "x", "name": "look", "arguments": "{}"}
SEALED = "reasoning.encrypted_content"
SIGNER = ReasoningSigner(b"k" * 32)
GRAMMAR = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " filename LF add_line+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
TOOLS = [
    {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False, "parameters": {
        "type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}},
        "required": ["command"], "additionalProperties": False}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.",
     "format": {"type": "grammar", "syntax": "lark", "definition": GRAMMAR}},
]  # fmt: skip
PATCH = "*** Begin Patch\n*** Add File: a.py\n+print(1)\n*** End Patch\n"
THOUGHT = 'I must "edit"\n\ta.py — first.'
CODEX = {
    "model": "tiny-vl",
    "instructions": "You are a coding agent.",
    "tools": TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": [SEALED],
    "service_tier": "priority",
    "prompt_cache_key": "0199-thread",
    "text": {"verbosity": "low"},
}
START = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>all</permissions>"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<cwd>/tmp</cwd>"}]},
    {"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "Add a.py"},
        {"type": "input_image", "image_url": image_url(), "detail": "original"},
    ]},
]  # fmt: skip


def call(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ANSWERS = [
    f"<think>{THOUGHT}</think>" + call("shell", '{"command": ["ls"]}'),
    "<think>Now the patch.</think>" + call("apply_patch", as_arguments(PATCH)),
    "<think>Done.</think>I added a.py.",
]
OUTPUTS = {
    "shell": {"output": [
        {"type": "input_text", "text": "README.md"},
        {"type": "input_image", "image_url": image_url(), "detail": "high"},
    ]},
    "apply_patch": {"name": "apply_patch", "output": "Success"},
}  # fmt: skip


@pytest.fixture
def agent(tools, monkeypatch):
    """Return the client, and the messages that each request gives the engine. The model cannot call tools; answers are set."""
    client, server = tools
    form = replace(server.answer_format, reasoning=FORMATS["think"])
    monkeypatch.setitem(server.__dict__, "answer_format", form)
    generate, seen = server.llm.generate, []

    def answering(messages, params, request_id, kind, priority, **options):
        seen.append(messages)
        turn = len([one for one in messages if one["role"] == "tool"])
        return saying(generate, ANSWERS[turn])(messages, params, request_id, kind, priority, **options)

    monkeypatch.setattr(server.llm, "generate", answering)
    return client, seen


def sent_back(item, with_text):
    """Return an item of an answer as Codex keeps it: without ids, and its reasoning with or without its text."""
    kept = {key: value for key, value in item.items() if key not in ("id", "status")}
    return {**kept, "content": None} if item["type"] == "reasoning" and not with_text else kept


@pytest.mark.parametrize("with_text", [False, True])
def test_codex_replays_its_history(agent, with_text):
    client, seen = agent
    history, kinds = [*START], []
    for _ in ANSWERS:
        events = list(client.responses.create(input=history, extra_body={"client_metadata": {"x-codex": "1"}}, **CODEX))
        assert events[-1].type == "response.completed"
        Response.model_validate(events[-1].response.to_dict(), strict=True)
        items = [event.item.to_dict() for event in events if event.type == "response.output_item.done"]
        kinds += [item["type"] for item in items]
        for item in items:
            history.append(sent_back(item, with_text))
            if item["type"].endswith("_call"):
                history.append({"type": f"{item['type']}_output", "call_id": item["call_id"], **OUTPUTS[item["name"]]})
    assert kinds == ["reasoning", "function_call", "reasoning", "custom_tool_call", "reasoning", "message"]
    assert [item["encrypted_content"] is not None for item in history if item["type"] == "reasoning"] == [True] * 3

    roles = [message["role"] for message in seen[-1]]
    assert roles == ["system", "developer", "user", "user", "assistant", "tool", "assistant", "tool"]
    first, second = (message for message in seen[-1] if message["role"] == "assistant")
    assert (first["reasoning_content"], second["reasoning_content"]) == (THOUGHT, "Now the patch.")
    assert [one["function"]["name"] for one in (first["tool_calls"][0], second["tool_calls"][0])] == ["shell", "apply_patch"]
    assert second["tool_calls"][0]["function"]["arguments"] == as_arguments(PATCH)
    assert [part["type"] for part in seen[-1][5]["content"]] == ["input_text", "input_image"]
    last = client.responses.create(**{**CODEX, "stream": False}, input=[*history, {"role": "user", "content": "thanks"}])
    assert last.output_text == "I added a.py."
    assert seen[-1][-2]["content"][0]["text"] == "I added a.py."
    assert seen[-1][-2]["reasoning_content"] == "Done."


def test_the_agents_sdk_sends_its_items_back(agent):
    """It sends whole items with ids and statuses, and drops no field."""
    client, seen = agent
    fields = {
        "tools": TOOLS,
        "model": "tiny-vl",
        "store": True,
        "truncation": "auto",
        "include": [SEALED],
        "metadata": {"a": "b"},
    }
    history = [{"role": "user", "content": "Add a.py"}]
    for _ in ANSWERS:
        found = client.responses.create(input=history, **fields)
        assert (found.truncation, found.service_tier, found.to_dict()["store"]) == ("auto", "default", False)
        for item in found.output:
            history.append(item.to_dict())
            if item.type.endswith("_call"):
                history.append({"type": f"{item.type}_output", "call_id": item.call_id, "output": "ok", "status": "completed"})
    assert [item["type"] for item in history[1:] if not item["type"].endswith("_output")] == [
        *("reasoning", "function_call", "reasoning", "custom_tool_call", "reasoning", "message")
    ]
    assert [message["reasoning_content"] for message in seen[-1] if message["role"] == "assistant"] == [
        THOUGHT,
        "Now the patch.",
    ]


def test_reasoning_is_signed_only_on_request(agent):
    client, _ = agent
    fields = {key: value for key, value in CODEX.items() if key not in ("include", "stream")}
    found = client.responses.create(input="hello", **fields)
    assert (found.output[0].type, found.output[0].encrypted_content) == ("reasoning", None)


def reasoning(signed, **fields):
    return {"type": "reasoning", "summary": [], "encrypted_content": signed, **fields}


@pytest.mark.parametrize("text", ["", "a", THOUGHT, "\U0001f600\u0000\ud800", "x" * 100_000])
def test_signed_reasoning_is_read_back(text):
    signed = SIGNER.sign(text)
    assert SIGNER.verify(signed, "input[0]") == text
    messages, _ = read_items([reasoning(signed), {"role": "assistant", "content": "a"}], SIGNER)
    expected = {"reasoning_content": text} if text else {}
    assert messages == [{"role": "assistant", "content": "a", **expected}]


def test_empty_reasoning_is_left_out():
    for item in (reasoning(None), reasoning(""), reasoning(None, content=None), reasoning(None, content=[])):
        assert read_items([item, {"role": "user", "content": "a"}], SIGNER)[0] == [{"role": "user", "content": "a"}]
    summary = [{"type": "summary_text", "text": "short"}]
    assert read_items([reasoning(None, summary=summary)], SIGNER)[0][0]["reasoning_content"] == "short"


def test_reasoning_of_others_is_read_from_its_text():
    for fields in (
        {"content": [{"type": "reasoning_text", "text": "plan"}]},
        {"summary": [{"type": "summary_text", "text": "plan"}]},
    ):
        for signed in ("gAAAAABo", SIGNER.sign("a")[:-4], ReasoningSigner().sign("b")):
            assert read_items([reasoning(signed, **fields)], SIGNER)[0][0]["reasoning_content"] == "plan"


def test_reasoning_items_in_a_row_are_one_thought():
    items = [reasoning(SIGNER.sign("a")), reasoning(SIGNER.sign("b")), {"role": "assistant", "content": "c"}]
    assert read_items(items, SIGNER)[0] == [{"role": "assistant", "reasoning_content": "a\nb", "content": "c"}]
    message = read_items([items[0], CALL, CALL], SIGNER)[0][0]
    assert (message["reasoning_content"], len(message["tool_calls"])) == ("a", 2)


@pytest.mark.parametrize("item", [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a" * 20}]}, CALL])
def test_many_items_in_a_row_are_joined_once(item):
    """Joining them one by one copies all that is before each, 50 GB here."""
    (message,), _ = read_items([item] * 50_000, SIGNER)
    assert len(message.get("tool_calls") or message["reasoning_content"].split("\n")) == 50_000


def test_reasoning_of_others_is_refused():
    signed = SIGNER.sign("secret plan")
    changed = [
        signed[:-1] + ("A" if signed[-1] != "A" else "B"),
        signed[:30],
        signed + "AAAA",
        signed + "=",
        signed[:-4] + "é===",
    ]
    changed += [signed[:20] + ("x" if signed[20] != "x" else "y") + signed[21:], "signed-1."]
    for one in changed:
        with pytest.raises(InputError, match=r"input\[1\].encrypted_content was changed") as caught:
            read_items([{"role": "user", "content": "a"}, reasoning(one)], SIGNER)
        assert caught.value.info.param == "input[1]"
    for one in ("gAAAAABo", "a", "signed-2."):
        with pytest.raises(InputError, match="not of this server") as caught:
            read_items([reasoning(one)], SIGNER)
        assert (caught.value.info.code, caught.value.info.param) == ("invalid_input", "input[0]")
    with pytest.raises(InputError, match="a server with another key"):
        read_items([reasoning(signed)], ReasoningSigner())
    with pytest.raises(InputError, match="encrypted_content is 3; give a string"):
        read_items([reasoning(3)], SIGNER)


def test_the_key_is_kept_in_the_folder(tmp_path, monkeypatch):
    signed = stored_signer(tmp_path).sign("a")
    assert stored_signer(tmp_path).verify(signed, "input[0]") == "a"
    assert (tmp_path / "reasoning.key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["reasoning.key"]
    monkeypatch.setattr(reasoning_signer, "_LONGEST_WRITE", 0.05)
    (tmp_path / "reasoning.key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="must have 32 bytes, not 5"):
        stored_signer(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        stored_signer(tmp_path / "none")


def test_processes_share_a_key_on_file_systems_without_hard_links(tmp_path, monkeypatch):
    """All of them see that there is no key, and write one. The first one's counts, also while it is being written."""

    def link(part, path):
        raise OSError("no hard links")

    monkeypatch.setattr(reasoning_signer.os, "link", link)
    monkeypatch.setattr(reasoning_signer.Path, "exists", lambda path: False)
    signed = stored_signer(tmp_path).sign("a")
    assert stored_signer(tmp_path).verify(signed, "input[0]") == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["reasoning.key"]
    key = (tmp_path / "reasoning.key").read_bytes()
    (tmp_path / "reasoning.key").write_bytes(key[:5])
    monkeypatch.setattr(reasoning_signer.time, "sleep", lambda seconds: (tmp_path / "reasoning.key").write_bytes(key))
    assert stored_signer(tmp_path).verify(signed, "input[0]") == "a"


def test_turns_that_truncation_may_leave_out():
    def starts(count, **fields):
        items = [{"role": role, "content": "a"} for _ in range(count) for role in ("user", "assistant")]
        return ResponsesBody.model_validate({"input": items, "truncation": "auto", **fields}).starts

    assert starts(1) == [0]
    assert starts(2) == [0, 2]
    assert starts(5) == [0, 2, 4, 8]
    assert starts(20) == [0, 2, 4, 8, 16, 32, 38]
    assert starts(5, truncation="disabled") == starts(5, truncation=None) == [0]
    assert len(starts(5000)) < 16


def test_truncation_leaves_out_the_oldest_turns(http, tiny):
    """Messages of the system stay. Without truncation, or if the last turn is too long, the input is refused."""
    turns = [{"role": "system", "content": "Be brief."}]
    for number in range(6):
        turns += [{"role": "user", "content": f"{number} " + "hello " * 60}, {"role": "assistant", "content": "ok"}]
    turns.append({"role": "user", "content": "last"})
    fields = {"model": "tiny-vl", "input": turns, "temperature": 0, "max_output_tokens": 4}
    long = error(http.post("/v1/responses", json=fields))
    assert (long["code"], long["param"]) == ("too_long", "input")
    found = http.post("/v1/responses", json={**fields, "truncation": "auto"})
    assert found.status_code == 200, found.text
    for start in (1, 3, 5, 9, 13):
        short = http.post("/v1/responses", json={**fields, "input": [turns[0], *turns[start:]]})
        if short.status_code == 200:
            break
    used = "usage", "input_tokens"
    assert found.json()[used[0]][used[1]] == short.json()[used[0]][used[1]]
    assert found.json()["output"][0]["content"] == short.json()["output"][0]["content"]
    events = http.post("/v1/responses", json={**fields, "truncation": "auto", "stream": True})
    assert "response.completed" in events.text or "response.incomplete" in events.text
    broken = {"role": "user", "content": [{"type": "input_image", "image_url": "data:,x"}]}
    refused = error(http.post("/v1/responses", json={**fields, "truncation": "auto", "input": [*turns, broken]}))
    assert refused["param"] == f"input[{len(turns)}].content[0]"
    last = {"role": "user", "content": "hello " * 4000}
    refused = error(http.post("/v1/responses", json={**fields, "truncation": "auto", "input": [*turns, last]}))
    assert refused["code"] == "too_long"


def test_a_restarted_server_reads_its_reasoning(tmp_path):
    """With data_dir, the key of the signer is kept; without it, another server refuses."""
    from http_server import TINY
    from sensorium.server.store import Store

    config = ServerConfig(data_dir=str(tmp_path))
    server = make_server(TINY, "tiny-vl", config, max_model_len=256, warm_up=False)
    server.services.store = Store(config)
    with server.llm.llm, listening(server) as url:
        import httpx

        for signer, status in (stored_signer(tmp_path), 200), (SIGNER, 400):
            items = [reasoning(signer.sign("a")), {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
            fields = {"input": items, "max_output_tokens": 1}
            assert httpx.post(f"{url}/v1/responses", json=fields, timeout=240).status_code == status
    server.services.store.close()
