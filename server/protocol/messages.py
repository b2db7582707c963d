"""Tools, which are objects within bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...mm.errors import InputError
from ...mm.message_fields import check_fields

FUNCTION_FORM = '{"type": "function", "function": {"name": ..., "parameters": {...}}}'


def read_functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the parameters of each function of `tools` by its name.

    Raises:
        InputError: a tool has another form.
    """
    found = {}
    for index, tool in enumerate(tools):
        where, given = f"tools[{index}]", tool.get("function")
        function: dict[str, Any] = given if isinstance(given, dict) else {}
        name, parameters = function.get("name"), function.get("parameters") or {}
        if tool.get("type") != "function" or not (isinstance(name, str) and name) or not isinstance(parameters, dict):
            raise InputError(f"{where} must be {FUNCTION_FORM}", param="tools")
        check_fields(tool, ("type", "function"), where, "tools")
        check_fields(function, ("name", "description", "parameters", "strict"), f"{where}.function", "tools")
        found[name] = parameters
    return found
