"""Values of arguments, and their JSON text."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

Functions = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters."""

_WORDS = {"True": True, "False": False, "None": None}  # as Python writes them
_MAX_DEPTH = 8  # of nested alternatives
_MAX_ALTERNATIVES = 256  # of a schema; a client's schema may be large, and an answer may have many arguments
_MAX_LITERAL = 1 << 16  # characters of a list or a dictionary as Python writes it
_SURROGATE = re.compile("[\ud800-\udfff]")


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


_decoder = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=lambda _: None)
decode_json = _decoder.raw_decode
"""Returns a JSON value and where it ends. Line breaks in strings are read; NaN and infinite numbers are null."""


def load_json(text: str) -> Any:
    """Return the JSON value of a whole text, read as `decode_json` does."""
    return _decoder.decode(text)


def dump_json(value: Any) -> str:
    """Return JSON text that every parser reads and UTF-8 can encode: a half of a surrogate pair becomes U+FFFD."""
    return joined_surrogates(json.dumps(value, ensure_ascii=False, allow_nan=False))


def joined_surrogates(text: str) -> str:
    """Return a text whose surrogate pairs are one character each, and whose other surrogates are U+FFFD."""
    if _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def argument_schema(functions: Functions, name: str, key: str) -> Any:
    """Return the schema of an argument; None if it is not known."""
    properties = functions.get(name, {}).get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def typed_value(text: str, schema: Any, root: Mapping[str, Any] = {}) -> Any:
    """Return a value of a type that the schema allows: the text itself if it may be a string and is no other value.

    Without types in the schema, the value is JSON or else the text.

    Args:
        root: the schema of all parameters, with the definitions that the schema refers to.
    """
    types = _types(schema, root, _MAX_DEPTH, iter(range(_MAX_ALTERNATIVES)))
    if types == frozenset(["string"]):
        return text
    stripped = text.strip()
    try:
        value = _WORDS[stripped] if stripped in _WORDS else load_json(stripped)
    except (ValueError, RecursionError):
        return _python_value(stripped, types, text)
    if value is None and stripped not in ("null", "None"):  # a number that JSON does not have
        return None if types and "null" in types and "string" not in types else text
    return value if not types or not types.isdisjoint(_names(value)) else text


def _python_value(stripped: str, types: frozenset[str] | None, text: str) -> Any:
    """Return a list or a dictionary that is written as in Python if the schema wants one, else the text."""
    if not types or types.isdisjoint(("array", "object")) or stripped[:1] not in "[{(" or len(stripped) > _MAX_LITERAL:
        return text
    try:
        value = constant(ast.parse(stripped, mode="eval").body)
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if not types.isdisjoint(_names(value)) else text


def constant(node: ast.expr) -> Any:
    """Return the value of a literal, with the constants of Python and JSON.

    Raises:
        ValueError, KeyError, TypeError: it is no literal, or no JSON value.
    """
    if isinstance(node, ast.Name):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [constant(entry) for entry in node.elts]
    if isinstance(node, ast.Dict):
        return {constant(key): constant(value) for key, value in zip(node.keys, node.values, strict=True) if key is not None}
    value = ast.literal_eval(node)
    json.dumps(value, allow_nan=False)
    return value


def _types(schema: Any, root: Mapping[str, Any], depth: int, budget: Iterator[int]) -> frozenset[str] | None:
    """Return the types that a schema allows; None if any type may be allowed.

    Args:
        depth: levels of alternatives and references to follow.
        budget: one number for each schema to look at; when it is used up, other schemas may allow any type.
    """
    if not isinstance(schema, Mapping) or depth < 0 or next(budget, None) is None:
        return None
    limits = [_named_types(schema)]
    if isinstance(reference := schema.get("$ref"), str):
        limits.append(_types(_referenced(root, reference), root, depth - 1, budget))
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        if not isinstance(options, Sequence) or isinstance(options, str) or not options:
            continue
        types = [_types(option, root, depth - 1, budget) for option in islice(options, _MAX_ALTERNATIVES)]
        if key == "allOf":
            limits += types
        else:
            limits.append(_union(types) if len(options) <= _MAX_ALTERNATIVES else None)
    limited = [limit for limit in limits if limit is not None]
    return (frozenset.intersection(*limited) or None) if limited else None


def _union(types: Sequence[frozenset[str] | None]) -> frozenset[str] | None:
    complete = [names for names in types if names is not None]
    return frozenset().union(*complete) if len(complete) == len(types) else None


def _named_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that the schema itself names, or those of its values; None without any."""
    kinds, values = schema.get("type"), schema.get("enum")
    if isinstance(kinds, str):
        names = {kinds}
    elif isinstance(kinds, Sequence):
        names = {kind for kind in islice(kinds, _MAX_ALTERNATIVES) if isinstance(kind, str)}
    elif "const" in schema:
        names = set(_names(schema["const"]))
    elif isinstance(values, Sequence):
        names = {name for value in islice(values, _MAX_ALTERNATIVES) for name in _names(value)}
    else:
        names = set()
    return frozenset(names | ({"integer"} if "number" in names else set())) or None


def _names(value: Any) -> tuple[str, ...]:
    """Return the names of a value's type in JSON schemas."""
    if value is None:
        return ("null",)
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return ("integer", "number")
    if isinstance(value, float):
        return ("number",)
    return ("string",) if isinstance(value, str) else ("object",) if isinstance(value, dict) else ("array",)


def _referenced(schema: Mapping[str, Any], reference: str) -> Any:
    """Return the definition that a reference such as "#/$defs/City" names."""
    value: Any = schema
    for name in reference.removeprefix("#/").split("/"):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
