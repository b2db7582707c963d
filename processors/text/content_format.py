"""Detects, from a chat template's syntax tree, the types of contents and of tool-call arguments that it expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jinja2 import nodes

Format = Literal["string", "parts", "any"]
_PART_FILTERS = ("selectattr", "rejectattr", "map")
_OBJECT_FILTERS = ("tojson", "items", "dictsort")
_OBJECT_METHODS = ("items", "keys", "values", "get")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with its reasoning: those of DeepSeek, vLLM and gpt-oss."""
_MAX_NAMES = 8  # longest chain of assignments (a = b, c = a, ...) that is followed


@dataclass(frozen=True)
class TemplateFormat:
    """The forms of values that a template reads.

    Args:
        content: "string", "parts" (a list of parts), or "any" if the template distinguishes them.
        tools: the template reads `tools`.
        text_arguments: the template writes the arguments of tool calls unchanged, so they must be JSON as text.
        reasoning: the fields from which it reads the reasoning of a message, of REASONING_FIELDS.
    """

    content: Format
    tools: bool
    text_arguments: bool
    reasoning: tuple[str, ...] = ()


def template_format(root: nodes.Template) -> TemplateFormat:
    """Return what a template reads: a template that loops over a message's content, or takes one of its parts, reads parts.

    The approach is vLLM's; macros and the test `is string` are followed, too.
    """
    is_content = _finder(root, "content")
    reads_parts = (
        any(is_content(loop.iter) for loop in root.find_all(nodes.For))
        or any(is_content(node.node) for node in root.find_all(nodes.Getitem) if _is_index(node.arg))
        or any(is_content(node.node) for node in root.find_all(nodes.Filter) if node.name in _PART_FILTERS)
    )
    tests_string = _tests_string(root, is_content)
    content: Format = "string" if not reads_parts else "any" if tests_string else "parts"
    tools = any(name.name == "tools" for name in root.find_all(nodes.Name))
    return TemplateFormat(content, tools, _writes_arguments(root), _reasoning_fields(root))


def _reasoning_fields(root: nodes.Template) -> tuple[str, ...]:
    reads = list(root.find_all((nodes.Getattr, nodes.Getitem, nodes.Call)))
    return tuple(field for field in REASONING_FIELDS if any(map(_finder(root, field), reads)))


def _writes_arguments(root: nodes.Template) -> bool:
    is_arguments = _finder(root, "arguments")
    written = any(is_arguments(node) for node in root.find_all((nodes.Getattr, nodes.Getitem)))
    as_object = (
        any(is_arguments(loop.iter) for loop in root.find_all(nodes.For))
        or any(is_arguments(node.node) for node in root.find_all(nodes.Filter) if node.name in _OBJECT_FILTERS)
        or any(is_arguments(node.node) for node in root.find_all(nodes.Getattr) if node.attr in _OBJECT_METHODS)
        or any(is_arguments(node.node) for node in root.find_all(nodes.Test) if node.name == "mapping")
    )
    return written and not as_object and not _tests_string(root, is_arguments)


def _tests_string(root: nodes.Template, matches: Callable[[nodes.Node | None], bool]) -> bool:
    return any(matches(test.node) for test in root.find_all(nodes.Test) if test.name == "string")


def _finder(root: nodes.Template, key: str) -> Callable[[nodes.Node | None], bool]:
    """Return a function that says whether an expression is the field `key` of an object, filtered or under another name."""
    names: set[str] = set()

    def matches(node: nodes.Node | None) -> bool:
        match node:
            case nodes.Name(name=name):
                return name in names
            case nodes.Getattr(attr=attr):
                return attr == key
            case nodes.Getitem(arg=nodes.Const(value=value)):
                return bool(value == key)
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=value), *_]):
                return bool(value == key)
            case nodes.Filter(node=inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
                return matches(inner)
            case nodes.CondExpr(expr1=first, expr2=second) | nodes.Or(left=first, right=second):
                return matches(first) or matches(second)
        return False

    macros = {macro.name: macro.args for macro in root.find_all(nodes.Macro)}
    named = [(assignment.target, assignment.node) for assignment in root.find_all(nodes.Assign)]
    for call in root.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name):
            named += zip(macros.get(call.node.name, []), call.args, strict=False)
    for _ in range(_MAX_NAMES):
        matched = {target.name for target, value in named if isinstance(target, nodes.Name) and matches(value)}
        if matched <= names:
            break
        names |= matched
    return matches


def _is_index(node: nodes.Node) -> bool:
    return (isinstance(node, nodes.Const) and isinstance(node.value, int)) or isinstance(node, nodes.Neg)
