"""Exceptions as plain data, which a process sends to another one."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from ...callers import errors
from ...callers.errors import SensoriumError


def describe_error(error: BaseException) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return an exception as plain data: class name, arguments and attributes."""
    if isinstance(error, SensoriumError):
        return type(error).__name__, error.args, error.__dict__
    return type(error).__name__, (str(error),), {}


def restore_error(name: str, arguments: Sequence[Any], state: dict[str, Any]) -> BaseException:
    """Return the exception that `describe_error` has described. Unknown classes become RuntimeErrors."""
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {' '.join(map(str, arguments))}")
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error
