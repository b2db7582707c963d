"""256-bit identities of media and options: domain-tagged, length-prefixed, type-tagged sha256. Knows no cache and no family."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor


class _Sink(Protocol):
    def update(self, data: Any, /) -> None: ...


def digest(domain: str, *values: object) -> str:
    """64 hex digits of any nesting of None, bool, int, float, str, bytes, arrays, tensors, lists and mappings.

    Values of different type, dtype or shape differ, as do nestings (`{"a": {"b": 1}}` and `{"a.b": 1}`); the
    order of mapping keys, memory layout, and numpy against torch make no difference.

    Raises:
        TypeError: a value of any other type.
    """
    sink = hashlib.sha256()
    _feed(sink, domain)
    for value in values:
        _feed(sink, value)
    return sink.hexdigest()


def _feed(sink: _Sink, value: object) -> None:
    if isinstance(value, Mapping):
        _frame(sink, b"map", len(value))
        for key in sorted(value, key=str):
            _feed(sink, key)
            _feed(sink, value[key])
    elif isinstance(value, np.ndarray | np.generic | Tensor):
        _feed_array(sink, value)
    elif isinstance(value, bytes | bytearray | memoryview):
        _leaf(sink, b"bytes", value)
    elif isinstance(value, str):
        _leaf(sink, b"str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, Sequence):
        _frame(sink, b"list", len(value))
        for entry in value:
            _feed(sink, entry)
    elif value is None or isinstance(value, bool | int | float):
        _leaf(sink, type(value).__name__.encode(), repr(value).encode())
    else:
        raise TypeError(f"a {type(value).__name__} has no identity; give numbers, text, bytes, arrays, lists or mappings")


def _feed_array(sink: _Sink, value: np.ndarray[Any, Any] | np.generic | Tensor) -> None:
    if isinstance(value, Tensor):
        name = str(value.dtype).removeprefix("torch.")
        flat = value.detach().cpu().reshape(-1).contiguous()
        raw = np.asarray(flat.view(torch.uint8)) if flat.numel() else np.empty(0, np.uint8)
    else:
        name = value.dtype.name
        raw = np.ascontiguousarray(value, value.dtype.newbyteorder("=")).reshape(-1)
    _frame(sink, b"array", value.ndim)
    for size in value.shape:
        _leaf(sink, b"int", str(size).encode())
    _leaf(sink, b"dtype", name.encode())
    _leaf(sink, b"data", raw.data)


def _frame(sink: _Sink, tag: bytes, count: int) -> None:
    sink.update(b"%s:%d;" % (tag, count))


def _leaf(sink: _Sink, tag: bytes, data: bytes | bytearray | memoryview) -> None:
    _frame(sink, tag, memoryview(data).nbytes)
    sink.update(data)
