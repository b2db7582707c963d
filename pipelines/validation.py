"""Checks of a pipeline's arguments, made before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from math import isfinite
from typing import Any, TypeGuard, TypeVar

from ..callers.errors import InputError, short_repr
from ..engine.errors import error_text
from ..engine.frontend.arguments import unknown_argument
from ..mm.columns import column_values
from ..mm.parse import item_list

T = TypeVar("T")
_TYPE_NAMES = {
    str: "a string",
    os.PathLike: "a path",
    bool: "True or False",
    int: "an integer",
    type(None): "None",
}


def read_options(kind: type[T], arguments: Mapping[str, Any], *others: str) -> T:
    """Make options from the keyword arguments of a call.

    None stands for the default of each option that has one, as callers that pass options on expect. None is kept if it is the
    default, or if the option's type allows it (None for a threshold: it is not checked).

    Args:
        others: names of the call's other arguments, for the error about an unknown one.

    Raises:
        InputError: a name that is no option.
    """
    options = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in arguments:
        if name not in options:
            raise unknown_argument(name, [*others, *options])
    return kind(**{name: value for name, value in arguments.items() if value is not None or _takes_none(options[name])})


def _takes_none(option: Field[Any]) -> bool:
    return option.default is None or str(option.type).endswith("| None")


def check_type(name: str, value: object, *types: type) -> None:
    """Raise InputError unless the argument has one of these types; True is not an integer."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(_TYPE_NAMES.get(kind, f"a {kind.__name__}") for kind in types)
        raise InputError(f"<<param=>>{short_repr(value)} must be {expected}", code="invalid_value", param=name)


def check_function(name: str, function: object) -> Callable[..., Any]:
    """Return a caller's function. An exception that it raises becomes an InputError that names the argument.

    Raises:
        InputError: it is not a function.
    """
    if not callable(function):
        raise InputError(f"{name}={short_repr(function)} must be a function", param=name)

    def call(*args: object) -> Any:
        try:
            return function(*args)
        except Exception as error:
            reason = f"the function {name}={short_repr(function)} raised {error_text(error)}; correct it"
            raise InputError(reason, param=name) from error

    return call


def check_functions(**functions: object) -> list[Callable[..., Any]]:
    return [check_function(name, function) for name, function in functions.items()]


def as_items(param: str, items: object, modality: str) -> Sequence[object]:
    """Return one item or several as a list. Raise InputError for None."""
    if items is None:
        raise InputError(f"<<param=>>None must be an {modality} item or a list of them", code="invalid_value", param=param)
    column = column_values(items, param)
    if column is not None:
        return column
    return item_list(modality, items)


def check_number(name: str, value: object, least: float, most: float) -> None:
    if not is_number(value) or not least <= value <= most:
        raise InputError(
            f"<<param=>>{short_repr(value)} must be a number from {least:g} to {most:g}", code="invalid_value", param=name
        )


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
