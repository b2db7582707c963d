"""Base of all bodies: unknown fields, and known ones that cannot be honoured, are refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, model_validator

from ...mm.errors import InputError, equals_one_of, hint, short_repr

T = TypeVar("T")


class _FirstError(FailFast):
    """FailFast that can be hashed, as a part of `A | B` must be."""

    __hash__ = object.__hash__


Many = Annotated[list[T], _FirstError()]
"""A list that is checked up to its first wrong entry: pydantic's errors of a million entries take seconds."""
Refused = Mapping[str, tuple[tuple[Any, ...], str]]
IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
"""Fields that only say something about the caller."""


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
                if value is not None and not equals_one_of(value, accepted):
                    raise InputError(f"{name}={short_repr(value)} cannot be honoured: {reason}", param=name)
            elif name in cls.model_fields:
                kept[name] = value
            elif name not in cls.ignored:
                fixed = [field for field, (values, _) in cls.refused.items() if values]
                known = hint(name, [*cls.model_fields, *fixed], cls.ignored)
                raise InputError(f"unknown field {short_repr(name, 100)}; {known}", param=name)
        return kept


class Part(Body):
    """An object within a body."""

    ignored: ClassVar[tuple[str, ...]] = ()
    model: None = None
