"""The sandbox of chat templates: it limits time and memory, and keeps apart what the template and what the caller wrote."""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2.ext
from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.filters import do_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context

from ...callers.errors import CheckpointError, InputError, check_utf8, clip, short_repr
from .content_format import template_format
from .template_text import TemplateText

MAX_SOURCE = 1 << 20  # characters of a template
_MAX_WORK = 16  # characters that a rendering may make, per character of the longest prompt
_MAX_BITS = 1 << 12  # of an integer
_WIDTH = re.compile(r"\*|\d{4}")  # in a format: a width that is given as an argument or has four digits
_REFUSED_FILTERS = ("batch", "slice", "pprint", "urlize", "wordwrap", "xmlattr")
_REFUSED_METHODS = ("expandtabs", "format_map", "translate")


class _CodeGenerator(CodeGenerator):
    """Marks the template's own text, and counts steps and sizes."""

    environment: Sandbox

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        self.write(self.environment.constant(node.as_const(frame.eval_ctx)))

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(self.environment.constant(node.as_const(frame.eval_ctx)))

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if _escapes(frame):
            super().visit_Concat(node, frame)
        else:
            self._write_call("environment.concat_any((", node.nodes, "))", frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._write_call("environment.sized([", node.items, "])", frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._write_call("environment.sized((", node.items, "))", frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("environment.sized(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:
            step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
            node.test = nodes.And(step, node.test)
        super().visit_For(node, frame)

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.step()")
        super().blockvisit(nodes, frame)

    def _write_call(self, start: str, items: Sequence[nodes.Node], end: str, frame: Frame) -> None:
        self.write(start)
        for item in items:
            self.visit(item, frame)
            self.write(", ")
        self.write(end)

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self.environment.constant("".join(map(str, group)))

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if _escapes(frame):
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.as_text(")


def _escapes(frame: Frame) -> bool:
    return bool(frame.eval_ctx.volatile or frame.eval_ctx.autoescape)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks an assistant's text for training; it is rendered as its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # without the values, which may hold each other many times


class Sandbox(ImmutableSandboxedEnvironment):
    """One template with the settings and helpers that published templates expect."""

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset("+*%") | {"**"}

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
        self._constants: list[Any] = []
        self._render = threading.local()
        self.binop_table |= {"+": self._add, "*": self._multiply, "%": self._modulo, "**": self._power}
        self.globals |= {"raise_exception": _refuse, "strftime_now": _now, "namespace": _Namespace}
        del self.globals["lipsum"]
        self.filters |= {"tojson": _to_json, "join": _join, "format": self._format}
        for name in _REFUSED_FILTERS:
            del self.filters[name]
        self.filters = {name: self._limited(function) for name, function in self.filters.items()}

    def load(self, source: str) -> None:
        self._begin(1 << 20)
        self._template, self.reads = self.from_string(source), template_format(self.parse(source))

    def render(self, context: Mapping[str, Any], most: int, max_seconds: float) -> TemplateText:
        """Return the prompt, of at most `most` characters."""
        self._begin(most, max_seconds)
        text = TemplateText.concat([TemplateText(""), self._template.render(**context)])
        if len(text) > most:
            raise _too_large(most)
        assert isinstance(text, TemplateText)
        return text

    def _begin(self, most: int, max_seconds: float = 10.0) -> None:
        self._render.most, self._render.left = most, _MAX_WORK * most
        self._render.seconds, self._render.deadline = max_seconds, time.monotonic() + max_seconds

    # called by the generated code

    def constant(self, value: Any) -> str:
        """Return code for a constant of the template."""
        if value is None or isinstance(value, bool | int | float):
            return repr(value)
        self._constants.append(_written(value))
        return f"environment._constants[{len(self._constants) - 1}]"

    def step(self) -> bool:
        self._spend(1)
        if time.monotonic() > self._render.deadline:
            reason = f"the chat template takes more than {self._render.seconds:g} s (<<max_template_seconds>>)"
            reason += "; shorten the messages or simplify the template"
            raise InputError(reason, param="chat_template")
        return True

    def concat(self, texts: Iterable[str]) -> str:
        texts = list(texts)
        self._spend(sum(map(len, texts)))
        return TemplateText.concat(texts)

    def concat_any(self, values: Iterable[Any]) -> str:
        return self.concat(map(self.as_text, values))

    def as_text(self, value: Any) -> str:
        """Return a value as output. Digits of integers, such as the number of an image, count as the template's."""
        if isinstance(value, str):
            return value if isinstance(value, TemplateText) else str.__str__(value)
        if type(value) is int:
            return TemplateText.written(str(value))
        return str(self.sized(value))

    def sized(self, value: Any) -> Any:
        """Count everything inside a value, shared parts each time they occur, and return the value."""
        values: list[Any] = [value]
        while values:
            item = values.pop()
            self._spend(1 + (len(item) if isinstance(item, str) else 0))
            if isinstance(item, Mapping):
                values += [*item, *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                values += item
        return value

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str):
            if name in _REFUSED_METHODS:
                raise SecurityError(f"templates cannot call {name}")
            self._check_widths(*args)
            if name == "replace" and len(args) > 1:
                self._check_replace(owner, *args[:2])
            if name == "join" and args:
                args = (list(args[0]),)
                self._spend(len(owner) * len(args[0]))
        return self._counted(super().call(context, function, *args, **kwargs), walk=function is dict)

    def wrap_str_format(self, value: Any) -> Any:
        """Return `str.format` without wide fields."""
        wrapped = super().wrap_str_format(value) if isinstance(value, MethodType | BuiltinMethodType) else None
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            template = value.__self__
            if _WIDTH.search(template) or any(
                _WIDTH.search(str(argument)) for argument in (*args, *kwargs.values()) if "{:{" in template
            ):
                raise SecurityError("templates format with widths below 1000")
            self.sized((args, kwargs))
            return _interpolate(template, "{}", args) or str(wrapped(*args, **kwargs))

        return limited

    # limits

    def _spend(self, amount: int) -> None:
        self._render.left -= amount
        if self._render.left < 0:
            raise _too_large(self._render.most)

    def _counted(self, result: Any, walk: bool = False) -> Any:
        if walk:
            return self.sized(result)
        self._spend(len(result) if isinstance(result, str | list | tuple | dict) else 1)
        return result

    def _check_widths(self, *values: Any) -> None:
        if any(isinstance(value, int) and abs(value) > self._render.most for value in values):
            raise _too_large(self._render.most)

    def _check_replace(self, text: str, old: Any, new: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self._spend(text.count(old) * len(new))

    def _limited(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that counts its result. Its arguments may begin with Jinja's own."""
        name = function.__name__
        offset = int(hasattr(function, "jinja_pass_arg"))

        @functools.wraps(function)
        def limited(*args: Any, **kwargs: Any) -> Any:
            arguments = args[offset:]
            if name in ("do_center", "do_truncate"):
                self._check_widths(*arguments[1:], *kwargs.values())
            if name == "do_indent":
                width = arguments[1] if len(arguments) > 1 else kwargs.get("width", 4)
                self._spend((str(arguments[0]).count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
            if name == "do_replace" and len(arguments) > 2:
                self._check_replace(str(arguments[0]), arguments[1], arguments[2])
            if name == "_join":
                values, sep = list(arguments[0]), arguments[1] if len(arguments) > 1 else kwargs.get("d", "")
                self._spend(len(values) * len(str(sep)))
                args = (*args[:offset], values, *arguments[1:])
            if name in ("soft_str", "_to_json"):
                self.sized(arguments)
            return self._counted(function(*args, **kwargs))

        return limited

    def _add(self, left: Any, right: Any) -> Any:
        return self._counted(left + right, walk=isinstance(left, list | tuple))

    def _multiply(self, left: Any, right: Any) -> Any:
        for repeated, count in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(count, int):
                self._spend(len(repeated) * max(0, count))
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
            raise SecurityError(f"templates compute with integers of at most {_MAX_BITS} bits")
        return self._counted(left * right, walk=True)

    def _power(self, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > _MAX_BITS:
            raise SecurityError(f"templates compute with integers of at most {_MAX_BITS} bits")
        return left**right

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        return self._modulo(str(value), kwargs or args)

    def _modulo(self, left: Any, right: Any) -> Any:
        if not isinstance(left, str):
            return left % right
        if _WIDTH.search(left):
            raise SecurityError("templates format with widths below 1000")
        self.sized(right)
        return self._counted(_interpolate(left, "%s", right if isinstance(right, tuple) else (right,)) or left % right)


def _interpolate(pattern: str, field: str, values: Sequence[Any]) -> str | None:
    """Return a format that has only plain fields with these values in them; None for any other format."""
    parts = pattern.split(field)
    if len(parts) != len(values) + 1 or any(mark in part for part in parts for mark in "%{}"):
        return None
    return TemplateText.concat(
        [parts[0], *(text for value, part in zip(values, parts[1:], strict=True) for text in (str(value), part))]
    )


def _written(value: Any) -> Any:
    """Return a constant with its texts marked as the template's."""
    if isinstance(value, str):
        return TemplateText.written(value)
    if isinstance(value, dict):
        return {_written(key): _written(item) for key, item in value.items()}
    return type(value)(map(_written, value)) if isinstance(value, list | tuple) else value


def _too_large(most: int) -> InputError:
    reason = f"the chat template makes more text than a prompt of {most} characters needs; shorten the messages or simplify it"
    return InputError(reason, code="too_long", param="chat_template", limit=most)


def _refuse(message: str) -> None:
    raise TemplateError(clip(message, 200) if isinstance(message, str) else short_repr(message, 200))


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern[:100])


@pass_eval_context
def _join(context: Any, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    """Replace Jinja's filter, whose default separator is no TemplateText."""
    sep = str(d)
    return str(do_join(context, value, sep if isinstance(sep, TemplateText) else TemplateText(sep), attribute))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Replace Jinja's filter, which escapes HTML."""
    if len(str(separators)) > 40 or (indent is not None and not 0 <= indent <= 16):
        raise SecurityError("tojson takes an indent of at most 16 and short separators")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=32)
def load_template(source: str) -> Sandbox:
    """Compile a template. CheckpointError if that fails."""
    check_utf8(source, "chat_template")
    if len(source) > MAX_SOURCE:
        raise CheckpointError(f"the chat template has {len(source)} characters; give one of at most {MAX_SOURCE}")
    sandbox = Sandbox()
    try:
        sandbox.load(source)
    except InputError:
        raise
    except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError, OverflowError) as error:
        raise CheckpointError(f"the chat template cannot be compiled: {clip(str(error), 200)}") from None
    return sandbox
