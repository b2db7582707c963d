"""Arguments of calls may contain the markers of their own format."""

from __future__ import annotations

import json

import pytest
from sensorium.server.parsers.answer import AnswerParser, answer_format
from sensorium.server.parsers.pieces import Call, Content, Piece, Reasoning

FUNCTIONS = {"f": {"type": "object", "properties": {"s": {"type": "string"}, "t": {"type": "string"}}}}


def parse(text: str, calls: str, reasoning: str = "none", size: int | None = None) -> list[Piece]:
    """Return the pieces of an answer that arrives in chunks of `size` characters; adjacent texts are joined."""
    parser, pieces, size = (
        AnswerParser(answer_format(None, (), calls, reasoning), "", FUNCTIONS),
        list[Piece](),
        size or len(text),
    )
    for start in range(0, len(text), size):
        pieces += parser.push(text[start : start + size])
    joined = list[Piece]()
    for piece in [*pieces, *parser.finish()]:
        if joined and not isinstance(piece, Call) and type(joined[-1]) is type(piece):
            piece = type(piece)(joined.pop().text + piece.text)
        joined.append(piece)
    return joined


def check(text: str, calls: str, expected: list[Piece], reasoning: str = "none") -> None:
    for size in (None, 1, 7):
        assert parse(text, calls, reasoning, size) == expected


def call(**arguments: str) -> Call:
    return Call("f", json.dumps(arguments, ensure_ascii=False))


ONE_VALUE = [  # parser, call, value of s
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a </tool_call> b"}}</tool_call>', "a </tool_call> b"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\\"</tool_call>\'"}}</tool_call>', "\"</tool_call>'"),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"</tool_call>\\"}"}</tool_call>', "</tool_call>"),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=s>\na </tool_call> b </function> c </parameter> d\n</parameter>\n</function>\n"
        "</tool_call>",
        "a </tool_call> b </function> c </parameter> d",
    ),
    ("qwen3_coder", "<function=f>\n<parameter=s>\n</tool_call> b\n</parameter>\n</function>\n</tool_call>", "</tool_call> b"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"s": "[TOOL_CALLS]x{"}', "[TOOL_CALLS]x{"),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"s": "[TOOL_CALLS]x"}}]', "[TOOL_CALLS]x"),
    (
        "glm45",
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>a </arg_value> b </tool_call> c</arg_value>\n</tool_call>",
        "a </arg_value> b </tool_call> c",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
        '{"s": "a <|tool_call_end|> b <|tool_calls_section_end|>"}<|tool_call_end|><|tool_calls_section_end|>',
        "a <|tool_call_end|> b <|tool_calls_section_end|>",
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>"
        '{"s": "x <｜tool▁call▁end｜> <｜tool▁calls▁end｜> y"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "x <｜tool▁call▁end｜> <｜tool▁calls▁end｜> y",
    ),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="s" string="true">'
        "a </｜DSML｜function_calls> b</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        "a </｜DSML｜function_calls> b",
    ),
    ("lfm2", '<|tool_call_start|>[f(s="a <|tool_call_end|> it\'s")]<|tool_call_end|>', "a <|tool_call_end|> it's"),
    ("olmo3", "<function_calls>\nf(s='a </function_calls> \"b')\n</function_calls>", 'a </function_calls> "b'),
    ("gemma4", '<|tool_call>call:f{s:<|"|>a <tool_call|> b<|"|>}<tool_call|>', "a <tool_call|> b"),
    (
        "functiongemma",
        "<start_function_call>call:f{s:<escape><end_function_call><escape>}<end_function_call>",
        "<end_function_call>",
    ),
    ("granite-20b-fc", '<function_call> {"name": "f", "arguments": {"s": "<function_call>"}}', "<function_call>"),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">a </minimax:tool_call> </invoke> b</parameter>\n</invoke>'
        "\n</minimax:tool_call>",
        "a </minimax:tool_call> </invoke> b",
    ),
    ("minicpm5", '<function name="f"><param name="s">a </function> b</param></function>', "a </function> b"),
    ("hunyuan_a13b", '<tool_calls>[{"name": "f", "arguments": {"s": "</tool_calls>"}}]</tool_calls>', "</tool_calls>"),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=s>a </seed:tool_call> b</parameter>\n</function>\n</seed:tool_call>",
        "a </seed:tool_call> b",
    ),
    (
        "internlm",
        '<|action_start|><|plugin|>{"name": "f", "parameters": {"s": "<|action_end|>"}}<|action_end|>',
        "<|action_end|>",
    ),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_name": "f", "parameters": {"s": "<|END_ACTION|>"}}]<|END_ACTION|>',
        "<|END_ACTION|>",
    ),
    ("xlam", '```json\n[{"name": "f", "arguments": {"s": "```x"}}]\n```', "```x"),
]


@pytest.mark.parametrize(("calls", "text", "value"), ONE_VALUE, ids=[f"{row[0]}-{at}" for at, row in enumerate(ONE_VALUE)])
def test_an_argument_may_contain_an_end_marker(calls: str, text: str, value: str) -> None:
    check(text, calls, [call(s=value)])
    if calls not in ("mistral", "granite-20b-fc"):  # their calls last until the end of the answer
        check(
            f"one {text} two {text} three",
            calls,
            [Content("one"), call(s=value), Content(" two"), call(s=value), Content(" three")],
        )


def test_an_end_tag_is_followed_by_the_next_parameter() -> None:
    text = (
        "<tool_call><function=f><parameter=s>a</parameter> <parameter=u>b</parameter>"
        "<parameter=t>c</parameter></function></tool_call>"
    )
    check(text, "qwen3_coder", [Call("f", '{"s": "a", "u": "b", "t": "c"}')])
    text = "<tool_call><function=f><parameter=s>a</parameter> x <parameter=t>c</parameter></function></tool_call>"
    check(text, "qwen3_coder", [Content(text)])
    text = "<tool_call><function=f><parameter=s>a</parameter> x <parameter=u>c</parameter></function></tool_call>"
    check(text, "qwen3_coder", [call(s="a</parameter> x <parameter=u>c")])


@pytest.mark.parametrize(
    ("calls", "broken", "good"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"s": "a}</tool_call>',
            '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=s>\na\n</tool_call>",
            "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        ),
        ("glm45", "<tool_call>f\n<arg_key>s</arg_key>\n</tool_call>", "<tool_call>f</tool_call>"),
    ],
)
def test_a_broken_call_does_not_swallow_the_next_one(calls: str, broken: str, good: str) -> None:
    check(f"{broken} and {good} end", calls, [Content(f"{broken} and"), Call("f", "{}"), Content(" end")])
    check(f"{broken} and", calls, [Content(f"{broken} and")])
    check(f"<think>{broken} and</think>4", calls, [Reasoning(f"{broken} and"), Content("4")], "qwen3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final 4<|return|>", [Content("4")]),
        ("<|channel|>final4<|return|>", [Content("4")]),
        ("<|channel|>final 4", [Content("4")]),
        ("<|channel|>finally done<|return|>", [Content("done")]),
        (
            "<|channel|>analysis Need 2+2.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
            [Reasoning("Need 2+2."), Content("4")],
        ),
        ('<|channel|>commentary to=functions.f <|constrain|>json{"s": "a"}<|call|>', [call(s="a")]),
        ('<|channel|>commentary to=functions.f {"s": "a"}<|call|>', [call(s="a")]),
        ("<|channel|>final", []),
        ("<|channel|>commentary to=functions.f", []),
    ],
)
def test_a_message_of_harmony_without_the_mark_of_its_text(text: str, expected: list[Piece]) -> None:
    check(text, "openai", expected, "openai_gptoss")


def test_granite_3_1_writes_a_list_after_the_marker() -> None:
    text = '<tool_call>[{"name": "f", "arguments": {"s": "1"}}, {"name": "f", "arguments": {"t": "2"}}]'
    check(text, "granite", [call(s="1"), call(t="2")])
    check(f"{text}</tool_call>", "granite", [call(s="1"), call(t="2")])


def test_an_answer_of_kimi_begins_within_the_reasoning() -> None:
    check("Need 2+2.</think>4", "kimi_k2", [Reasoning("Need 2+2."), Content("4")], "kimi_k2")
    section = (
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"s": "1"}<|tool_call_end|>'
    )
    check(f"I look.{section}<|tool_calls_section_end|>", "kimi_k2", [Reasoning("I look."), call(s="1")], "kimi_k2")
