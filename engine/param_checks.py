"""Checks of sampling parameters. Each error names the parameter and what it accepts."""

from __future__ import annotations

import numbers
from collections.abc import Collection, Mapping
from typing import Any

from ..callers.errors import ErrorCode, InputError, check_utf8, equals_one_of, short_repr
from ..callers.plain import builtin_copy

MAX_INT32 = 2**31 - 1
_MAX_STRINGS = 1024  # entries of a list

UnusedParams = Mapping[str, tuple[tuple[Any, ...], str]]
"""Unsupported parameters of vLLM -> accepted values, which change nothing, and the end of the error text for other values."""


def param_error(
    param: str, value: object, reason: str, code: ErrorCode = "invalid_value", limit: int | None = None
) -> InputError:
    shown = short_repr(value)
    return InputError(f"<<param=>>{shown} {reason}", code=code, param=param, limit=limit, value=shown)


def check_unused(unused: UnusedParams, name: str, value: object) -> None:
    accepted, reason = unused[name]
    if not equals_one_of(value, accepted):
        raise param_error(name, value, f"cannot be honoured: {reason}", code="unsupported")


def as_tuple(name: str, value: Collection[Any] | None, limit: int = _MAX_STRINGS, expected: str = "a list") -> tuple[Any, ...]:
    """Return a collection as a tuple. `form`: what the error says that the value must be."""
    values = () if value is None else value
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        raise param_error(name, value, f"must be {expected}")
    check_count(name, values, limit)
    copied: tuple[Any, ...] = builtin_copy(tuple(values), name)
    return copied


def check_count(name: str, values: Collection[object], limit: int) -> None:
    if len(values) > limit:
        raise InputError(
            f"<<param>> has {len(values)} entries; give at most {limit}",
            code="over_limit",
            param=name,
            limit=limit,
            value=len(values),
        )


def check_strings(name: str, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str) or not value:
            raise InputError(
                f"<<param>> holds {short_repr(value)}; every entry must be a non-empty string", code="invalid_value", param=name
            )
        check_utf8(value, name)
    return values


def check_token_ids(name: str, value: Collection[Any] | None, limit: int = _MAX_STRINGS) -> tuple[int, ...]:
    """Return token ids as a tuple. Raise InputError that names the parameter for anything else."""
    values = as_tuple(name, value, limit)
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_INT32:  # fast for a million
        return values
    return tuple(check_token(name, token) for token in values)


def check_token(name: str, value: object) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:  # keys of JSON objects
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) <= MAX_INT32:
        raise InputError(
            f"<<param>> holds {short_repr(value)}; token ids are integers from 0 to {MAX_INT32}",
            code="invalid_value",
            param=name,
        )
    return int(value)


def read_truncation(tokens: object, side: object) -> tuple[int | None, str | None]:
    """Return `truncate_prompt_tokens` and `truncation_side`. Raise InputError for a value that they cannot have."""
    if tokens is not None and not (isinstance(tokens, int) and not isinstance(tokens, bool) and (tokens == -1 or tokens > 0)):
        reason = "must be a number of tokens above 0, -1 for the model's maximum, or None"
        raise InputError(f"<<param=>>{short_repr(tokens, 40)} {reason}", code="invalid_value", param="truncate_prompt_tokens")
    if side is not None and not (isinstance(side, str) and side in ("left", "right")):
        reason = '"left" (the last tokens are kept) or "right" (the first)'
        raise InputError(f"<<param=>>{short_repr(side, 40)} must be {reason}", code="invalid_value", param="truncation_side")
    return tokens, None if side is None else str(side)
