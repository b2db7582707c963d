"""Reasoning and tool calls of models whose markers are special tokens, over HTTP. A grammar makes the model write them."""

from __future__ import annotations

import json
import logging
import shutil

import httpx
import pytest
from http_server import TINY, listening, make_server, serving

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
HARMONY_TEMPLATE = """
{%- for message in messages -%}
{%- if message.role == "tool" -%}
<|start|>functions.look to=assistant<|channel|>commentary<|message|>{{ message.content }}<|end|>
{%- elif message.tool_calls -%}
{%- set call = message.tool_calls[0].function -%}
{%- if message.content and message.thinking -%}{{ raise_exception("content and thinking") }}{%- endif -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|><|start|>assistant to=functions.
{{- call.name }}<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>
{%- else -%}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""
GEMMA = ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
GEMMA_TEMPLATE = """
{%- for message in messages -%}
<|turn>{{ message.role }}
{% if message.reasoning_content -%}<|channel>thought
{{ message.reasoning_content }}<channel|>{%- endif -%}
{%- for call in message.tool_calls or () -%}<|tool_call>call:{{ call.function.name }}{
{%- for key, value in call.function.arguments | dictsort -%}{{ key }}:<|"|>{{ value }}<|"|>{%- endfor -%}
}<tool_call|>{%- endfor -%}
{{ message.content }}<turn|>
{% endfor -%}
{%- if tools -%}{{ tools | tojson }}{%- endif -%}
{%- if add_generation_prompt -%}<|turn>model
{% if not enable_thinking | default(true) -%}<|channel>thought
<channel|>{%- endif -%}{%- endif -%}
"""
LOOK = {
    "name": "look",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}},
}
THOUGHT = '<|channel|> "analysis" <|message|> "Need 2+2." <|end|> <|start|> "assistant"'
HARMONY_ANSWER = f'start: {THOUGHT} <|channel|> "final" <|message|> "4"'
HARMONY_CALL = (
    f'start: {THOUGHT} <|channel|> "commentary" <|message|> "I look." <|end|> <|start|> "assistant" '
    '<|channel|> "commentary to=functions.look " <|constrain|> "json" <|message|> "{\\"place\\": \\"here\\", \\"days\\": 3}"'
)
GEMMA_ANSWER = 'start: <|channel> "thought\\nNeed 2+2.\\n" <channel|> "4"'
GEMMA_CALL = (
    'start: <|channel> "thought\\nNeed 2+2.\\n" <channel|> "I look." '
    '<|tool_call> "call:look{days:3,place:" QUOTE "here" QUOTE "}" <tool_call|>'
)


def checkpoint(folder, tokens, template):
    """Write tiny-vl with other special tokens in the place of its last tokens."""
    shutil.copytree(TINY, folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    vocab = state["model"]["vocab"]
    ids = sorted(vocab.values())[-len(tokens) :]
    gone = {name for name, number in vocab.items() if number in ids}
    state["model"]["vocab"] = {name: number for name, number in vocab.items() if name not in gone}
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in state["model"]["merges"]]
    state["model"]["merges"] = [merge for merge in merges if gone.isdisjoint([*merge, "".join(merge)])]
    like = next(token for token in state["added_tokens"] if token["special"])
    state["added_tokens"] += [{**like, "id": number, "content": text} for number, text in zip(ids, tokens, strict=True)]
    state["added_tokens"].sort(key=lambda token: token["id"])
    (folder / "tokenizer.json").write_text(json.dumps(state))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = template.strip()
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two models: {"harmony" or "gemma": (client, the grammars of an answer and of a call)}."""
    folder = tmp_path_factory.mktemp("formats")
    harmony = checkpoint(folder / "harmony", HARMONY, HARMONY_TEMPLATE)
    gemma = checkpoint(folder / "gemma", GEMMA, GEMMA_TEMPLATE)
    options = {"max_model_len": 1024}
    with serving(harmony, "m", **options) as (first, _), serving(gemma, "m", **options) as (second, server):
        quote = server.engine.tokenizer.specials['<|"|>']
        call = GEMMA_CALL.replace("QUOTE", f"<[{quote}]>")
        with httpx.Client(base_url=first, timeout=240) as one, httpx.Client(base_url=second, timeout=240) as two:
            yield {"harmony": (one, HARMONY_ANSWER, HARMONY_CALL), "gemma": (two, GEMMA_ANSWER, call)}


FIELDS = {"model": "m", "temperature": 0.0, "max_tokens": 200}
QUESTION = [{"role": "user", "content": "2+2?"}]


def chat(client, grammar=None, **fields):
    extra = {} if grammar is None else {"structured_outputs": {"grammar": grammar}}
    found = client.post("/v1/chat/completions", json={"messages": QUESTION, **FIELDS, **extra, **fields})
    assert found.status_code == 200, found.text
    return found


def streamed(response):
    """Return (reasoning, content, calls) of the chunks of a chat."""
    lines = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    calls = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
    return "".join(one.get("reasoning_content", "") for one in deltas), "".join(one.get("content", "") for one in deltas), calls


@pytest.mark.parametrize("name", ["harmony", "gemma"])
def test_reasoning_is_no_content_of_a_chat(servers, name):
    client, grammar, _ = servers[name]
    message = chat(client, grammar).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Need 2+2.", "4")
    assert streamed(chat(client, grammar, stream=True)) == ("Need 2+2.", "4", [])
    hidden = chat(client, grammar, include_reasoning=False).json()["choices"][0]["message"]
    assert hidden["content"] == "4"
    assert "reasoning_content" not in hidden


@pytest.mark.parametrize("name", ["harmony", "gemma"])
def test_calls_of_a_chat(servers, name):
    client, _, grammar = servers[name]
    tools = {"tools": [{"type": "function", "function": LOOK}]}
    choice = chat(client, grammar, **tools).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Need 2+2.", "I look.")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"place": "here", "days": 3})
    reasoning, content, (part,) = streamed(chat(client, grammar, stream=True, **tools))
    assert (reasoning, content, part) == ("Need 2+2.", "I look.", call["function"])
    history = [*QUESTION, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "a tree"}]
    assert chat(client, messages=history, max_tokens=1, **tools).json()["choices"]


@pytest.mark.parametrize("name", ["harmony", "gemma"])
def test_reasoning_and_calls_are_items_of_a_response(servers, name):
    client, _, grammar = servers[name]
    fields = {
        "model": "m",
        "input": "2+2?",
        "temperature": 0.0,
        "max_output_tokens": 200,
        "tools": [{"type": "function", **LOOK}],
    }
    fields["structured_outputs"] = {"grammar": grammar}
    found = client.post("/v1/responses", json=fields).json()
    reasoning, message, call = found["output"]
    assert reasoning["content"][0]["text"] == "Need 2+2."
    assert message["content"][0]["text"] == "I look."
    assert (call["name"], json.loads(call["arguments"])) == ("look", {"place": "here", "days": 3})
    assert 0 < found["usage"]["output_tokens_details"]["reasoning_tokens"] < found["usage"]["output_tokens"]
    text = client.post("/v1/responses", json={**fields, "stream": True}).text
    events = [json.loads(line.partition("data: ")[2]) for line in text.split("\n\n") if "data: {" in line]
    kinds = ("reasoning_text", "output_text", "function_call_arguments")
    deltas = {kind: "".join(one["delta"] for one in events if one["type"] == f"response.{kind}.delta") for kind in kinds}
    assert deltas == {"reasoning_text": "Need 2+2.", "output_text": "I look.", "function_call_arguments": call["arguments"]}
    conversation = [{"role": "user", "content": "2+2?"}, *found["output"]]
    conversation.append({"type": "function_call_output", "call_id": call["call_id"], "output": "a tree"})
    again = client.post("/v1/responses", json={**fields, "input": conversation})
    assert again.status_code == 200, again.text


@pytest.mark.parametrize("name", ["harmony", "gemma"])
def test_forced_calls_and_formats_need_no_markers(servers, name):
    client = servers[name][0]
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    message = chat(client, response_format=form).json()["choices"][0]["message"]
    assert json.loads(message["content"]) == {"a": 1}
    assert "reasoning_content" not in message
    tools = {"tools": [{"type": "function", "function": {"name": "look", "parameters": schema}}], "parallel_tool_calls": False}
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        (call,) = chat(client, **tools, tool_choice=choice).json()["choices"][0]["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"a": 1})


def test_gemma_without_thinking(servers):
    grammar = 'start: "4"'
    message = chat(servers["gemma"][0], grammar, chat_template_kwargs={"enable_thinking": False}).json()["choices"][0][
        "message"
    ]
    assert message["content"] == "4"
    assert "reasoning_content" not in message


@pytest.mark.parametrize(
    ("template", "reasoning", "warns"),
    [
        ("{{ messages[0].content }}{{ messages[0].reasoning_content }}", "auto", True),
        ("{{ messages[0].content }}{% if enable_thinking %}x{% endif %}", "none", False),
        ("{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}", "auto", False),
        ("{{ messages[0].content }}", "auto", False),
    ],
)
def test_a_model_that_reasons_in_an_unknown_format_is_reported(template, reasoning, warns, caplog):
    from sensorium.server.config import ServerConfig

    server = make_server(TINY, "m", ServerConfig(reasoning_parser=reasoning), chat_template=template, warm_up=False)
    with caplog.at_level(logging.WARNING), server.llm.llm, listening(server):
        pass
    assert [("--reasoning-parser" in record.message) for record in caplog.records if "reasons" in record.message] == [
        True
    ] * warns
