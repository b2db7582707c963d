# ruff: noqa: E501  (the texts of models)
"""Answers as published models write them, each with the parser names that read it and what they find.

The texts follow the models' chat templates and their publishers' descriptions of the formats: OpenAI's cookbook on harmony, Google's
pages on Gemma 4 and FunctionGemma, DeepSeek's model cards of R1, V3, V3.1 and V3.2, MiniMax's and Moonshot's guides to tool calls, and
the model cards of the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WEATHER = {"city": "Köln", "days": 3}
SUM = {"numbers": [1, 2.5], "exact": True}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "sum": {"type": "object", "properties": {"numbers": {"type": "array"}, "exact": {"type": "boolean"}}},
}
BOTH = (("weather", WEATHER), ("sum", SUM))


@dataclass(frozen=True)
class Sample:
    """One answer.

    Args:
        calls_parser, reasoning_parser: names of vLLM.
        template: a part of the model's chat template by which its format is known; "" if only the names tell it.
        prompt: the end of the prompt.
        specials: markers that are special tokens of the model.
        reasoning, content: what the user gets.
        calls: names and arguments.
    """

    calls_parser: str
    reasoning_parser: str
    text: str
    template: str = ""
    prompt: str = ""
    specials: tuple[str, ...] = ()
    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, dict[str, Any]], ...] = BOTH


_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>")
_HARMONY_TEMPLATE = "<|start|>assistant<|channel|>analysis<|message|>"
_START = "<|start|>assistant"
_GEMMA = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>")
_GEMMA_TEMPLATE = "<|channel>thought\n<channel|> <|tool_call>call:"
_JSON = '{"name": "weather", "arguments": {"city": "Köln", "days": 3}}'
_JSON_SUM = '{"name": "sum", "arguments": {"numbers": [1, 2.5], "exact": true}}'
_LIST = f"[{_JSON}, {_JSON_SUM}]"
_PYTHON = 'weather(city="Köln", days=3), sum(numbers=[1, 2.5], exact=True)'
_PARAMETERS = '{"name": "weather", "parameters": {"city": "Köln", "days": 3}}'
_PARAMETERS_SUM = '{"name": "sum", "parameters": {"numbers": [1, 2.5], "exact": true}}'
_DS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|im_end|>"),
)
_COHERE = tuple(f"<|{side}_{part}|>" for part in ("THINKING", "ACTION", "RESPONSE") for side in ("START", "END"))

_K3 = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_K3_CALLS = (
    '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Köln'
    '<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="sum" index="2"<|sep|><|open|>argument key="numbers" type="array"<|sep|>[1, 2.5]<|close|>argument<|sep|>'
    '<|open|>argument key="exact" type="boolean"<|sep|>true<|close|>argument<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>message<|sep|>"
)
_M3 = "]<]minimax[>["
_INKLING = (
    *("<|message_model|>", "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"),
    *("<|end_message|>", "<|content_model_end_sampling|>"),
)


def _function_tags(begin: str, end: str) -> str:
    return (
        f"{begin}\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n{end}\n"
        f"{begin}\n<function=sum>\n<parameter=numbers>\n[1, 2.5]\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n{end}"
    )


def _invoke_tags(space: str = "", attributes: tuple[str, str] = ("", "")) -> str:
    text, other = attributes
    return (
        f'<{space}invoke name="weather">\n<{space}parameter name="city"{text}>Köln</{space}parameter>\n'
        f'<{space}parameter name="days"{other}>3</{space}parameter>\n</{space}invoke>\n'
        f'<{space}invoke name="sum">\n<{space}parameter name="numbers"{other}>[1, 2.5]</{space}parameter>\n'
        f'<{space}parameter name="exact"{other}>true</{space}parameter>\n</{space}invoke>'
    )


SAMPLES = {
    "gpt-oss": Sample(
        "openai", "openai_gptoss",
        "<|channel|>analysis<|message|>Need the weather.<|end|>"
        f"{_START}<|channel|>commentary<|message|>I look.<|end|>"
        f'{_START}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{"city": "Köln", "days": 3}}<|call|>'
        f'{_START} to=functions.sum<|channel|>commentary json<|message|>{{"numbers": [1, 2.5], "exact": true}}<|call|>',
        _HARMONY_TEMPLATE, f"<|start|>user<|message|>hm<|end|>{_START}", _HARMONY, "Need the weather.", "I look.",
    ),
    "gpt-oss answer": Sample(
        "openai", "openai_gptoss",
        f"<|channel|>analysis<|message|>Need 2+2.<|end|>{_START}<|channel|>final<|message|>4 <|return|>",
        _HARMONY_TEMPLATE, _START, _HARMONY, "Need 2+2.", "4 ", (),
    ),
    "gpt-oss two thoughts": Sample(
        "openai", "openai_gptoss",
        f"<|channel|>analysis<|message|>One.<|end|>{_START}<|channel|>analysis<|message|>Two.<|end|>"
        f"{_START}<|channel|>final<|message|>Yes.",
        _HARMONY_TEMPLATE, _START, _HARMONY, "One.\nTwo.", "Yes.", (),
    ),
    "gpt-oss continued": Sample(
        "openai", "openai_gptoss", " world<|return|>",
        _HARMONY_TEMPLATE, f"{_START}<|channel|>final<|message|>Hello", _HARMONY, "", " world", (),
    ),
    "Gemma 4": Sample(
        "gemma4", "gemma4",
        "<|channel>thought\nhm\n<channel|>I look."
        '<|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>'
        "<|tool_call>call:sum{exact:true,numbers:[1,2.5]}<tool_call|><turn|>",
        _GEMMA_TEMPLATE, "<|turn>model\n", _GEMMA, "hm", "I look.",
    ),
    "Gemma 4 answer": Sample(
        "gemma4", "gemma4", "<|channel>thought\nhm<channel|>4", _GEMMA_TEMPLATE, "<|turn>model\n", _GEMMA, "hm", "4", (),
    ),
    "Gemma 4 without thinking": Sample(
        "gemma4", "gemma4", "4", _GEMMA_TEMPLATE, "<|turn>model\n<|channel>thought\n<channel|>", _GEMMA, "", "4", (),
    ),
    "Gemma 4 nested": Sample(
        "gemma4", "gemma4",
        '<|tool_call>call:f{a:{<|"|>b c<|"|>:[{d:<|"|>{x}, "y":<|"|>},null],e:-1.5},g:{},h:[]}<tool_call|>',
        _GEMMA_TEMPLATE, "<|turn>model\n", _GEMMA,
        calls=(("f", {"a": {"b c": [{"d": '{x}, "y":'}, None], "e": -1.5}, "g": {}, "h": []}),),
    ),
    "FunctionGemma": Sample(
        "functiongemma", "none",
        "<start_function_call>call:weather{city:<escape>Köln<escape>,days:3}<end_function_call>"
        "<start_function_call>call:sum{numbers:[1,2.5],exact:true}<end_function_call>",
        "<start_function_call>call:", "<start_of_turn>model\n",
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "Gemma 3": Sample("pythonic", "none", f"[{_PYTHON}]"),
    "DeepSeek V3": Sample(
        "deepseek_v3", "deepseek_r1",
        "<think>\nhm\n</think>\n\nI look.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Köln", "days": 3}\n```<｜tool▁call▁end｜>\n'
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>sum\n```json\n{"numbers": [1, 2.5], "exact": true}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜> </think>", "<｜Assistant｜>", _DS, "hm", "I look.",
    ),
    "DeepSeek V3.1": Sample(
        "deepseek_v31", "deepseek_v3",
        "hm</think>I look.<｜tool▁calls▁begin｜>"
        '<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Köln", "days": 3}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>sum<｜tool▁sep｜>{"numbers": [1, 2.5], "exact": true}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜tool▁calls▁begin｜> <think>", "<｜Assistant｜><think>", _DS, "hm", "I look.",
    ),
    "DeepSeek V3.1 without thinking": Sample(
        "deepseek_v31", "deepseek_r1", "Hello", "</think> <｜tool▁calls▁begin｜>", "<｜Assistant｜></think>", _DS, "", "Hello", (),
    ),
    "DeepSeek V3.2": Sample(
        "deepseek_v32", "deepseek_v3",
        "hm</think>I look.\n\n<｜DSML｜function_calls>\n"
        + _invoke_tags("｜DSML｜", (' string="true"', ' string="false"')) + "\n</｜DSML｜function_calls>",
        "<｜DSML｜function_calls> <think>", "<｜Assistant｜><think>", ("｜DSML｜",), "hm", "I look.",
    ),
    "DeepSeek V4": Sample(
        "deepseek_v4", "deepseek_v4",
        "<｜DSML｜tool_calls>\n" + _invoke_tags("｜DSML｜", (' string="true"', ' string="false"')) + "\n</｜DSML｜tool_calls>",
        "<｜DSML｜tool_calls> <think>", "</think>", ("｜DSML｜",),
    ),
    "MiniMax M2": Sample(
        "minimax_m2", "minimax_m2",
        f"hm\n</think>\n\nI look.\n<minimax:tool_call>\n{_invoke_tags()}\n</minimax:tool_call>",
        "<minimax:tool_call> <think>", "]~b]ai\n<think>\n", (), "hm", "I look.",
    ),
    "MiniMax M1": Sample(
        "minimax", "qwen3", f"<think>hm</think>\n<tool_calls>\n{_JSON}\n{_JSON_SUM}\n</tool_calls>", "<tool_calls> <think>",
        reasoning="hm",
    ),
    "Llama 3": Sample(
        "llama3_json", "none", f"<|python_tag|>{_PARAMETERS}; {_PARAMETERS_SUM}<|eom_id|>", "<|python_tag|>", "",
        ("<|python_tag|>", "<|eom_id|>"),
    ),
    "Llama 3 without a marker": Sample("llama3_json", "none", f"\n{_PARAMETERS}", "<|python_tag|>", calls=BOTH[:1]),
    "Llama 4": Sample(
        "llama4_pythonic", "none", f"<|python_start|>[{_PYTHON}]<|python_end|>", "<|python_start|>", "",
        ("<|python_start|>", "<|python_end|>", "<|eot|>"),
    ),
    "Llama 4 without a marker": Sample("llama4_pythonic", "none", f"[{_PYTHON}]", "<|python_start|>"),
    "Step 3": Sample(
        "step3", "step3",
        "hm\n</think>\nI look.<｜tool_calls_begin｜>"
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="weather"><steptml:parameter name="city">Köln'
        '</steptml:parameter><steptml:parameter name="days">3</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="sum"><steptml:parameter name="numbers">[1, 2.5]'
        '</steptml:parameter><steptml:parameter name="exact">true</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>",
        "<｜tool_calls_begin｜> <think>", "<|BOT|>assistant\n<think>\n",
        ("<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
        "hm", "I look.",
    ),
    "Step 3.5": Sample(
        "step3p5", "step3p5", f"hm\n</think>\nI look.\n{_function_tags('<tool_call>', '</tool_call>')}", "<tool_call> <think>",
        "<|im_start|>assistant\n<think>\n", ("<|im_end|>",), "hm", "I look.",
    ),
    "Qwen3": Sample(
        "hermes", "qwen3",
        f"<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_JSON_SUM}\n</tool_call><|im_end|>",
        "<tool_call> <think>", "<|im_start|>assistant\n", ("<|im_end|>",), "hm", "I look.",
    ),
    "Qwen3 without thinking": Sample(
        "hermes", "qwen3", "Hello", "<tool_call> <think>", "<|im_start|>assistant\n<think>\n\n</think>\n\n", (), "", "Hello", (),
    ),
    "Qwen3-Coder": Sample(
        "qwen3_coder", "none", f"I look.\n{_function_tags('<tool_call>', '</tool_call>')}\n", "<tool_call>", content="I look.",
    ),
    "Phi-4 mini": Sample("phi4_mini_json", "none", f"functools{_LIST}", "<|/tool|>"),
    "Phi-4 mini with markers": Sample(
        "phi4_mini_json", "none", f"<|tool_call|>{_LIST}<|/tool_call|>", "<|/tool|>", "", ("<|tool_call|>", "<|/tool_call|>"),
    ),
    "Granite 3": Sample(
        "granite", "granite",
        f"Here is my thought process:\n\nhm\n\nHere is my response:\n\nI look.<|tool_call|>{_LIST}",
        "Here is my thought process: <|tool_call|>", "<|start_of_role|>assistant<|end_of_role|>", ("<|tool_call|>",), "hm", "I look.",
    ),
    "Granite 3.3": Sample(
        "granite", "ernie45", "<think>hm</think><response>Hello</response>", "<|tool_call|> <think></think><response></response>",
        reasoning="hm", content="Hello", calls=(),
    ),
    "Granite 4": Sample(
        "granite4", "none", f"<tool_call>\n{_JSON}\n</tool_call>\n<tool_call>\n{_JSON_SUM}\n</tool_call>", "<tool_call>",
    ),
    "Granite 20B": Sample("granite-20b-fc", "none", f"<function_call> {_JSON}\n<function_call> {_JSON_SUM}", "<function_call>"),
    "Command A": Sample(
        "cohere_command3", "cohere_command3",
        "<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Köln", "days": 3}},\n'
        '    {"tool_call_id": "1", "tool_name": "sum", "parameters": {"numbers": [1, 2.5], "exact": true}}\n'
        "]<|END_ACTION|>",
        "<|START_THINKING|> <|START_ACTION|>", "<|CHATBOT_TOKEN|>", _COHERE, "hm",
    ),
    "Command A answer": Sample(
        "cohere_command3", "cohere_command3",
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Hello<|END_RESPONSE|>",
        "<|START_THINKING|> <|START_ACTION|>", "<|CHATBOT_TOKEN|>", _COHERE, "hm", "Hello", (),
    ),
    "Command R": Sample(
        "command_r", "none",
        'Action: ```json\n[\n{"tool_name": "weather", "parameters": {"city": "Köln", "days": 3}},\n'
        '{"tool_name": "sum", "parameters": {"numbers": [1, 2.5], "exact": true}}\n]```',
        "Write 'Action:' followed by a json-formatted list of actions",
    ),
    "Seed-OSS": Sample(
        "seed_oss", "seed_oss",
        f"<seed:think>hm</seed:think>I look.\n{_function_tags('<seed:tool_call>', '</seed:tool_call>')}",
        "<seed:think> <seed:tool_call>", "<seed:bos>assistant\n", (), "hm", "I look.",
    ),
    "ERNIE 4.5": Sample(
        "ernie45", "ernie45",
        f"hm\n</think>\n\n\n<tool_call>\n{_JSON}\n</tool_call>\n\n<tool_call>\n{_JSON_SUM}\n</tool_call>\n",
        "<tool_call> <think> <response>", "<|im_start|>assistant\n<think>\n", (), "hm",
    ),
    "ERNIE 4.5 answer": Sample(
        "ernie45", "ernie45", "hm\n</think>\n\n<response>\nHello\n</response>\n",
        "<tool_call> <think> <response>", "<|im_start|>assistant\n<think>\n", (), "hm", "Hello", (),
    ),
    "Hunyuan A13B": Sample(
        "hunyuan_a13b", "hunyuan_a13b", f"<think>\nhm\n</think>\n<answer>\nI look.\n<tool_calls>{_LIST}</tool_calls>\n</answer>",
        "<tool_calls> <think> <answer>", reasoning="hm", content="I look.",
    ),
    "Hunyuan A13B answer": Sample(
        "hunyuan_a13b", "hunyuan_a13b", "<think>\n\n</think>\n<answer>\nHello\n</answer>", "<tool_calls> <think> <answer>",
        content="Hello", calls=(),
    ),
    "Hy3": Sample(
        "hy_v3", "hy_v3",
        "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>sum<tool_sep>\n<arg_key>numbers</arg_key>\n<arg_value>[1, 2.5]</arg_value>\n"
        "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n</tool_calls>",
        "<tool_calls> <think>", "", ("<tool_calls>", "<tool_call>", "<tool_sep>", "</tool_call>", "</tool_calls>", "<arg_key>"),
    ),
    "InternLM 2": Sample(
        "internlm", "none", f"I look.<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>", "<|action_start|><|plugin|>", "",
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"), content="I look.", calls=BOTH[:1],
    ),
    "Kimi K2": Sample(
        "kimi_k2", "kimi_k2",
        "<think>hm</think>I look.<|tool_calls_section_begin|>"
        '<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Köln", "days": 3}<|tool_call_end|>'
        '<|tool_call_begin|>functions.sum:1<|tool_call_argument_begin|>{"numbers": [1, 2.5], "exact": true}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "<|tool_calls_section_begin|> <think>", "<|im_middle|>", _KIMI, "hm", "I look.",
    ),
    "Kimi K2 calls within the reasoning": Sample(
        "kimi_k2", "kimi_k2",
        "<think>hm<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Köln", "days": 3}<|tool_call_end|><|tool_calls_section_end|>',
        "<|tool_calls_section_begin|> <think>", "<|im_middle|>", _KIMI, "hm", "", BOTH[:1],
    ),
    "Kimi-VL": Sample("none", "kimi_vl", "◁think▷hm◁/think▷Hello", "◁think▷", reasoning="hm", content="Hello", calls=()),
    "GLM 4.5": Sample(
        "glm45", "glm45",
        "\n<think>hm</think>\nI look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>sum\n<arg_key>numbers</arg_key>\n"
        "<arg_value>[1, 2.5]</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>",
        "<tool_call> <think>", "<|assistant|>", ("<tool_call>", "<arg_key>", "</arg_key>", "</tool_call>"), "hm", "I look.",
    ),
    "GLM 4.7": Sample(
        "glm47", "glm47",
        "hm</think><tool_call>weather<arg_key>city</arg_key><arg_value>Köln</arg_value><arg_key>days</arg_key>"
        "<arg_value>3</arg_value></tool_call><tool_call>sum</tool_call>",
        "<tool_call> <think>", "<|assistant|><think>", (), "hm", calls=(BOTH[0], ("sum", {})),
    ),
    "Mistral": Sample("mistral", "none", f"[TOOL_CALLS] {_LIST}", "[TOOL_CALLS]", "", ("[TOOL_CALLS]", "</s>")),
    "Magistral": Sample(
        "mistral", "mistral",
        '[THINK]hm[/THINK]I look.[TOOL_CALLS]weather[ARGS]{"city": "Köln", "days": 3}'
        '[TOOL_CALLS]sum[CALL_ID]a1[ARGS]{"numbers": [1, 2.5], "exact": true}',
        "[THINK] [TOOL_CALLS]", "[/INST]", ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), "hm", "I look.",
    ),
    "Nemotron v2": Sample(
        "nemotron_json", "qwen3", f"hm\n</think>\n\n<TOOLCALL>{_LIST}</TOOLCALL>", "<TOOLCALL> <think>",
        "<SPECIAL_11>Assistant\n<think>\n", reasoning="hm",
    ),
    "Nemotron v3": Sample(
        "qwen3_coder", "nemotron_v3", f"hm\n</think>\n{_function_tags('<tool_call>', '</tool_call>')}", "<tool_call> <think>",
        "<|im_start|>assistant\n<think>\n", reasoning="hm",
    ),
    "Jamba": Sample("jamba", "none", f" <tool_calls>[\n    {_JSON},\n    {_JSON_SUM}\n]</tool_calls>", "<tool_calls>"),
    "xLAM": Sample("xlam", "none", _LIST),
    "xLAM in a code block": Sample("xlam", "qwen3", f"<think>hm</think>```json\n{_LIST}\n```", "", reasoning="hm"),
    "OLMo 3": Sample(
        "olmo3", "olmo3",
        'hm</think>I look.\n<function_calls>\nweather(city="Köln", days=3)\nsum(numbers=[1, 2.5],\n  exact=true)\n</function_calls>',
        "<function_calls> <think>", "<|im_start|>assistant\n<think>", (), "hm", "I look.",
    ),
    "LongCat": Sample(
        "longcat", "longcat",
        f"<longcat_think>\nhm\n</longcat_think>\nI look.\n<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>\n"
        f"<longcat_tool_call>{_JSON_SUM}</longcat_tool_call>",
        "<longcat_think> <longcat_tool_call>", reasoning="hm", content="I look.",
    ),
    "Apertus": Sample(
        "apertus", "apertus",
        "<|inner_prefix|>hm<|inner_suffix|>I look.<|tools_prefix|>"
        '[{"weather": {"city": "Köln", "days": 3}}, {"sum": {"numbers": [1, 2.5], "exact": true}}]<|tools_suffix|>',
        "<|inner_prefix|> <|tools_prefix|>", "<|assistant_start|>",
        ("<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"), "hm", "I look.",
    ),
    "LFM2": Sample(
        "lfm2", "none", f"<|tool_call_start|>[{_PYTHON}]<|tool_call_end|>I look.", "<|tool_call_start|>", "",
        ("<|tool_call_start|>", "<|tool_call_end|>"), content="I look.",
    ),
    "Holo2": Sample("none", "holo2", "hm\n</think>\n\nHello", "<think>", "<think>\n", reasoning="hm", content="Hello", calls=()),
    "GigaChat 3": Sample(
        "gigachat3", "none", f"I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{_JSON}", "function call<|role_sep|>", "",
        ("<|message_sep|>", "<|role_sep|>"), content="I look.", calls=BOTH[:1],
    ),
    "MiniCPM 5": Sample(
        "minicpm5", "qwen3",
        '<think>hm</think><function name="weather"><param name="city">Köln</param><param name="days">3</param></function>\n'
        '<function name="sum"><param name="numbers">[1, 2.5]</param><param name="exact">true</param></function>',
        "<function name= <think>", reasoning="hm",
    ),
    "Solar Open 2": Sample(
        "solar_open2", "solar_open2",
        "hm<|think:end|>I look.<|tool_call:start|>weather\n<|tool_arg:start|>city<|tool_arg:value|>Köln<|tool_arg:end|>\n"
        "<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>",
        "<|tool_call:start|> <|think:start|>", "<|think:start|>",
        ("<|tool_call:start|>", "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>", "<|think:end|>"), "hm", "I look.",
        calls=BOTH[:1],
    ),
    "Kimi K3": Sample(
        "kimi_k3", "kimi_k3", f"hm<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>{_K3_CALLS}<|end_of_msg|>",
        "<|open|>think<|sep|> <|open|>tools<|sep|>", "<|open|>think<|sep|>", _K3, "hm", "I look.",
    ),
    "Kimi K3 without text": Sample(
        "kimi_k3", "kimi_k3", f"hm<|close|>think<|sep|>{_K3_CALLS}<|end_of_msg|>", "", "<|open|>think<|sep|>", _K3, "hm",
    ),
    "Kimi K3 without reasoning": Sample(
        "kimi_k3", "kimi_k3", "Köln & 3<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>", "",
        "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>", _K3, content="Köln & 3", calls=(),
    ),
    "Kimi K3 with a block of JSON": Sample(
        "kimi_k3", "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>json type="object"<|sep|>'
        '{"city": "Köln", "days": 3}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "", "<|open|>think<|sep|><|close|>think<|sep|>", _K3, calls=BOTH[:1],
    ),
    "MiniMax M3": Sample(
        "minimax_m3", "minimax_m3",
        f"<mm:think>hm</mm:think>I look.\n{_M3}<tool_call>\n{_M3}<invoke name=\"weather\">{_M3}<city>Köln{_M3}</city>"
        f"{_M3}<days>3{_M3}</days>{_M3}</invoke>\n{_M3}<invoke name=\"sum\">{_M3}<numbers>{_M3}<item>1{_M3}</item>"
        f"{_M3}<item>2.5{_M3}</item>{_M3}</numbers>{_M3}<exact>true{_M3}</exact>{_M3}</invoke>\n{_M3}</tool_call>",
        f"<mm:think> {_M3}<tool_call>", "", (_M3,), "hm", "I look.",
    ),
    "Inkling": Sample(
        "inkling", "inkling",
        "<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>I look.<|end_message|>"
        f"<|message_model|>weather<|content_invoke_tool_json|>{_JSON.replace('arguments', 'args')}<|end_message|>"
        f"<|message_model|>sum<|content_invoke_tool_json|>{_JSON_SUM.replace('arguments', 'args')}<|end_message|>"
        "<|content_model_end_sampling|>",
        "<|content_thinking|> <|content_invoke_tool_json|>", "<|message_model|>", _INKLING, "hm", "I look.",
    ),
    "Inkling with text after the calls": Sample(
        "inkling", "inkling",
        f"weather<|content_invoke_tool_json|>{_JSON.replace('arguments', 'args')}<|end_message|>"
        "<|message_model|><|content_thinking|>hm<|end_message|><|message_model|><|content_text|>Done.<|content_model_end_sampling|>",
        "", "<|message_model|>", _INKLING, "hm", "Done.", BOTH[:1],
    ),
    "Inkling without a kind": Sample(
        "inkling", "inkling", "Four.<|end_message|>", "", "<|message_model|>", _INKLING, content="Four.", calls=(),
    ),
    "dots": Sample(
        "dots", "qwen3", f"<think>hm</think>\nI look.<dots_function_call>\n{_invoke_tags()}\n</dots_function_call>",
        "<dots_function_call> <think>", "", (), "hm", "I look.",
    ),
    "ZAYA": Sample(
        "zaya_xml", "qwen3", _function_tags("<zyphra_tool_call>", "</zyphra_tool_call>"),
        "<zyphra_tool_call>",
    ),
    "Apriel": Sample(
        "hunyuan_a13b", "apriel",
        f"hm\n[BEGIN FINAL RESPONSE]\nI look.\n<tool_calls>{_LIST}</tool_calls>\n[END FINAL RESPONSE]\n<|end|>",
        "Here are my reasoning steps: <tool_calls>", "<|begin_assistant|>\nHere are my reasoning steps:\n", ("<|end|>",), "hm", "I look.",
    ),
}  # fmt: skip
