"""Answers with slips that models make, and answers that a client can force: what the parsers make of them."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.engine.sampling_params import SamplingParams
from sensorium.server.endpoints.chat import Chat
from sensorium.server.parsers.answer import AnswerParser, AnswerRules, answer_format
from sensorium.server.parsers.calls import ForcedCalls
from sensorium.server.parsers.pieces import Arguments, Call, Content, Reasoning
from sensorium.server.parsers.values import typed_value
from sensorium.server.protocol.chat import ChatBody

CITY = {"type": "object"}
FUNCTIONS = {
    "f": {
        "type": "object",
        "properties": {
            "city": {"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]},
            "days": {"type": "number"},
            "any": {},
            "list": {"type": "array"},
            "code": {"type": "string"},
        },
        "$defs": {"City": CITY},
    },
    "3d": {"type": "object", "properties": {}},
    "get-weather": {"type": "object", "properties": {}},
}


def parse(chunks, calls, reasoning="none", prompt="", **options):
    parser = AnswerParser(answer_format("", (), calls, reasoning), prompt, FUNCTIONS, AnswerRules(**options))
    merged = []
    for piece in [*(piece for chunk in chunks for piece in parser.push(chunk)), *parser.finish()]:
        if merged and isinstance(piece, Content | Reasoning) and type(merged[-1]) is type(piece):
            merged[-1] = type(piece)(merged[-1].text + piece.text)
        elif isinstance(piece, Arguments):
            merged[-1] = Call(merged[-1].name, merged[-1].arguments + piece.text)
        else:
            merged.append(piece)
    return merged


def whole_and_streamed(text, *args, **options):
    pieces = parse([text], *args, **options)
    assert parse(text, *args, **options) == pieces
    return pieces


def arguments(pieces):
    (call,) = pieces
    json.dumps(json.loads(call.arguments), ensure_ascii=False, allow_nan=False).encode()
    assert not any(word in call.arguments for word in (": NaN", "Infinity,", "Infinity}"))
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("calls", "text", "value"),
    [
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"any": "a\ud83d"}}</tool_call>', "a\ufffd"),
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"any": "\ud83d\ude00"}}</tool_call>', "\U0001f600"),
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"any": ["\ude00x"]}}</tool_call>', ["\ufffdx"]),
        ("pythonic", r'[f(any="\ud83d\ude00 \ud83d")]', "\U0001f600 \ufffd"),
        ("openai", r'<|channel|>commentary to=functions.f<|message|>{"any": "\ud83d"}<|call|>', "\ufffd"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"any": NaN}}</tool_call>', None),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"any": [1e999, -Infinity, 1.5]}}</tool_call>', [None, None, 1.5]),
        ("qwen3_coder", "<tool_call><function=f><parameter=any>NaN</parameter></function></tool_call>", "NaN"),
        ("qwen3_coder", "<tool_call><function=f><parameter=any>[1, NaN]</parameter></function></tool_call>", [1, None]),
        ("gemma4", "<|tool_call>call:f{any:-Infinity}<tool_call|>", "-Infinity"),
    ],
)
def test_arguments_are_json_that_utf8_can_encode(calls, text, value):
    assert arguments(whole_and_streamed(text, calls)) == {"any": value}


def test_arguments_of_forced_calls_are_json_that_utf8_can_encode():
    text = r'[{"name": "f", "parameters": {"any": "\ud83d", "days": NaN}}]'
    assert arguments(whole_and_streamed(text, "hermes", forced="")) == {"any": "\ufffd", "days": None}
    reader = ForcedCalls("f")
    reader.on_text(r'{"any": "\ud83d"}')
    assert reader.pieces == [Call("f", r'{"any": "\ud83d"}')]  # an escape stays one


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ("-Infinity", {"type": ["number", "null"]}, None),
        ("NaN", {"type": ["string", "null"]}, "NaN"),
        ("null", {"type": ["number", "null"]}, None),
        ("['a', 'b']", {"type": "array"}, ["a", "b"]),
        ("('a', 1, True, null)", {"type": "array"}, ["a", 1, True, None]),
        ("{'a': {'b': None}}", {"type": "object"}, {"a": {"b": None}}),
        ("{'a': 1}", {"type": "array"}, "{'a': 1}"),
        ("['a', f()]", {"type": "array"}, "['a', f()]"),
        ("[b'a', 1j]", {"type": "array"}, "[b'a', 1j]"),
        ("['a']", {"type": "string"}, "['a']"),
        ("['a']", {}, "['a']"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ('{"a": 1}', {"anyOf": [{"$ref": "#/$defs/City"}, {"type": "null"}]}, {"a": 1}),
        ('{"a": 1}', {"oneOf": [{"$ref": "#/$defs/Missing"}, {"type": "null"}]}, {"a": 1}),
        ("3", {"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, "3"),
        ("3", {"allOf": [{"$ref": "#/$defs/Name"}]}, "3"),
        ("3", {"$ref": "#/$defs/Loop"}, 3),
        ("3", {"anyOf": [{"$ref": "#/$defs/Inner"}]}, "3"),
        ("3", {"anyOf": [{}, {"type": "string"}]}, 3),
        ("3", {"allOf": [{"type": "number"}, {"type": "integer"}]}, 3),
    ],
)
def test_values_of_arguments(text, schema, value):
    definitions = {
        "City": CITY,
        "Name": {"type": "string"},
        "Inner": {"$ref": "#/$defs/Name"},
        "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/Loop"}]},
    }
    result = typed_value(text, schema, {"$defs": definitions})
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize("name", ["3d", "get-weather"])
def test_names_of_known_functions_are_names(name):
    for text in (f'{{"name": "{name}", "arguments": {{}}}}', f"<function={name}></function>", name):
        assert whole_and_streamed(f"<tool_call>{text}</tool_call>", "hermes") == [Call(name, "{}")]
    assert whole_and_streamed(f"<|tool_call>call:{name}{{}}<tool_call|>", "gemma4") == [Call(name, "{}")]
    assert whole_and_streamed("<tool_call>4d</tool_call>", "hermes") == [Content("<tool_call>4d</tool_call>")]


@pytest.mark.parametrize(("parser", "tag", "think"), [("minimax_m2", "minimax", "think"), ("seed_oss", "seed", "seed:think")])
def test_a_call_that_the_reasoning_only_mentions(parser, tag, think):
    text = f"I could use <{tag}:tool_call> here. </{think}>The answer is 4."
    expected = [Reasoning(f"I could use <{tag}:tool_call> here."), Content("The answer is 4.")]
    assert whole_and_streamed(text, parser, parser, prompt=f"<{think}>\n") == expected


def test_the_reasoning_goes_on_after_a_call():
    block = "<seed:tool_call><function=f></function></seed:tool_call>"
    text = f"hm {block} more {block}\n</seed:think>Hi"
    expected = [Reasoning("hm"), Call("f", "{}"), Reasoning(" more"), Call("f", "{}"), Content("Hi")]
    assert whole_and_streamed(text, "seed_oss", "seed_oss", prompt="<seed:think>") == expected


def test_a_code_block_of_json_is_a_call_only_of_a_known_function_with_arguments():
    def block(value):
        return f"Here:\n```json\n{value}\n```\nDone."

    for value in ('{"name": "Bob", "age": 3}', '{"name": "f", "age": 3}', '{"name": "Bob", "arguments": {}}', "[]", "[1]"):
        assert whole_and_streamed(block(value), "xlam") == [Content(block(value))]
    expected = [Content("Here:"), Call("f", '{"any": 1}'), Content("\nDone.")]
    assert whole_and_streamed(block('[{"name": "f", "arguments": {"any": 1}}]'), "xlam") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<function=f>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>", [{"days": 3}]),
        ("<function=f>\n</function>\n</tool_call>\n<tool_call><function=f>\n</function>\n</tool_call>", [{}, {}]),
        ("<tool_call><function=f>\n<parameter=days>\n3\n<parameter=any>\n4\n</function></tool_call>", [{"days": 3, "any": 4}]),
        (
            "<tool_call><function=f><parameter=days>3<parameter=any>4</parameter></function></tool_call>",
            [{"days": 3, "any": 4}],
        ),
        ("<tool_call><function=f><parameter=list>['a', 'b']</parameter></function></tool_call>", [{"list": ["a", "b"]}]),
        (
            "<tool_call><function=f><parameter=code>a <parameter=x> b <parameter=code> c</parameter></function></tool_call>",
            [{"code": "a <parameter=x> b <parameter=code> c"}],
        ),
    ],
)
def test_slips_of_qwen3_coder(text, expected):
    pieces = whole_and_streamed(f"I look. {text}", "qwen3_coder")
    assert pieces[0] == Content("I look.")
    assert [(piece.name, json.loads(piece.arguments)) for piece in pieces[1:]] == [("f", value) for value in expected]


@pytest.mark.parametrize(
    "text",
    [
        "Write <function=NAME> to call </tool_call> it.",
        "<tool_call><function=f><parameter=any>cut of",
        "<tool_call><function=f><parameter=any>4</parameter><parameter=days>3",
        "<tool_call><function=f><parameter=any</function></tool_call>",
    ],
)
def test_tags_that_are_no_call_are_text(text):
    assert whole_and_streamed(text, "qwen3_coder") == [Content(text)]


@pytest.mark.parametrize("calls", ["hermes", "gemma4", "openai", "xlam"])
def test_constrained_answers_are_plain_text(calls):
    reasoning = {"hermes": "qwen3", "gemma4": "gemma4", "openai": "openai_gptoss", "xlam": "qwen3"}[calls]
    for text in (
        '{"a":"<|channel>x<channel|><think>"}',
        '{"a":"<tool_call>f</tool_call><|channel|>"}',
        '{"name": "f", "arguments": {}}',
    ):
        assert whole_and_streamed(text, calls, reasoning, is_constrained=True) == [Content(text)]


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("fields", "is_plain"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, True),
        ({"structured_outputs": {"regex": "[^a]*"}}, True),
        ({"structured_outputs": {"choice": ["<think>"]}}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, True),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, False),
        ({}, False),
    ],
)
def test_requests_whose_answer_is_plain_text(fields, is_plain):
    form = answer_format("<|channel>thought <|tool_call>", ("<|channel>", "<channel|>", "<|tool_call>"), "auto", "auto")
    config = SimpleNamespace(sampling_limits=None)
    engine = SimpleNamespace(default_params=SamplingParams(), max_model_len=64, config=config)
    server = SimpleNamespace(
        answer_format=form, engine=engine, adapter_of=lambda _: None, checked_messages=lambda messages: messages
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": FUNCTIONS["f"]}}
    chat = Chat(server, ChatBody(messages=[{"role": "user", "content": "a"}], tools=[tool], **fields))
    assert chat.params.skip_special_tokens is is_plain
    parser = chat.parser("")
    text = '{"a": "<|channel>thought\nx<channel|>"}'
    assert ([*parser.push(text), *parser.finish()] == [Content(text)]) is is_plain


def lines_run(call):
    """Return the number of lines of the parsers that a call runs, each as often as it runs."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if "/parsers/" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("_KEYED_CALL", "\n"), ("_KEYED_CALL", "call:"), ("_KEYED_CALL", "call: "), ("_KEYED_CALL", ", ")],
)
def test_patterns_do_not_backtrack_twice(pattern, text):
    """No repetition of whitespace stands next to another that a text may leave empty."""
    from sensorium.server.parsers import call_syntax

    assert r"\s*,?\s*" not in getattr(call_syntax, pattern).pattern
    assert getattr(call_syntax, pattern).match(text * 1000) is None


def test_the_python_calls_between_blank_lines_are_joined_once():
    from sensorium.server.parsers.call_syntax import _lines

    for count in (1, 1000):
        assert list(_lines("f(any=1)" + "\n" * count + "f(\nany=2\n\n),")) == ["f(any=1)", "f(\nany=2\n\n)"]

    def cost(count):
        joined = []
        lines = ["f(any=1)", *[""] * count, "f(any=2)"]
        return lines_run(lambda: joined.extend(_lines("\n".join(lines))))

    assert cost(2000) <= 2 * cost(1000) + 50


@pytest.mark.parametrize("part", [" ", "\n", "to=", " a"])
def test_a_header_of_harmony_is_not_joined_at_each_chunk(part):
    from sensorium.server.parsers.harmony import HarmonyReader

    reader = HarmonyReader("<|start|>assistant", FUNCTIONS)
    for _ in range(2 if part == "to=" else 0):
        reader.on_text(part)
    for _ in range(500):
        reader.on_text(part)
        if not reader._section and reader._kind is None:
            assert len(reader._header) <= 2


WORDS = [
    *("<think>", "</think>", "<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>"),
    *("</minimax:tool_call>", "<function=f>", "</function>", "<parameter=days>", "<parameter=any>", "</parameter>", "3", "NaN"),
    *("<tool_call>", "</tool_call>", "```json", "```", '{"name": "f", "arguments": {}}', '{"name": "Bob"}', '"\\ud83d"', "3d"),
    *(
        '<invoke name="f">',
        "</invoke>",
        "<|tool_call>",
        "<tool_call|>",
        "call:3d{}",
        "<|channel>",
        "<channel|>",
        "\n",
        " ",
        "a",
    ),
    *("to=", "<|message|>", "<|channel|>", "f(any=1)", "<function_calls>", "</function_calls>"),
]


@settings(max_examples=300)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=10),
    names=st.sampled_from(
        [
            *(("seed_oss", "seed_oss"), ("minimax_m2", "minimax_m2"), ("qwen3_coder", "qwen3"), ("xlam", "qwen3")),
            *(("gemma4", "gemma4"), ("openai", "openai_gptoss"), ("olmo3", "olmo3")),
        ]
    ),
    prompt=st.sampled_from(["", "<think>\n", "<seed:think>", "<|start|>assistant"]),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=5),
)
def test_chunks_make_no_difference(words, names, prompt, cuts):
    text = "".join(words)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    expected = parse([text], *names, prompt=prompt)
    assert parse([text[a:b] for a, b in pairwise(edges)], *names, prompt=prompt) == expected
    assert parse(text, *names, prompt=prompt) == expected
