"""256-bit hashes of media and options: sha256 over values tagged with domain, type and length."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..callers.errors import MAX_DEPTH, InputError, typed

_ARRAY_KINDS = "biufcSU"  # numpy kinds whose bytes are their value, unlike arrays of objects


class _Sink(Protocol):
    def update(self, data: Any, /) -> None: ...


def digest(domain: str, *values: object) -> str:
    """Return the hash, 64 hex digits, of any nesting of None, bool, int, float, str, bytes, arrays, tensors, lists, mappings.

    Values of different type, dtype or shape have different digests, and so do nestings (`{"a": {"b": 1}}` and `{"a.b": 1}`).
    The order of mapping keys, memory layout, byte order, and numpy or torch make no difference.

    Raises:
        InputError: a value has another type, or is nested deeper than MAX_DEPTH.
    """
    sink = hashlib.sha256()
    _feed(sink, domain, 0)
    for value in values:
        _feed(sink, value, 0)
    return sink.hexdigest()


def _feed(sink: _Sink, value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise InputError(
            f"lists and mappings are nested more than {MAX_DEPTH} deep, or contain themselves; give flatter data",
            code="over_limit",
            limit=MAX_DEPTH,
        )
    if isinstance(value, Mapping):
        _write_tag(sink, b"map", len(value))
        for key in sorted(value, key=_key_order):
            _feed(sink, key, depth + 1)
            _feed(sink, value[key], depth + 1)
    elif isinstance(value, Tensor):
        _feed_tensor(sink, value)
    elif isinstance(value, np.ndarray | np.generic):
        _feed_array(sink, value)
    elif isinstance(value, bytes | bytearray | memoryview):
        _write_value(sink, b"bytes", value)
    elif isinstance(value, str):
        _write_value(sink, b"str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, Sequence) and not isinstance(value, range):  # a range may have more entries than memory
        _write_tag(sink, b"list", len(value))
        for entry in value:
            _feed(sink, entry, depth + 1)
    elif value is None or isinstance(value, bool | float):
        _write_value(sink, type(value).__name__.encode(), repr(value).encode())
    elif isinstance(value, int):
        _write_value(sink, b"int", b"%x" % value)  # hex, because decimal digits of large ints are slow and limited by Python
    else:
        raise InputError(f"{typed(value)} cannot be hashed; give numbers, text, bytes, arrays, lists or mappings")


def _key_order(key: object) -> tuple[str, str]:
    return type(key).__name__, str(key)


def _feed_tensor(sink: _Sink, value: Tensor) -> None:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise InputError(f"a tensor of layout {value.layout} on {value.device} cannot be hashed; give a dense one")
    flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    _feed_raw(sink, str(value.dtype).removeprefix("torch."), tuple(value.shape), raw)


def _feed_array(sink: _Sink, value: np.ndarray[Any, Any] | np.generic) -> None:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise InputError(f"an array of {value.dtype.name} cannot be hashed; give numbers")
    raw = np.ascontiguousarray(value, value.dtype.newbyteorder("=")).reshape(-1)
    _feed_raw(sink, value.dtype.name, value.shape, raw)


def _feed_raw(sink: _Sink, dtype: str, shape: tuple[int, ...], raw: np.ndarray[Any, Any]) -> None:
    _write_tag(sink, b"array", len(shape))
    for size in shape:
        _write_value(sink, b"int", b"%x" % size)
    _write_value(sink, b"dtype", dtype.encode())
    _write_value(sink, b"data", raw.data)


def _write_tag(sink: _Sink, tag: bytes, count: int) -> None:
    sink.update(b"%s:%d;" % (tag, count))


def _write_value(sink: _Sink, tag: bytes, data: bytes | bytearray | memoryview) -> None:
    view = memoryview(data)
    _write_tag(sink, tag, view.nbytes)
    sink.update(view if view.c_contiguous else view.tobytes())
