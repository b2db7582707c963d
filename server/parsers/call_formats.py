"""How models write tool calls: a row for each format, with the markers around its calls and the syntax between them.

Sources: the chat templates of the published models, and their publishers' descriptions of the formats (OpenAI's harmony,
Google's FunctionGemma and Gemma 4, DeepSeek's encoding of V3.2, MiniMax's and Moonshot's guides to tool calls); for Kimi K3,
MiniMax M3, Inkling, dots and ZAYA the parsers of vLLM and SGLang. The table in docs/server.md lists the name of each row,
vLLM's names for it, and its markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from . import call_syntax as syntax
from . import tag_syntax

Bare = Callable[[str], bool | None]
"""Says of the beginning of an answer whether it is a call without a marker; None if more text is needed."""


@dataclass(frozen=True)
class CallFormat:
    """A way to write calls.

    Args:
        pairs: markers before and after a block of calls; a block without an end marker lasts until the end of the answer.
        parse: returns the calls of a block. It raises one of `call_syntax.NO_CALLS` for another text.
        inner: markers within a block. If they are special tokens, they are kept until the block is parsed.
        bare: how to recognise a call without a marker at the beginning of the answer.
        weak: begin markers that other texts also have, such as that of a block of JSON; only a call of a known function counts.
        parse_weak: the parser of blocks after these, and of calls without a marker; None for `parse`.
        in_reasoning: a call may begin within the reasoning, which goes on after it.
        openers: texts before the arguments of a block in tags. closers: the last tags of such a block.
        is_quoted: the block has JSON or Python, also if it begins without a bracket. quote: a token that stands for quotes.
        headers: as in `ReasoningFormat`.
        signs: texts in the templates of models that use the format; without any, the begin markers are the signs.
    """

    pairs: tuple[tuple[str, str | None], ...]
    parse: syntax.Parse
    inner: tuple[str, ...] = ()
    bare: Bare | None = None
    weak: tuple[str, ...] = ()
    parse_weak: syntax.Parse | None = None
    in_reasoning: bool = False
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    is_quoted: bool = False
    quote: str = ""
    headers: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()

    @property
    def begins(self) -> tuple[str, ...]:
        return tuple(begin for begin, _ in self.pairs)

    @property
    def strong_begins(self) -> tuple[str, ...]:
        """The begin markers that only calls have."""
        return tuple(begin for begin in self.begins if begin not in self.weak)

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.begins, *(end for _, end in self.pairs if end), *self.inner, *self.headers)

    def is_used_by(self, template: str) -> bool:
        """Return whether a chat template has a sign of the format."""
        return any(sign in template for sign in self.signs or self.begins)


def _starts_object(text: str) -> bool | None:
    return text.startswith("{")


def _starts_objects(text: str) -> bool | None:
    """Recognise `[{`, or `{`."""
    return True if text.startswith("{") else _matches(r"\[\s*(\{)?", text)


def _starts_python(text: str) -> bool | None:
    """Recognise `[NAME(`."""
    return _matches(r"\[\s*(?:[^\W\d][\w.]*\s*(\()?)?", text)


def _starts_either(text: str) -> bool | None:
    return True if text.startswith("{") else _starts_python(text)


def _matches(pattern: str, text: str) -> bool | None:
    """Return whether the pattern's group is there; None if the text ends before it."""
    match = re.match(pattern, text[:256])
    if match is None:
        return False
    return True if match[1] else None if match.end() == len(text) else False


def _prefixed(prefix: str, parse: syntax.Parse, suffix: str = "") -> syntax.Parse:
    """Return a parser of blocks whose begin and end markers belong to the syntax."""
    return lambda text, functions: parse(prefix + text + suffix, functions)


_SECTION = ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
_DSML = ("<｜DSML｜invoke name=", "</｜DSML｜invoke>", "<｜DSML｜parameter name=", "</｜DSML｜parameter>")
_ARGUMENT = ("<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>")
_PARAM = ("<function name=", "</function>", "<param name=", "</param>")
_ARG_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_ANY_OPENERS = ("<parameter=", "<parameter name=", "<arg_key>")
_ANY_CLOSERS = ("</function>", "</parameter>", "</invoke>", "</arg_value>")

HARMONY = CallFormat((), syntax.parse_json, signs=("<|channel|>",))
"""Calls are messages of their own, which `harmony.HarmonyReader` reads."""

FORMATS = {
    "harmony": HARMONY,
    "quote_tokens": CallFormat(
        (("<|tool_call>", "<tool_call|>"),), syntax.keyed('<|"|>'), ('<|"|>',), in_reasoning=True, quote='<|"|>'
    ),
    "escape_tokens": CallFormat(
        (("<start_function_call>", "<end_function_call>"),),
        syntax.keyed("<escape>"),
        ("<escape>",),
        in_reasoning=True,
        quote="<escape>",
    ),
    "sections": CallFormat(
        (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        tag_syntax.parse_sections,
        _SECTION,
        in_reasoning=True,
        is_quoted=True,
    ),
    "deepseek": CallFormat(
        (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
        tag_syntax.parse_deepseek,
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        in_reasoning=True,
        is_quoted=True,
    ),
    "dsml": CallFormat(
        (
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
        ),
        tag_syntax.tags(*_DSML),
        ("｜DSML｜",),
        in_reasoning=True,
        openers=_DSML[2:3],
        closers=(_DSML[1], _DSML[3]),
        signs=("｜DSML｜",),
    ),
    "step3": CallFormat(
        (("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),),
        tag_syntax.parse_step3,
        ("<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"),
        in_reasoning=True,
        openers=("<｜tool_call_begin｜>",),
        closers=("<｜tool_call_end｜>",),
    ),
    "invoke_tags": CallFormat(
        (("<minimax:tool_call>", "</minimax:tool_call>"),),
        tag_syntax.parse_invoke_tags,
        in_reasoning=True,
        openers=_ANY_OPENERS,
        closers=_ANY_CLOSERS,
    ),
    "dots_tags": CallFormat(
        (("<dots_function_call>", "</dots_function_call>"),),
        tag_syntax.parse_invoke_tags,
        openers=_ANY_OPENERS,
        closers=_ANY_CLOSERS,
    ),
    "marked_tags": CallFormat(
        ((f"{tag_syntax.TAG_MARK}<tool_call>", f"{tag_syntax.TAG_MARK}</tool_call>"),),
        tag_syntax.parse_marked_tags,
        (tag_syntax.TAG_MARK,),
        in_reasoning=True,
        openers=(f"{tag_syntax.TAG_MARK}<invoke name=",),
        closers=(f"{tag_syntax.TAG_MARK}</invoke>",),
    ),
    "open_close": CallFormat(  # it is the last part of a message
        (("<|open|>tools<|sep|>", None),), tag_syntax.parse_open_close, ("<|open|>", "<|close|>", "<|sep|>"), in_reasoning=True
    ),
    "typed_blocks": CallFormat(
        (("<|content_invoke_tool_json|>", "<|end_message|>"),),
        syntax.parse_json,
        in_reasoning=True,
        headers=("<|message_model|>",),
    ),
    "seed_tags": CallFormat(
        (("<seed:tool_call>", "</seed:tool_call>"),),
        tag_syntax.parse_tagged,
        in_reasoning=True,
        openers=_ANY_OPENERS,
        closers=_ANY_CLOSERS,
    ),
    "zyphra_tags": CallFormat(
        (("<zyphra_tool_call>", "</zyphra_tool_call>"),),
        tag_syntax.parse_tagged,
        openers=_ANY_OPENERS,
        closers=_ANY_CLOSERS,
    ),
    "longcat": CallFormat(
        (("<longcat_tool_call>", "</longcat_tool_call>"),),
        tag_syntax.parse_tagged,
        _ARG_TAGS,
        openers=_ANY_OPENERS,
        closers=_ANY_CLOSERS,
    ),
    "actions": CallFormat((("<|START_ACTION|>", "<|END_ACTION|>"),), syntax.parse_actions, in_reasoning=True),
    "command_r": CallFormat(
        (("Action: ```json", "```"), ("Action:```json", "```")),
        syntax.parse_actions,
        signs=("Write 'Action:' followed by",),
    ),
    "internlm": CallFormat(
        tuple((f"<|action_start|>{space}<|plugin|>", "<|action_end|>") for space in ("", " ")), syntax.parse_json
    ),
    "apertus": CallFormat((("<|tools_prefix|>", "<|tools_suffix|>"),), syntax.parse_named, in_reasoning=True),
    "nemotron_json": CallFormat((("<TOOLCALL>", "</TOOLCALL>"), ("<toolcall>", "</toolcall>")), syntax.parse_json),
    "python_block": CallFormat((("<|tool_call_start|>", "<|tool_call_end|>"),), syntax.parse_pythonic, is_quoted=True),
    "python_lines": CallFormat((("<function_calls>", "</function_calls>"),), syntax.parse_pythonic, is_quoted=True),
    "solar_open2": CallFormat(
        (("<|tool_call:start|>", "<|tool_call:end|>"),),
        tag_syntax.parse_arguments_by_marker,
        _ARGUMENT,
        in_reasoning=True,
        openers=_ARGUMENT[:1],
        closers=_ARGUMENT[2:],
    ),
    "gigachat3": CallFormat(
        (
            ("<|message_sep|>\n\nfunction call<|role_sep|>\n", None),
            ("function call<|role_sep|>\n", None),
            ("<|function_call|>", None),
        ),
        syntax.parse_json,
        signs=("function call<|role_sep|>", "<|function_call|>"),
    ),
    "python_start": CallFormat(
        (("<|python_start|>", "<|python_end|>"),), syntax.parse_pythonic, is_quoted=True, bare=_starts_either
    ),
    "python_tag": CallFormat(
        (("<|python_tag|>", None),),
        syntax.parse_json,
        bare=_starts_object,
        signs=("<|python_tag|>", '{"name": function name, "parameters": dictionary'),
    ),
    "json_mark": CallFormat(
        (("<|tool_call|>", "<|/tool_call|>"), ("<tool_call>", "</tool_call>"), ("functools[", None)),
        syntax.parse_open_list,
        signs=("<|tool_call|>", "<|/tool|>", "functools["),
    ),
    "granite_20b_fc": CallFormat((("<function_call>", None),), syntax.split_json("<function_call>")),
    "call_list": CallFormat(
        (("<tool_calls>", "</tool_calls>"),),
        tag_syntax.parse_call_list,
        ("<tool_call>", "</tool_call>", "<tool_sep>", *_ARG_TAGS),
        openers=("<tool_call>",),
        closers=("</tool_call>",),
    ),
    "bracketed": CallFormat((("[TOOL_CALLS]", None),), syntax.parse_bracketed, ("[ARGS]", "[CALL_ID]")),
    "tagged": CallFormat(
        (("<tool_call>", "</tool_call>"), ("<function=", "</tool_call>")),  # Qwen3-Coder sometimes leaves out <tool_call>
        tag_syntax.parse_tagged,
        _ARG_TAGS,
        weak=("<function=",),
        parse_weak=_prefixed("<function=", tag_syntax.parse_function_tags),
        openers=_ANY_OPENERS,
        closers=_ANY_CLOSERS,
        signs=("<tool_call>",),
    ),
    "function_tags": CallFormat(
        (("<function name=", "</function>"),),
        _prefixed("<function name=", tag_syntax.tags(*_PARAM), "</function>"),
        ("<param", "</param>"),
        openers=("<param name=",),
        closers=("</param>",),
        signs=("<function name=",),
    ),
    "object_list": CallFormat(
        (("[TOOL_CALLS]", None), ("<tool_call>", "</tool_call>"), ("```json", "```")),
        syntax.parse_json,
        bare=_starts_objects,
        weak=("```json",),
        parse_weak=syntax.parse_json_block,
    ),
    "pythonic": CallFormat((), syntax.parse_pythonic, bare=_starts_python),
}
"""Formats by name. Where a template has signs of several, the first one counts."""

_BY_NAME_ONLY = ("object_list", "pythonic")  # nothing in a template tells them


def find_format(template: str) -> CallFormat | None:
    """Return the format of which a chat template has a sign."""
    return next((row for name, row in FORMATS.items() if name not in _BY_NAME_ONLY and row.is_used_by(template)), None)
