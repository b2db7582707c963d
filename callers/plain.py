"""Copies a caller's arguments into builtin types, which messages can encode."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .errors import MAX_DEPTH, InputError, short_repr
from .pacing import releasing_gil

_NUMBERS = frozenset({type(None), bool, int, float})
_ENTRY = 16  # characters, about the memory of an entry of a list or mapping
_CHUNK = 1 << 12  # entries of a list that are checked together


def builtin_copy(value: object, param: str, name: str = "", max_chars: float = math.inf, option: str = "") -> Any:
    """Return a copy in which mappings, lists, tuples, texts and numbers of any class have the builtin types.

    Other values, such as images and arrays, are kept. A list of numbers alone is not copied.

    Args:
        name: what errors call the value; `param` by default.
        max_chars: limit on the characters of texts and keys; an entry of a list or mapping counts as 16.
        option: name of the engine option that sets `max_chars`, for errors.

    Raises:
        InputError: a mapping has keys of other types than text and numbers, or the value is too large or too deep.
    """
    return _Copier(param, name or param, max_chars, option).copy(value)


class _Copier:
    """Copies one value and counts its size."""

    def __init__(self, param: str, name: str, max_chars: float, option: str) -> None:
        self._param, self._name, self._max_chars, self._option = param, name, max_chars, option
        self._size = 0

    def copy(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _NUMBERS:
            return value
        if isinstance(value, str):
            self._count(str.__len__(value))
            return value if kind is str else str.__str__(value)
        if isinstance(value, int | float):
            return int.__int__(value) if isinstance(value, int) else float.__float__(value)
        if not isinstance(value, Mapping | list | tuple):
            return value
        if depth > MAX_DEPTH:
            raise InputError(
                f"{self._name}: lists and objects nest at most {MAX_DEPTH} deep; give flatter ones",
                code="over_limit",
                param=self._param,
                limit=MAX_DEPTH,
            )
        if isinstance(value, Mapping):
            return {self._key(key): self.copy(entry, depth + 1) for key, entry in releasing_gil(value.items())}
        builtin = value if kind in (list, tuple) else list(value)
        copied = self._entries(builtin, depth + 1)
        if copied is None:
            return value if kind in (list, tuple) else tuple(builtin) if isinstance(value, tuple) else builtin
        return tuple(copied) if isinstance(value, tuple) else copied

    def _entries(self, values: list[Any] | tuple[Any, ...], depth: int) -> list[Any] | None:
        """Return the copies of the entries; None if all of them are numbers."""
        copied: list[Any] | None = None
        for start in releasing_gil(range(0, len(values), _CHUNK)):
            chunk = values[start : start + _CHUNK]
            numbers = _NUMBERS.issuperset(map(type, chunk))
            self._count(_ENTRY * len(chunk))
            if copied is None and not numbers:
                copied = list(values[:start])
            if copied is not None:
                copied += chunk if numbers else [self.copy(entry, depth) for entry in releasing_gil(chunk)]
        return copied

    def _key(self, key: object) -> Any:
        if not isinstance(key, str | int | float | None):
            reason = f"{self._name}: keys must be strings or numbers, not {short_repr(key, 40)}"
            raise InputError(reason, code="invalid_value", param=self._param)
        self._count(_ENTRY)
        return self.copy(key)

    def _count(self, size: int) -> None:
        self._size += size
        if self._size > self._max_chars:
            limit = f"{int(self._max_chars):,} characters (an entry of a list or object counts as {_ENTRY})"
            reason = f"{self._name} has more than {limit}"
            reason = f"{reason}; give less, or raise {self._option}"
            raise InputError(reason, code="over_limit", param=self._param, limit=int(self._max_chars), value=self._size)
