"""Tools of the type custom, over chat and responses, whole and streamed, with the `openai` package."""

from __future__ import annotations

import json
import re

import pytest
from http_server import error, saying
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from sensorium.callers.errors import InputError
from sensorium.server.custom_calls import CustomCall, CustomCallParser
from sensorium.server.parsers.pieces import Arguments, Call, Content
from sensorium.server.protocol.chat import ChatBody
from sensorium.server.protocol.tools import as_arguments, as_input, as_template_messages, read_tools

EVENT = TypeAdapter(ResponseStreamEvent)
LARK = 'start: begin line+ end\nbegin: "<<" LF\nline: "+" /[ab]{1,3}/ LF\nend: ">>"\n\n%import common.LF\n'
PATCH = {"type": "custom", "name": "patch", "description": "Edits files."}
LARK_PATCH = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
REGEX_PATCH = {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}-[0-9]{2}"}}
LOOK = {"type": "function", "name": "look", "strict": False, "parameters": {"type": "object", "properties": {}}}
PLAIN = {"model": "tiny-vl", "input": "hello", "temperature": 0.0, "max_output_tokens": 60}
PATTERNS = {"lark": r"<<\n(\+[ab]{1,3}\n)+>>", "regex": r"[0-9]{3}-[0-9]{2}"}


def in_chat(tool):
    """Return a tool of /v1/responses as /v1/chat/completions takes it."""
    custom = {key: value for key, value in tool.items() if key != "type"}
    if "format" in custom:
        custom["format"] = {"type": "grammar", "grammar": {k: v for k, v in tool["format"].items() if k != "type"}}
    return {"type": "custom", "custom": custom}


def refused_tools(body):
    """Read the tools and the choice among them as an endpoint does."""
    return body.forced_tool, body.offered


@pytest.mark.parametrize("tool", [LARK_PATCH, REGEX_PATCH])
@pytest.mark.parametrize("choice", [{"type": "custom", "name": "patch"}, "required"])
def test_the_grammar_of_a_required_tool_holds(tools, tool, choice):
    client, _ = tools
    tool = tool if choice == "required" else {**tool, "allowed_callers": ["direct"], "defer_loading": False}
    fields = {**PLAIN, "tools": [tool], "tool_choice": choice, "temperature": 1.0}
    found = client.responses.create(**fields, extra_body={"seed": 3})
    (call,) = found.output
    assert (call.type, call.name) == ("custom_tool_call", "patch")
    pattern = PATTERNS[tool["format"]["syntax"]]
    cut = found.status == "incomplete"
    assert re.fullmatch(pattern, call.input) or (cut and call.input.startswith("<<\n")), call.input
    assert cut or call.status == "completed"


def test_events_of_a_custom_tool(tools):
    client, _ = tools
    fields = {**PLAIN, "tools": [REGEX_PATCH], "tool_choice": {"type": "custom", "name": "patch"}}
    (call,) = client.responses.create(**fields).output
    events = list(client.responses.create(**fields, stream=True))
    for event in events:
        EVENT.validate_python(event.to_dict())
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["custom_tool_call_input.done", "output_item.done", "completed"]
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert len(deltas) > 1  # the text streams: it is the whole answer
    assert "".join(deltas) == events[-3].input == events[-2].item.input == call.input
    assert (events[2].item.type, events[2].item.input, events[2].item.name) == ("custom_tool_call", "", "patch")
    assert events[2].item.call_id == events[-2].item.call_id
    Response.model_validate(events[-1].response.to_dict(), strict=True)
    assert events[-1].response.tools[0].format.syntax == "regex"


def test_a_required_tool_without_a_grammar_gets_text(tools):
    client, _ = tools
    for choice in ({"type": "custom", "name": "patch"}, "required"):
        fields = {**PLAIN, "tools": [PATCH], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 40}
        for call in client.responses.create(**fields).output:
            assert call.type in ("custom_tool_call", "message")
            assert not getattr(call, "input", "").startswith('{"input"')


def test_chat_has_custom_calls(tools):
    client, _ = tools
    fields = {"model": "tiny-vl", "messages": [{"role": "user", "content": "hello"}], "temperature": 0, "max_tokens": 60}
    fields |= {"tools": [in_chat(REGEX_PATCH)], "tool_choice": {"type": "custom", "custom": {"name": "patch"}}}
    found = client.chat.completions.create(**fields)
    ChatCompletion.model_validate(found.to_dict(), strict=True)
    (choice,) = found.choices
    (call,) = choice.message.tool_calls
    assert (call.type, call.custom.name, choice.finish_reason) == ("custom", "patch", "tool_calls")
    assert re.fullmatch(PATTERNS["regex"], call.custom.input)
    chunks = [chunk.to_dict() for chunk in client.chat.completions.create(**fields, stream=True)]
    calls = [one for chunk in chunks for one in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert (calls[0]["type"], calls[0]["custom"]["name"]) == ("custom", "patch")
    assert {one["index"] for one in calls} == {0}
    assert "".join(one["custom"]["input"] for one in calls) == call.custom.input


def test_a_model_chooses_between_a_function_and_a_custom_tool(tools, monkeypatch):
    """The model cannot call tools, so the engine's outputs are replaced. The template sees functions only."""
    client, server = tools
    text = 'line "1"\n\tline 2 é\n'
    answer = f'Wait.<tool_call>\n{{"name": "patch", "arguments": {as_arguments(text)}}}\n</tool_call>'
    answer += '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    seen = []
    say = saying(server.llm.generate, answer)

    def generate(messages, params, request_id, kind, priority, **options):
        seen.append((messages, options["tools"]))
        return say(messages, params, request_id, kind, priority, **options)

    monkeypatch.setattr(server.llm, "generate", generate)
    history = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": text},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"role": "user", "content": "again"},
    ]
    fields = {**PLAIN, "input": history, "tools": [LOOK, LARK_PATCH], "max_output_tokens": 2}
    found = client.responses.create(**fields)
    assert [item.type for item in found.output] == ["message", "custom_tool_call", "function_call"]
    assert (found.output[1].input, found.output[2].arguments) == (text, "{}")
    events = list(client.responses.create(**fields, stream=True))
    assert [item.type for item in events[-1].response.output] == ["message", "custom_tool_call", "function_call"]
    assert [event.input for event in events if event.type == "response.custom_tool_call_input.done"] == [text]
    (call, output, _), shown = seen[0]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"input": text}
    assert (output["role"], output["tool_call_id"], output["content"]) == ("tool", "c1", "done")
    assert [tool["type"] for tool in shown] == ["function", "function"]
    patch = shown[1]["function"]
    assert patch["parameters"]["required"] == ["input"]
    assert LARK in patch["description"]

    messages = [
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "patch", "input": text}}]}
    ]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "done"}, {"role": "user", "content": "again"}]
    chat = {"model": "tiny-vl", "messages": messages, "tools": [in_chat(LARK_PATCH)], "temperature": 0, "max_tokens": 2}
    (choice,) = client.chat.completions.create(**chat).choices
    assert choice.message.tool_calls[0].custom.input == text
    assert seen[-1][0][0] == {**call, "role": "assistant"}


def test_allowed_tools(tools):
    client, _ = tools
    names = [{"type": "custom", "name": "patch"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": names}
    fields = {**PLAIN, "tools": [LOOK, REGEX_PATCH], "tool_choice": choice}
    found = client.responses.create(**fields)
    (call,) = found.output
    assert re.fullmatch(PATTERNS["regex"], call.input)
    Response.model_validate(found.to_dict(), strict=True)
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    chat = {"messages": [{"role": "user", "content": "a"}], "tools": [in_chat(REGEX_PATCH)], "temperature": 0}
    chat |= {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}, "model": "tiny-vl", "max_tokens": 60}
    (choice,) = client.chat.completions.create(**chat).choices
    assert re.fullmatch(PATTERNS["regex"], choice.message.tool_calls[0].custom.input)
    look = {"type": "function", "function": {"name": "look", "parameters": {}}}
    both = [in_chat(PATCH), look]
    several = [{"type": "function", "function": {"name": "look"}}]
    body = {"messages": chat["messages"], "tools": both}
    for mode, forced in ("auto", None), ("required", ""):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": several}}
        found = ChatBody.model_validate({**body, "tool_choice": choice})
        assert (list(found.offered), found.forced_tool) == (["look"], forced)
    for wrong in (
        {"type": "allowed_tools"},
        {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": several}},
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "no"}}]},
        },
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["look"]}},
        {"type": "custom", "custom": {"name": "no"}},
        {"type": "custom", "name": "patch"},
    ):
        with pytest.raises(InputError, match="tool_choice"):
            refused_tools(ChatBody.model_validate({**body, "tool_choice": wrong}))


@pytest.mark.parametrize(
    "fields",
    [
        {"format": {"type": "grammar", "syntax": "ebnf", "definition": "a"}},
        {"format": {"type": "grammar", "syntax": "lark"}},
        {"format": {"type": "xml"}},
        {"format": "text"},
        {"colour": 1},
        {"name": ""},
        {"async": True},
        {"defer_loading": True},
    ],
)
def test_wrong_custom_tools(http, fields):
    refused = error(http.post("/v1/responses", json={**PLAIN, "tools": [{**PATCH, **fields}], "tool_choice": "none"}))
    assert (refused["param"], "tools[0]" in refused["message"]) == ("tools", True)


def test_two_tools_of_one_name(http):
    refused = error(http.post("/v1/responses", json={**PLAIN, "tools": [PATCH, PATCH], "tool_choice": "none"}))
    assert (refused["param"], refused["message"]) == (
        "tools",
        f"tools[1] has the name '{PATCH['name']}' of another tool; rename one",
    )


def test_a_grammar_that_cannot_be_compiled(http):
    tool = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: missing"}}
    fields = {**PLAIN, "tools": [tool], "tool_choice": {"type": "custom", "name": "patch"}}
    refused = error(http.post("/v1/responses", json=fields))
    assert refused["param"] == "tools", refused


def test_text_in_arguments_is_kept():
    for text in ("", "a", '"}', "\\", 'a "b"\n\té\u2028', '{"input": "a"}'):
        assert as_input(as_arguments(text)) == text
    cut_off = {
        r'{"input": "a\nb': "a\nb",
        r'{"input": "x"': "x",
        r'{"input": "a\\': "a\\",
        **dict.fromkeys((r'{"input": "a' + end for end in ("\\", r"\u", r"\u0", r"\u00e", r"\ud83d", r"\ud83d\ude0")), "a"),
        r'{"input": "a\\u00': r"a\u00",
        r'{"input": "\ud83da"}': "\ufffda",
        **dict.fromkeys(('{"inp', '{"input"', '{"input": ', '{"input": "', "{"), ""),
    }
    assert {text: as_input(text) for text in cut_off} == cut_off
    for other in ("plain", '{"text": "a"}', "[1]", '{"input": 3}'):
        assert as_input(other) == other
    tools = read_tools([{"type": "custom", "custom": {"name": "a", "format": {"type": "text"}}}])
    assert (tools[0].is_custom, tools[0].grammar) == (True, None)
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": None}]
    assert as_template_messages(plain) == plain
    with pytest.raises(InputError, match=r"messages\[0\]\.tool_calls\[0\]"):
        as_template_messages([{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "a"}}]}])


def test_pieces_of_a_custom_call():
    class Pieces:
        in_reasoning = False

        def push(self, text):
            return self.pieces

        def finish(self):
            return []

    source = Pieces()
    parser = CustomCallParser(source, ["a"], is_plain=False)
    source.pieces = [Call("b", "{"), Arguments("}"), Call("a", '{"input": "x'), Arguments('y"')]
    assert parser.push("") == [Call("b", "{"), Arguments("}")]
    source.pieces = [Arguments("}"), Content("z")]
    assert parser.push("") == [CustomCall("a", "xy"), Content("z")]
    source.pieces = [Call("a", '{"input": "w"}')]
    assert parser.push("") == []
    assert parser.finish() == [CustomCall("a", "w")]
