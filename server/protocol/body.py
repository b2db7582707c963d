"""Base of all bodies: unknown fields, and known ones that cannot be honoured, are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator

from ...callers.errors import InputError, equals_one_of, hint, short_repr

T = TypeVar("T")


class _FirstError(FailFast):
    """FailFast that can be hashed, as a part of `A | B` must be."""

    __hash__ = object.__hash__


Many = Annotated[list[T], _FirstError()]
"""A list that is checked up to its first wrong entry: pydantic's errors of a million entries take seconds."""
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
IGNORED = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "client_metadata"),
    *("request_id", "session_id", "stream_interval", "return_mm_kwargs"),  # vLLM's
)
"""Fields that only say something about the caller, how long a cache may keep a prompt, or how a stream is cut."""


on_unknown_field: ContextVar[Callable[[int], None] | None] = ContextVar("on_unknown_field", default=None)
"""What counts the unknown fields of the request in progress, which are then left out; with None they are errors."""


def _is_one_of(value: object, accepted: tuple[Any, ...]) -> bool:
    """Return whether a JSON value is among these. 0 and 1 are not false and true."""
    return equals_one_of(value, [choice for choice in accepted if isinstance(choice, bool) == isinstance(value, bool)])


def check_refused(fields: Mapping[str, Any], refused: Refused, where: str, param: str) -> None:
    """Raise InputError for a field of an object within a body that asks for what cannot be honoured."""
    for name, (accepted, reason) in refused.items():
        value = fields.get(name)
        if value is not None and not _is_one_of(value, accepted):
            raise InputError(
                f"{where}.{name}={short_repr(value)} cannot be honoured: {reason}", code="unsupported", param=param
            )


class Body(BaseModel):
    """A request's body.

    `refused`: field -> values that ask for what the server does anyway, and what to do instead of another value.
    `ignored`: fields without effect.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    refused: ClassVar[Refused] = {}
    ignored: ClassVar[tuple[str, ...]] = IGNORED
    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.refused:
                accepted, reason = cls.refused[name]
                if value is not None and not _is_one_of(value, accepted):
                    raise InputError(
                        f"<<param=>>{short_repr(value)} cannot be honoured: {reason}", code="unsupported", param=name
                    )
            elif name in cls.model_fields:
                kept[name] = value
            elif name not in cls.ignored and (count := on_unknown_field.get()) is not None:
                count(1)
            elif name not in cls.ignored:
                fixed = [field for field, (values, _) in cls.refused.items() if values]
                advice = hint(name, [*cls.model_fields, *fixed], cls.ignored)
                raise InputError(
                    f"unknown field {short_repr(name, 100)}; {advice}", code="unknown_name", value=name, param=name
                )
        return kept


class Part(Body):
    """An object within a body."""

    ignored: ClassVar[tuple[str, ...]] = ()
    model: None = None
