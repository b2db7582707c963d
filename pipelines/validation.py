"""What is asked of a pipeline, checked before anything is computed: names of arguments and their types. Knows no pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from ..engine.sampling_params import SamplingParams
from ..mm.errors import InputError, hint

_KINDS = {str: "a text", bool: "True or False", int: "an integer", SamplingParams: "a SamplingParams", type(None): "None"}


def known(pipeline: Callable[..., Any], options: Mapping[str, Any]) -> Mapping[str, Any]:
    """`options`; InputError for one that the pipeline, whose first argument is the model, does not take."""
    names = list(signature(pipeline).parameters)[1:]
    for name in options:
        if name not in names:
            raise InputError(f"unknown argument {name!r}; {hint(name, names)}")
    return options


def check(name: str, value: object, *kinds: type) -> None:
    """InputError for an argument of another type; True is no integer."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        shown = " ".join(repr(value).split())
        raise InputError(f"{name}={shown[:60]} must be {' or '.join(_KINDS[kind] for kind in kinds)}")
