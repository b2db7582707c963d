"""Parsers of answers: what they find, and that the way an answer is cut into chunks makes no difference."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.server.parsers.answer import AnswerFormat, AnswerParser, answer_format
from sensorium.server.parsers.call_formats import FORMATS
from sensorium.server.parsers.pieces import Arguments, Call, Content, Reasoning

THINK = ("<think>", "</think>")
WEATHER = {"weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
SUM = {"sum": {"type": "object", "properties": {"numbers": {"type": "array"}}}}
FUNCTIONS = WEATHER | SUM
CALLS = [("weather", {"city": "Köln", "days": 3}), ("sum", {"numbers": [1, 2]})]
ANSWERS = {
    "tagged": [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sum", "arguments": {"numbers": [1, 2]}}\n</tool_call>',
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=sum>\n<parameter=numbers>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>"
        "<tool_call>sum<arg_key>numbers</arg_key><arg_value>[1, 2]</arg_value></tool_call>",
    ],
    "bracketed": [
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Köln", "days": 3}}, '
        '{"name": "sum", "arguments": {"numbers": [1, 2]}}]</s>',
        '[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 3}[TOOL_CALLS]sum{"numbers": [1, 2]}</s>',
    ],
    "python_tag": [
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Köln", "days": 3}}; '
        '{"name": "sum", "parameters": {"numbers": [1, 2]}}<|eom_id|>',
    ],
    "sections": [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.sum:1<|tool_call_argument_begin|>'
        '{"numbers": [1, 2]}<|tool_call_end|><|tool_calls_section_end|>',
    ],
}
EXAMPLES = [(name, text) for name, texts in ANSWERS.items() for text in texts]
SPECIALS = ("</s>", "<|eom_id|>", "<|im_end|>")


def merge(pieces):
    """Join neighbouring pieces of the same kind."""
    merged = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if isinstance(last, Content | Reasoning) and type(last) is type(piece):
            merged[-1] = type(last)(last.text + piece.text)
        elif isinstance(piece, Arguments):
            merged[-1] = Call(last.name, last.arguments + piece.text)
        else:
            merged.append(piece)
    return merged


def parse(chunks, calls=None, reasoning=THINK, prompt="", functions=FUNCTIONS, **options):
    form = AnswerFormat(reasoning, None if calls is None else FORMATS[calls], SPECIALS)
    parser = AnswerParser(form, prompt, functions, with_specials=True, **options)
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return merge([*pieces, *parser.finish()])


def found_calls(pieces):
    return [(piece.name, json.loads(piece.arguments)) for piece in pieces if isinstance(piece, Call)]


@pytest.mark.parametrize(("name", "text"), EXAMPLES)
def test_calls_of_each_format(name, text):
    pieces = parse([text], name)
    assert found_calls(pieces) == CALLS
    assert len(pieces) == 2
    before = parse([f"<think>\nhm\n</think>\n\nI look.\n{text}"], name)
    assert before[:2] == [Reasoning("hm"), Content("I look.")]
    assert found_calls(before) == CALLS
    assert found_calls(parse([text], name, most=1)) == CALLS[:1]


@pytest.mark.parametrize(("name", "text"), EXAMPLES)
@given(cuts=st.lists(st.integers(0, 400), max_size=12), think=st.booleans())
def test_chunks_make_no_difference(name, text, cuts, think):
    whole = f"<think> a b \n</think>\n\nI look. {text}" if think else text
    edges = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    chunks = [whole[a:b] for a, b in pairwise(edges)]
    assert parse(chunks, name) == parse([whole], name) == parse(list(whole), name)


PARTS = st.sampled_from(
    [
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "</s>", "<tool"),
        *("{", "}", "[", '"', "a", " ", "\n", "<", "f", "sum[ARGS]"),
        *('{"name": "sum", "arguments": {}}', '{"name": "sum", "parameters": {"numbers": []}}'),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "[THINK]"),
    ]
)  # fmt: skip


@given(parts=st.lists(PARTS, max_size=12), calls=st.sampled_from([None, *FORMATS]), prompt=st.sampled_from(["", "<think>\n"]))
def test_chunks_of_any_text_make_no_difference(parts, calls, prompt):
    text = "".join(parts)
    expected = parse([text], calls, prompt=prompt)
    assert parse(parts, calls, prompt=prompt) == parse(list(text), calls, prompt=prompt) == expected
    if calls is None and "<think>" not in text and "</s>" not in text and not prompt:
        assert "".join(piece.text for piece in expected) == text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{broken</tool_call> and more", '<tool_call>{"arguments": {}}</tool_call>', "<tool_call>3</tool_call>",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>', "<tool_call>", "a <tool_call>[1]</tool_call>", "1 < 2 <tool",
        "<tool_call>" + "[" * 5000 + "</tool_call>",
    ],
)  # fmt: skip
def test_what_is_no_call_is_text(text):
    assert parse([text], "tagged") == [Content(text)]


def test_reasoning():
    assert parse(["a<think>b"]) == [Content("a<think>b")]
    assert parse(["<thin"]) == [Content("<thin")]
    assert parse(["why\n</think>\n\nyes"], prompt="user <think>\n") == [Reasoning("why"), Content("yes")]
    assert parse(["why"], prompt="<think>") == [Reasoning("why")]
    assert parse(["yes \n"], prompt="<think></think>") == [Content("yes \n")]
    assert parse(["<think></think> "]) == []


def test_forced_calls():
    options = {"forced": "sum", "reasoning": None}
    assert parse(['{"num', 'bers": []}'], **options) == [Call("sum", '{"numbers": []}')]
    several = '[{"name": "sum", "parameters": {}}, {"name": "weather", "parameters": {"days": 1}}]'
    assert found_calls(parse(several, forced="")) == [("sum", {}), ("weather", {"days": 1})]
    assert parse([several[:-9]], forced="") == [Content(several[:-9])]


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        ("{{ '<tool_call>' }} <think>", "tagged", THINK),
        ("[TOOL_CALLS] [THINK]", "bracketed", ("[THINK]", "[/THINK]")),
        ("<|python_tag|>", "python_tag", None),
        ("<|tool_calls_section_begin|> ◁think▷", "sections", ("◁think▷", "◁/think▷")),
        ("plain", None, None),
        (None, None, None),
    ],
)
def test_the_template_tells_the_format(template, calls, reasoning):
    found = answer_format(template, (), "auto", "auto")
    assert (found.calls, found.reasoning) == (FORMATS.get(calls), reasoning)
    assert answer_format(template, (), "none", "none") == AnswerFormat()
    assert answer_format(template, (), "hermes", "none").calls is FORMATS["tagged"]


def test_special_tokens_are_needed_if_a_marker_is_one():
    form = answer_format("[TOOL_CALLS]", ("[TOOL_CALLS]", "</s>"), "auto", "auto")
    assert form.needs_specials(True)
    assert not form.needs_specials(False)
    assert not answer_format("<tool_call>", ("</s>",), "auto", "auto").needs_specials(True)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tagged", "<tool_call>a" + "<arg_key></arg_key><arg_value>" * 8000),
        ("tagged", "<tool_call><function=a>" + "<parameter=a>" * 18_000),
        ("tagged", "<tool_call></tool_call>" * 10_000),
        ("sections", "<|tool_calls_section_begin|>" + "<|tool_call_begin|><|tool_call_argument_begin|>" * 5000),
        ("python_tag", "<|python_tag|>" + '{"name":"a"}' * 20_000),
    ],
)
def test_long_answers_take_linear_time(name, text):
    """A client can force any answer with structured outputs. In quadratic time, these would take minutes."""
    form = AnswerFormat(None, FORMATS[name], tuple(f"<|special_{number}|>" for number in range(200)))
    parser = AnswerParser(form, "", FUNCTIONS, with_specials=True)
    assert [*parser.push(text), *parser.finish()]
