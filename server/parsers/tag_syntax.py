"""Parsers of tool calls that are written in tags or between tokens; see `call_syntax`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from .call_syntax import Parse, function_name, make_call, parse_json
from .pieces import Call
from .values import Functions, argument_schema, load_json, typed_value


def _split_blocks(text: str, begin: str, end: str) -> tuple[list[str], str]:
    """Return the texts before end tags, and the text after the last one. If nothing begins before an end, it is in a value."""
    *parts, other = text.split(end)
    blocks = list[list[str]]()
    for part in parts:
        if blocks and begin not in part:
            blocks[-1].append(part)
        else:
            blocks.append([part])
    return [end.join(block) for block in blocks], other


def _fields(text: str, begin: str, middle: str, end: str) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs in any number of `begin KEY middle VALUE end`, and the other text.

    It takes time in proportion to the text; a regular expression would take its cube.
    """
    blocks, other = _split_blocks(text, begin, end)
    pairs, others = [], []
    for block in blocks:
        before, _, field = block.partition(begin)
        key, separator, value = field.partition(middle)
        if not separator:
            raise ValueError(f"{begin} or {middle} is missing")
        pairs.append((key, value))
        others.append(before)
    return pairs, "".join(others) + other


def _typed_call(name: str, pairs: Sequence[tuple[str, str]], functions: Functions) -> Call:
    """Return a call whose arguments are written without quotes."""
    name = function_name(name, functions)
    return make_call(name, {key: _typed(value, functions, name, key) for key, value in pairs}, functions)


def _typed(value: str, functions: Functions, name: str, key: str) -> Any:
    return typed_value(value, argument_schema(functions, name, key), functions.get(name, {}))


def _without_break(value: str) -> str:
    """Return a value without the line breaks next to its tags."""
    return value.removeprefix("\n").removesuffix("\n")


def tags(function: str, function_end: str, parameter: str, parameter_end: str) -> Parse:
    """Return a parser of tags such as `<function=NAME><parameter=KEY>VALUE</parameter></function>`.

    A name may be in quotes, and attributes may follow it: `string="true"` says that a value is a string, `string="false"` that
    it is JSON.
    """

    def value_of(key: str, value: str, name: str, functions: Functions) -> tuple[str, Any]:
        key, attributes = _parameter_name(key)
        if "string=" in attributes:
            return key, value if '"true"' in attributes else load_json(value)
        return key, _typed(_without_break(value), functions, name, key)

    def parse(text: str, functions: Functions) -> list[Call]:
        blocks, after = _split_blocks(text, function, function_end)
        is_closed = bool(blocks)
        if not blocks:  # some models leave out the end of the function
            blocks, after = [text], ""
        calls = []
        for block in blocks:
            before, opening, block = block.partition(function)
            name, closed, body = block.partition(">")
            name = function_name(name, functions)
            parameter_names = functions.get(name, {}).get("properties") or ()
            pairs, other = _parameters(body, parameter, parameter_end, is_closed, parameter_names)
            if before.strip() or not opening or not closed or other.strip():
                raise ValueError("there is text outside of the tags")
            values = dict(value_of(key, value, name, functions) for key, value in pairs)
            calls.append(make_call(name, values, functions))
        if after.strip():
            raise ValueError("there is text after the calls")
        return calls

    return parse


def _parameters(
    text: str, begin: str, end: str, is_closed: bool, parameter_names: Collection[str]
) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs in any number of `begin KEY>VALUE end`, and the other text.

    A value may have the end tag in it: it goes on until the last one before the next parameter. Models leave out an end now and
    then. In a function that is closed, a parameter therefore also ends where the function does,
    or where a known parameter begins that the function lacks so far.
    """
    pairs: list[tuple[str, list[str]]] = []
    names: set[str] = set()
    *blocks, last = text.split(end)
    others = []
    for block in [*blocks, last] if is_closed else blocks:
        before, *fields = block.split(begin)
        goes_on = (
            bool(pairs)
            and block is not last
            and (not fields or (bool(before.strip()) and _is_unknown(fields[0], parameter_names)))
        )
        if not fields and block is not last and not goes_on:
            raise ValueError(f"{begin} is missing")
        if goes_on:
            pairs[-1][1].append(end + block)
            continue
        others.append(before)
        for number, field in enumerate(fields):
            key, closed, value = field.partition(">")
            name = _parameter_name(key)[0]
            if number and not (closed and is_closed and name in parameter_names and name not in names):
                pairs[-1][1].append(begin + field)
            elif not closed:
                raise ValueError(f"the name after {begin} does not end")
            else:
                pairs.append((key, [value]))
                names.add(name)
    return [(key, "".join(values)) for key, values in pairs], "".join(others) + ("" if is_closed else last)


def _is_unknown(field: str, parameter_names: Collection[str]) -> bool:
    """Return whether the schema has parameters, but none of the name at the start of a field."""
    return bool(parameter_names) and _parameter_name(field.partition(">")[0])[0] not in parameter_names


def _parameter_name(key: str) -> tuple[str, str]:
    """Return the name of a parameter, which may be in quotes, and the attributes after it."""
    name, _, attributes = key.strip().lstrip('"').partition('"')
    return name, attributes


parse_function_tags = tags("<function=", "</function>", "<parameter=", "</parameter>")
parse_invoke_tags = tags("<invoke name=", "</invoke>", "<parameter name=", "</parameter>")


def parse_tagged(text: str, functions: Functions) -> list[Call]:
    """Parse JSON, `<function=NAME><parameter=KEY>...`, or `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>`."""
    text = text.strip()
    if text.startswith(("{", "[")):
        return parse_json(text, functions)
    if text.startswith("<function="):
        return parse_function_tags(text, functions)
    if text.startswith("<invoke name="):
        return parse_invoke_tags(text, functions)
    name, opening, rest = text.partition("<arg_key>")
    pairs, other = _fields(opening + rest, "<arg_key>", "</arg_key>", "</arg_value>")
    if other.strip():
        raise ValueError("there is text outside of the tags")
    values = [(key.strip(), value.lstrip().removeprefix("<arg_value>")) for key, value in pairs]
    return [_typed_call(name, values, functions)]


def parse_call_list(text: str, functions: Functions) -> list[Call]:
    """Parse JSON, or `<tool_call>` blocks with tags (Hunyuan's newer format)."""
    if "<tool_call>" not in text:
        return parse_json(text, functions)
    blocks, after = _split_blocks(text, "<tool_call>", "</tool_call>")
    calls = []
    for block in blocks:
        before, _, body = block.partition("<tool_call>")
        name, _, rest = body.partition("<tool_sep>")
        if before.strip():
            raise ValueError("there is text between the calls")
        calls += parse_tagged(name.strip() + rest.strip(), functions)
    if after.strip() or not calls:
        raise ValueError("there is text after the calls")
    return calls


def parse_sections(text: str, functions: Functions) -> list[Call]:
    """Parse `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, any number of times."""
    pairs, other = _fields(text, "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>")
    if not pairs or other.strip():
        raise ValueError("there are no calls, or other text")
    names = [re.sub(r":\d+$", "", name.strip()) for name, _ in pairs]
    return [make_call(name, load_json(value), functions) for name, (_, value) in zip(names, pairs, strict=True)]


def parse_deepseek(text: str, functions: Functions) -> list[Call]:
    """Parse sections of `NAME<｜tool▁sep｜>{...}` (V3.1), or `function<｜tool▁sep｜>NAME` and a code block of JSON (R1, V3)."""
    pairs, other = _fields(text, "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    if not pairs or other.strip():
        raise ValueError("there are no calls, or other text")
    calls = []
    for name, value in pairs:
        before, block, code = value.partition("```json")
        if block and name.strip() == "function":
            name, value = before, code.strip().removesuffix("```")
        calls.append(make_call(name, load_json(value), functions))
    return calls


def parse_step3(text: str, functions: Functions) -> list[Call]:
    """Parse `<｜tool_call_begin｜>function<｜tool_sep｜>` and tags of StepFun's `steptml` namespace, in sections."""
    pairs, other = _fields(text, "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
    if not pairs or other.strip():
        raise ValueError("there are no calls, or other text")
    return [call for _, value in pairs for call in _step_tags(value.strip(), functions)]


_step_tags = tags("<steptml:invoke name=", "</steptml:invoke>", "<steptml:parameter name=", "</steptml:parameter>")


def parse_arguments_by_marker(text: str, functions: Functions) -> list[Call]:
    """Parse the name on the first line, then `<|tool_arg:start|>KEY<|tool_arg:value|>VALUE<|tool_arg:end|>` (Solar Open 2)."""
    name, opening, rest = text.partition("<|tool_arg:start|>")
    pairs, other = _fields(opening + rest, "<|tool_arg:start|>", "<|tool_arg:value|>", "<|tool_arg:end|>")
    if other.strip():
        raise ValueError("there is text outside of the arguments")
    return [_typed_call(name, pairs, functions)]


TAG_MARK = "]<]minimax[>["
"""A token before each tag of MiniMax M3, so that values may have tags of their own in them."""


@dataclasses.dataclass
class _Tag:
    name: str
    text: str = ""
    inner: list[_Tag] = dataclasses.field(default_factory=list)


def parse_marked_tags(text: str, functions: Functions) -> list[Call]:
    """Parse `<invoke name="NAME">` with a tag around each value, with a mark before every tag (MiniMax M3).

    Tags in a value are the keys of an object, or the entries of a list if they are named `item`.
    """
    calls = []
    for invoke in _marked_tree(text).inner:
        name, opened, quoted = invoke.name.partition("invoke name=")
        if name or not opened or invoke.text.strip():
            raise ValueError("there is text outside of the tags")
        name = function_name(quoted, functions)
        schema = functions.get(name, {})
        arguments = _object_of(invoke.inner, schema, schema)
        calls.append(make_call(name, arguments, functions))
    if not calls:
        raise ValueError("there are no calls")
    return calls


def _marked_tree(text: str) -> _Tag:
    """Return a tag that holds the outermost tags of a text."""
    before, *parts = text.split(TAG_MARK)
    stack = [_Tag("")]
    for part in parts:
        head, closed, rest = part.partition(">")
        if not closed or head[:1] != "<":
            raise ValueError("a mark stands before no tag")
        if head[1:2] != "/":
            stack.append(_Tag(head[1:].strip(), rest))
            stack[-2].inner.append(stack[-1])
        elif len(stack) == 1 or head[2:].strip() != stack.pop().name.partition(" ")[0] or rest.strip():
            raise ValueError("a tag ends that has not begun, or text follows")
    if len(stack) > 1 or before.strip():
        raise ValueError("a tag does not end, or there is text before the first")
    return stack[0]


def _object_of(tags: Sequence[_Tag], schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of tags by their names; a name that repeats has a list."""
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    values = dict[str, list[Any]]()
    for tag in tags:
        of_tag = properties.get(tag.name) if isinstance(properties, Mapping) else None
        values.setdefault(tag.name, []).append(_tag_value(tag, of_tag, root))
    return {name: entries[0] if len(entries) == 1 else entries for name, entries in values.items()}


def _tag_value(tag: _Tag, schema: Any, root: Mapping[str, Any]) -> Any:
    if not tag.inner:
        return typed_value(tag.text, schema, root)
    if tag.text.strip():
        raise ValueError("a value has text and tags")
    if any(inner.name != "item" for inner in tag.inner):
        return _object_of(tag.inner, schema, root)
    of_entries = schema.get("items") if isinstance(schema, Mapping) else None
    return [_tag_value(inner, of_entries, root) for inner in tag.inner]


def parse_open_close(text: str, functions: Functions) -> list[Call]:
    """Parse `<|open|>call tool="NAME"<|sep|>` with arguments as text or JSON, or with one block of JSON (Kimi K3).

    An argument is `<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>`.
    """
    body, end, after = text.rpartition("<|close|>tools<|sep|>")
    blocks, other = _split_blocks(body if end else text, "<|open|>call ", "<|close|>call<|sep|>")
    if not blocks or other.strip() or (end and after.strip() not in ("", "<|close|>message<|sep|>")):
        raise ValueError("there are no calls, or other text")
    return [_open_close_call(block, functions) for block in blocks]


def _open_close_call(block: str, functions: Functions) -> Call:
    before, _, rest = block.partition("<|open|>call ")
    attributes, _, body = rest.partition("<|sep|>")
    name = function_name(_attribute(attributes, "tool"), functions)
    pairs, other = _fields(body, "<|open|>argument ", "<|sep|>", "<|close|>argument<|sep|>")
    if before.strip():
        raise ValueError("there is text between the calls")
    if not pairs and other.strip():
        ((kind, value),) = _fields(body, "<|open|>json ", "<|sep|>", "<|close|>json<|sep|>")[0]
        return make_call(name, load_json(value), functions)
    if other.strip():
        raise ValueError("there is text between the arguments")
    values = {}
    for attributes, value in pairs:
        key, kind = _attribute(attributes, "key"), _attribute(attributes, "type", "")
        values[key] = value if kind == "string" else load_json(value) if kind else _typed(value, functions, name, key)
    return make_call(name, values, functions)


def _attribute(attributes: str, name: str, default: str | None = None) -> str:
    """Return an attribute, in which `"` and `&` are escaped."""
    match = re.search(rf'\b{name}="([^"]*)"', attributes)
    if match is None:
        if default is None:
            raise ValueError(f"{name} is missing")
        return default
    return match[1].replace("&quot;", '"').replace("&amp;", "&")
