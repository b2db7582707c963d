"""Encodes messages between the core and its callers as bytes, and decodes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ...mm import fields as mm_fields
from ...mm import rules as mm_rules
from ...mm import types as mm_types
from ...processors.elements import element, marked_text
from .. import config as engine_config
from .. import core_info, model_files, outputs, pooling_requests, sampling_params, stats, structured_outputs
from .. import types as engine_types

# messages consist of their dataclasses
_MODULES = (
    engine_types, engine_config, core_info, stats, outputs, model_files, pooling_requests, sampling_params, structured_outputs,
    mm_types, mm_fields, mm_rules, element, marked_text,
)  # fmt: skip
_KINDS = [kind for module in _MODULES for kind in vars(module).values() if isinstance(kind, type) and is_dataclass(kind)]
_BY_NAME = {kind.__name__: kind for kind in _KINDS}
_FIELDS: dict[type, tuple[Field[Any], ...]] = {kind: fields(kind) for kind in _KINDS}
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_TENSOR, _MESSAGE, _SHARED = 1, 2, 3  # msgpack extension codes
_ALIGN = 64  # bytes


class SharedTensors:
    """The large tensors of a message, with their offsets in shared memory. They are left out of the message's bytes.

    Args:
        threshold: tensors of fewer bytes stay in the message.
    """

    def __init__(self, threshold: int = 4096) -> None:
        self.threshold, self.num_bytes = threshold, 0
        self.tensors: list[tuple[int, Tensor]] = []

    def place(self, tensor: Tensor) -> int:
        """Add a tensor and return its offset."""
        offset = self.num_bytes
        self.tensors.append((offset, tensor))
        self.num_bytes += -(-tensor.numel() * tensor.itemsize // _ALIGN) * _ALIGN
        return offset


def encode(message: object, shared: SharedTensors | None = None) -> bytes:
    """Encode a dataclass of `_MODULES`, a tensor, a plain value, or tuples, lists and dicts of these.

    Args:
        shared: collects the large tensors; None keeps all tensors in the bytes.

    Raises:
        TypeError: a value of another type, such as a callable, a lock or an image object.
    """
    return msgspec.msgpack.encode(_plain(message, shared))


def decode(data: bytes | memoryview, memory: Tensor | None = None) -> Any:
    """Return the encoded value; lists become tuples. `memory`: uint8 `[bytes]` that holds the shared tensors."""

    def extension(code: int, part: memoryview) -> object:
        if code == _MESSAGE:
            name, values = msgspec.msgpack.decode(part, ext_hook=extension)
            return _BY_NAME[name](*map(_restored, values))
        if code == _SHARED:
            dtype, shape, offset, size = msgspec.msgpack.decode(part)
            assert memory is not None, "the message came without its memory"
            return memory[offset : offset + size].view(getattr(torch, dtype)).reshape(shape)
        dtype, shape, raw = msgspec.msgpack.decode(part)
        buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return buffer.view(getattr(torch, dtype)).reshape(shape)

    return _restored(msgspec.msgpack.decode(data, ext_hook=extension))


def _plain(value: object, shared: SharedTensors | None) -> object:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, tuple | list):
        return value if set(map(type, value)) <= _SCALARS else [_plain(entry, shared) for entry in value]
    class_fields = _FIELDS.get(type(value))
    if class_fields is not None:
        values = [getattr(value, field.name) for field in class_fields]
        while values and _is_default(values[-1], class_fields[len(values) - 1]):
            values.pop()
        named = (type(value).__name__, [_plain(entry, shared) for entry in values])
        return msgspec.msgpack.Ext(_MESSAGE, msgspec.msgpack.encode(named))
    if isinstance(value, Mapping):
        if not set(map(type, value)) <= _SCALARS:  # others can be written but not read
            raise TypeError("a key that is neither a string nor a number cannot be part of a message")
        return {key: _plain(entry, shared) for key, entry in value.items()}
    if isinstance(value, Tensor):
        return _plain_tensor(value.detach().cpu(), shared)
    raise TypeError(f"{type(value).__name__} cannot be part of a message")


def _plain_tensor(value: Tensor, shared: SharedTensors | None) -> msgspec.msgpack.Ext:
    dtype, size = str(value.dtype).removeprefix("torch."), value.numel() * value.itemsize
    if shared is not None and size >= shared.threshold:
        placed = (dtype, list(value.shape), shared.place(value), size)
        return msgspec.msgpack.Ext(_SHARED, msgspec.msgpack.encode(placed))
    flat = value.contiguous().reshape(-1).view(torch.uint8)
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((dtype, list(value.shape), flat.numpy().tobytes())))


def _is_default(value: object, field: Field[Any]) -> bool:
    """Return True if a field holds its default. Trailing fields with their defaults are not written."""
    if field.default is not MISSING:
        return value is field.default
    return field.default_factory is dict and value == {}


def _restored(value: object) -> object:
    if isinstance(value, list):
        return tuple(value) if set(map(type, value)) <= _SCALARS else tuple(_restored(entry) for entry in value)
    if isinstance(value, dict):
        return {key: _restored(entry) for key, entry in value.items()}
    return value
