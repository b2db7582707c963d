"""Parsers of answers: what they find, and that the way an answer is cut into chunks makes no difference."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from answer_samples import FUNCTIONS as SAMPLE_FUNCTIONS
from answer_samples import SAMPLES
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.callers.errors import ConfigError
from sensorium.server.config import ServerConfig
from sensorium.server.parsers import reasoning as reasoning_formats
from sensorium.server.parsers.answer import (
    PARSERS,
    REASONING_PARSER_NAMES,
    AnswerFormat,
    AnswerParser,
    AnswerRules,
    answer_format,
)
from sensorium.server.parsers.call_formats import FORMATS
from sensorium.server.parsers.markers import MarkerSet, Scanner
from sensorium.server.parsers.pieces import Arguments, Call, Content, Reasoning
from sensorium.server.parsers.reasoning import mentions_reasoning
from sensorium.server.parsers.values import typed_value
from sensorium.server.parsers.vllm_names import ARCHITECTURES, CALL_PARSERS, REASONING_PARSERS

THINK = reasoning_formats.FORMATS["think"]
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
    parser = AnswerParser(form, prompt, functions, AnswerRules(with_specials=True, **options))
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
    assert found_calls(parse([text], name, max_calls=1)) == CALLS[:1]


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


def parse_sample(chunks, sample, form, functions=SAMPLE_FUNCTIONS, **options):
    parser = AnswerParser(form, sample.prompt, functions, AnswerRules(with_specials=True, **options))
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return merge([*pieces, *parser.finish()])


def form_of(sample):
    return answer_format("", sample.specials, sample.calls_parser, sample.reasoning_parser)


def parts(pieces):
    """Return (reasoning, content, calls)."""
    texts = {kind: "".join(piece.text for piece in pieces if type(piece) is kind) for kind in (Reasoning, Content)}
    return texts[Reasoning], texts[Content], tuple(found_calls(pieces))


@pytest.mark.parametrize("name", SAMPLES)
def test_published_formats(name):
    sample = SAMPLES[name]
    expected = sample.reasoning, sample.content, sample.calls
    whole = parse_sample([sample.text], sample, form_of(sample))
    assert parts(whole) == expected
    assert parse_sample(list(sample.text), sample, form_of(sample)) == whole
    assert parts(parse_sample([sample.text], sample, form_of(sample), max_calls=1)) == (*expected[:2], sample.calls[:1])
    if sample.template:
        form = answer_format(sample.template, sample.specials, "auto", "auto")
        assert parts(parse_sample([sample.text], sample, form)) == expected
        assert form.needs_specials(has_tools=True) == bool(set(sample.specials) - {"<|im_end|>", "</s>", "<|end|>", "<|eot|>"})


@pytest.mark.parametrize("name", SAMPLES)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, 1 << 16), max_size=12), cut=st.integers(0, 1 << 16))
def test_chunks_of_published_formats_make_no_difference(name, cuts, cut):
    """Also if the answer ends early."""
    sample = SAMPLES[name]
    text = sample.text[: cut % (2 * len(sample.text))]
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    form = form_of(sample)
    assert parse_sample([text[a:b] for a, b in pairwise(edges)], sample, form) == parse_sample([text], sample, form)


MARKERS = sorted({marker for row in FORMATS.values() for marker in (*row.markers, *row.signs)} | {
    marker for row in reasoning_formats.FORMATS.values() for marker in row.markers
} | {"<|start|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>"})  # fmt: skip
WORDS = ("a", " ", "\n", "{", "}", "[", "]", "(", '"', "to=functions.sum", "analysis", "sum", "call:sum{", "<", "<|", "</s>")


@pytest.mark.parametrize("calls", FORMATS)
@settings(max_examples=40)
@given(
    words=st.lists(st.sampled_from([*MARKERS, *WORDS, '{"name": "sum", "arguments": {}}']), max_size=10),
    thinks=st.sampled_from([*reasoning_formats.FORMATS]),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=6),
    is_special=st.booleans(),
    prompt=st.sampled_from(["", "<think>\n", "<|start|>assistant", "<|message_model|>", "<|open|>response<|sep|>"]),
)
def test_chunks_of_any_text_make_no_difference_to_any_format(calls, words, thinks, cuts, is_special, prompt):
    text = "".join(words)
    specials = ("</s>", *(MARKERS[::2] if is_special else ()))
    form = AnswerFormat(reasoning_formats.FORMATS[thinks], FORMATS[calls], specials)

    def parsed(chunks):
        parser = AnswerParser(form, prompt, SAMPLE_FUNCTIONS, AnswerRules(with_specials=True))
        return merge([*(piece for chunk in chunks for piece in parser.push(chunk)), *parser.finish()])

    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    assert parsed([text[a:b] for a, b in pairwise(edges)]) == parsed(list(text)) == parsed([text])


def test_marked_tags_nest():
    mark = "]<]minimax[>["
    schema = {"type": "object", "properties": {"note": {"type": "string"}}}
    schema["properties"]["trip"] = {"type": "object", "properties": {"days": {"type": "array", "items": {"type": "string"}}}}
    text = (
        f'{mark}<tool_call>{mark}<invoke name="plan">{mark}<trip>\n{mark}<days>{mark}<item>1{mark}</item>{mark}</days>'
        f"{mark}<stops>{mark}<item>{mark}<city>Köln{mark}</city>{mark}<nights>2{mark}</nights>{mark}</item>{mark}</stops>{mark}</trip>"
        f"{mark}<note>see <b>3</b> </invoke>{mark}</note>{mark}</invoke>{mark}</tool_call>"
    )
    form = answer_format(f"{mark}<tool_call>", (mark,), "auto", "none")
    parser = AnswerParser(form, "", {"plan": schema}, AnswerRules(with_specials=True))
    arguments = {"trip": {"days": ["1"], "stops": [{"city": "Köln", "nights": 2}]}, "note": "see <b>3</b> </invoke>"}
    assert found_calls([*parser.push(text), *parser.finish()]) == [("plan", arguments)]


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if "weather" in dict(sample.calls)])
def test_a_broken_call_of_any_format_is_text(name):
    """Not a byte of the arguments is lost."""
    sample = SAMPLES[name]
    form = form_of(sample)
    broken = sample.text.replace("Köln", "Kö\x00(ln").replace("3", "3]}(\x00").replace("name", "n(ame")
    pieces = parse_sample([broken], sample, form)
    reasoning, content, calls = parts(pieces)
    if "weather" not in dict(calls):
        assert "Kö\x00(ln" in reasoning + content


@pytest.mark.parametrize("name", ["gpt-oss", "Gemma 4", "Command A", "Magistral", "Kimi K2"])
def test_without_tools_special_tokens_are_left_out(name):
    sample = SAMPLES[name]
    reasoning, content, calls = parts(parse_sample([sample.text], sample, form_of(sample), functions={}))
    assert (reasoning, calls) == (sample.reasoning, ())
    assert content.startswith(sample.content)
    assert not any(token in content for token in sample.specials)


@pytest.mark.parametrize("name", ["gpt-oss answer", "Gemma 4 answer", "MiniMax M2", "Magistral"])
def test_constrained_answers_have_no_reasoning(name):
    sample = SAMPLES[name]
    text = '{"answer": 4}'
    assert parse_sample([text], sample, form_of(sample), is_constrained=True) == [Content(text)]
    assert parse_sample([text], sample, form_of(sample), forced="sum") == [Call("sum", text)]


def test_the_prompt_tells_whether_the_reasoning_is_open():
    form = answer_format("<think>", (), "none", "auto")
    implicit = answer_format("", (), "none", "deepseek_r1")

    def first(form, prompt, continued=""):
        parser = AnswerParser(form, prompt, {}, AnswerRules(continued=continued))
        return type((parser.push("hm") + parser.finish())[0])

    assert first(form, "What does <think> mean? <|assistant|>") is Content
    assert first(form, "<|assistant|><think>\n") is Reasoning
    assert first(form, "<|assistant|><think>\n\n</think>\n\n") is Content
    assert first(form, "<|assistant|><think>\nSo", "<think>\nSo") is Reasoning
    assert first(form, "<|assistant|><think>\nSo</think>Yes", "<think>\nSo</think>Yes") is Content
    assert first(implicit, "<|assistant|>") is Reasoning
    assert first(implicit, "<|assistant|></think>") is Content
    assert first(implicit, "<|assistant|>Yes", "Yes") is Content
    harmony = answer_format("<|channel|><|message|>", (), "auto", "auto")
    assert first(harmony, "<|start|>assistant<|channel|>analysis<|message|>So", "So") is Reasoning
    assert first(harmony, "<|start|>assistant<|channel|>final<|message|>So", "So") is Content


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "string"}, "3"), ("3", {"type": "integer"}, 3), ("3", {"type": ["integer", "null"]}, 3), ("3", {}, 3),
        ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None), ("3", {"anyOf": [{"type": "string"}]}, "3"),
        ("true", {"type": "boolean"}, True), ("True", {"type": "boolean"}, True), ("1.5", {"type": "number"}, 1.5),
        ("2", {"type": "number"}, 2), ("x", {"type": "integer"}, "x"), ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("[1]", {"type": "string"}, "[1]"), ("3", {"enum": ["3", "4"]}, "3"), ("3", {"const": 3}, 3), (" a\n", {}, " a\n"),
        ("3", {"allOf": [{"type": "integer"}]}, 3), ("1.5", {"type": "integer"}, "1.5"), ("3", None, 3), ("3", True, 3),
    ],
)  # fmt: skip
def test_types_of_arguments_by_the_schema(text, schema, value):
    found = typed_value(text, schema)
    assert (found, type(found)) == (value, type(value))


def test_arguments_of_a_referenced_type():
    properties = {"a": {"$ref": "#/$defs/Number"}, "b": {"$ref": "#/$defs/Nothing"}}
    schema = {"properties": properties, "$defs": {"Number": {"type": "string"}}}
    text = "<tool_call><function=f><parameter=a>3</parameter><parameter=b>3</parameter></function></tool_call>"
    assert found_calls(parse([text], "tagged", functions={"f": schema})) == [("f", {"a": "3", "b": 3})]


VLLM_TOOL_PARSERS = [
    "apertus",
    "cohere_command3",
    "cohere_command4",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "deepseek_v4",
    "deepseek_v41",
    "dots",
    "ernie45",
    "functiongemma",
    "gemma4",
    "gigachat3",
    "glm45",
    "glm47",
    "granite",
    "granite-20b-fc",
    "granite4",
    "hermes",
    "hunyuan_a13b",
    "hy_v3",
    "hy_v4",
    "inkling",
    "internlm",
    "jamba",
    "kimi_k2",
    "kimi_k3",
    "lfm2",
    "ling3",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "longcat",
    "mimo",
    "minicpm5",
    "minimax",
    "minimax_m2",
    "minimax_m3",
    "mistral",
    "olmo3",
    "openai",
    "phi4_mini_json",
    "poolside_v1",
    "pythonic",
    "qwen3_coder",
    "qwen3_xml",
    "seed_oss",
    "solar_open2",
    "step3",
    "step3p5",
    "xlam",
    "zaya_xml",
]
VLLM_REASONING_PARSERS = [
    "cohere_command3",
    "cohere_command4",
    "deepseek_r1",
    "deepseek_v3",
    "deepseek_v4",
    "deepseek_v41",
    "ernie45",
    "gemma4",
    "glm45",
    "glm47",
    "granite",
    "holo2",
    "hunyuan_a13b",
    "hy_v3",
    "hy_v4",
    "inkling",
    "kimi_k2",
    "kimi_k3",
    "ling3",
    "mimo",
    "minimax_m2",
    "minimax_m2_append_think",
    "minimax_m3",
    "mistral",
    "nemotron_v3",
    "olmo3",
    "openai_gptoss",
    "poolside_v1",
    "qwen3",
    "seed_oss",
    "solar_open2",
    "step3",
    "step3p5",
]


def test_names_of_vllm_are_known():
    assert set(VLLM_TOOL_PARSERS) <= set(PARSERS)
    assert set(VLLM_REASONING_PARSERS) <= set(REASONING_PARSER_NAMES)
    assert {*VLLM_TOOL_PARSERS} - {*CALL_PARSERS} == set()
    assert {*VLLM_REASONING_PARSERS} - {*REASONING_PARSERS} == set()
    assert {*CALL_PARSERS.values()} <= set(FORMATS)
    assert {*REASONING_PARSERS.values()} <= {*reasoning_formats.FORMATS, "none"}
    for name in VLLM_TOOL_PARSERS:
        ServerConfig(tool_call_parser=name)
    for name in VLLM_REASONING_PARSERS:
        ServerConfig(reasoning_parser=name)
    for option in ("tool_call_parser", "reasoning_parser"):
        for name in ("muse_glimmer", "k2_horizon"):
            with pytest.raises(ConfigError) as caught:
                ServerConfig(**{option: name})
            assert (caught.value.info.code, caught.value.info.param) == ("unsupported", option)
    with pytest.raises(ConfigError, match="did you mean qwen3_coder") as caught:
        ServerConfig(tool_call_parser="qwen3_code")
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_config", "tool_call_parser")
    with pytest.raises(ConfigError, match="did you mean deepseek_r1") as caught:
        ServerConfig(reasoning_parser="deepseek-r1")
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_config", "reasoning_parser")


def test_the_docs_name_every_parser():
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    words = set(re.findall(r"[\w-]+", text[text.index("### Tool calls") : text.index("### Files and batches")]))
    assert {*PARSERS, *REASONING_PARSER_NAMES} <= words


def test_the_architecture_tells_the_format_if_the_template_does_not():
    form = answer_format("{{ messages }}", (), "auto", "auto", "GptOssForCausalLM")
    assert (form.calls, form.reasoning) == (FORMATS["harmony"], reasoning_formats.FORMATS["harmony"])
    assert answer_format("<tool_call>", (), "auto", "none", "GptOssForCausalLM") == AnswerFormat(None, FORMATS["tagged"])
    assert {name for names in ARCHITECTURES.values() for name in names} <= {*PARSERS, *REASONING_PARSER_NAMES}


def test_templates_that_show_reasoning():
    assert mentions_reasoning("{% if enable_thinking %}")
    assert mentions_reasoning("{{ message.reasoning_content }}")
    assert not mentions_reasoning("{{ message.content }}")


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
        ("[TOOL_CALLS] [THINK]", "bracketed", reasoning_formats.FORMATS["bracketed"]),
        ("<|python_tag|>", "python_tag", None),
        ("<|tool_calls_section_begin|> ◁think▷", "sections", reasoning_formats.FORMATS["kimi_vl"]),
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
    parser = AnswerParser(form, "", FUNCTIONS, AnswerRules(with_specials=True))
    assert [*parser.push(text), *parser.finish()]


@pytest.mark.parametrize("calls", FORMATS)
@pytest.mark.parametrize("part", ["word ", " ", "\n", "<", "{", "[", "<|", "to=", "<tool_call>", "[TOOL_CALLS]"])
def test_a_stream_copies_each_character_a_few_times(calls, part, monkeypatch):
    """The work for an answer of twice the length is twice as much."""

    def cost(count):
        scanned = []
        monkeypatch.setattr(Scanner, "scan", counting(Scanner_scan, scanned))
        parser = AnswerParser(AnswerFormat(THINK, FORMATS[calls], ("</s>",)), "", FUNCTIONS, AnswerRules(with_specials=True))
        for _ in range(count):
            parser.push(part)
        held = len(parser._scanner._tail)
        parser.finish()
        return sum(scanned), held

    Scanner_scan = Scanner.scan
    (small, held), (large, held_later) = cost(200), cost(400)
    assert large <= 2 * small + 100
    assert held_later <= max(held, 64)


def counting(scan, scanned):
    def counted(self, text, reader, is_last=False):
        scanned.append(len(self._tail) + len(text) + len(getattr(reader, "_start", "")))
        return scan(self, text, reader, is_last)

    return counted


def test_the_longest_end_that_may_become_a_marker_is_held():
    markers = MarkerSet(frozenset(["<a>", "<a>b", "ab"]))
    assert markers.undecided_from("x<a", 0) == 1
    assert markers.undecided_from("x<a>", 0) == 1  # "<a>b" may follow
    assert markers.undecided_from("x<a>", 4) == 4
    assert markers.undecided_from("xa", 0) == 1
    assert MarkerSet(frozenset()).undecided_from("x", 0) == 1
