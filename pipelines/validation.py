"""Checks of a pipeline's arguments, made before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any

from ..engine.frontend.arguments import unknown_argument
from ..mm.errors import InputError, short_repr
from ..mm.parse import is_item_list
from ..mm.plain import check_classes

_TYPE_NAMES = {
    str: "a string",
    os.PathLike: "a path",
    bool: "True or False",
    int: "an integer",
    type(None): "None",
}


def check_names(pipeline: Callable[..., Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `options`. Raise InputError for a name that is no parameter of `pipeline` after `llm`, its first one."""
    names = list(signature(pipeline).parameters)[1:]
    for name in options:
        if name not in names:
            raise unknown_argument(name, names)
    return options


def check_type(name: str, value: object, *types: type) -> None:
    """Raise InputError unless the argument has one of these types; True is not an integer."""
    check_classes(**{name: value})
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(_TYPE_NAMES.get(kind, f"a {kind.__name__}") for kind in types)
        raise InputError(f"{name}={short_repr(value)} must be {expected}", param=name)


def as_items(param: str, given: object, modality: str) -> Sequence[object]:
    """Return one item or several as a list. Raise InputError for None, or for an object whose class cannot be asked."""
    check_classes(**{param: given})
    if given is None:
        raise InputError(f"{param}=None must be an {modality} item or a list of them", param=param)
    return list(given) if is_item_list(modality, given) else [given]  # type: ignore[call-overload]
