"""Messages to bytes and back. Knows the message types and nothing of what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from ..mm import fields as mm_fields
from ..mm import types as mm_types
from . import types as engine_types
from .pooling import Pooling
from .repetition import RepetitionDetection
from .sampling_params import SamplingParams
from .structured import StructuredOutputs

_MESSAGES: tuple[type, ...] = (
    SamplingParams,
    StructuredOutputs,
    RepetitionDetection,
    Pooling,
    engine_types.EngineRequest,
    engine_types.RequestUpdate,
    engine_types.ScheduledRequest,
    engine_types.EncodeTask,
    engine_types.SchedulerOutput,
    engine_types.Logprob,
    engine_types.SequenceStats,
    engine_types.TokenOutput,
    engine_types.EncodeResult,
    engine_types.StepOutput,
    engine_types.EngineStats,
    engine_types.ItemTrace,
    engine_types.CompletionOutput,
    engine_types.RequestOutput,
    mm_types.FramePlan,
    mm_types.ItemGeometry,
    mm_types.ItemPlan,
    mm_types.PlaceholderRange,
    mm_types.MultiModalFeature,
    mm_fields.BatchedField,
    mm_fields.FlatField,
    mm_fields.SharedField,
    mm_fields.FieldElem,
)
_BY_NAME = {kind.__name__: kind for kind in _MESSAGES}
_TENSOR, _MESSAGE = 1, 2  # msgpack extension codes


def encode(message: object) -> bytes:
    """Any message type, or tuples, dicts, tensors and plain values of them, as msgpack.

    Raises:
        TypeError: a value that is no message (a callable, a lock, a media object).
    """
    return msgspec.msgpack.encode(_plain(message))


def decode(data: bytes) -> Any:
    """The value that `encode` was given; sequences come back as tuples."""
    return _restored(msgspec.msgpack.decode(data, ext_hook=_from_extension))


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts = (str(value.dtype).removeprefix("torch."), list(value.shape), flat.numpy().tobytes())
        return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode(parts))
    if is_dataclass(value) and type(value).__name__ in _BY_NAME:
        named = (type(value).__name__, [_plain(getattr(value, f.name)) for f in fields(value)])
        return msgspec.msgpack.Ext(_MESSAGE, msgspec.msgpack.encode(named))
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    raise TypeError(f"{type(value).__name__} is not part of any message")


def _restored(value: object) -> object:
    if isinstance(value, list):
        return tuple(_restored(entry) for entry in value)
    if isinstance(value, dict):
        return {key: _restored(entry) for key, entry in value.items()}
    return value


def _from_extension(code: int, data: memoryview) -> object:
    if code == _TENSOR:
        dtype, shape, raw = msgspec.msgpack.decode(data)
        buffer = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
        return buffer.view(getattr(torch, dtype)).reshape(shape)
    name, values = msgspec.msgpack.decode(data, ext_hook=_from_extension)
    return _BY_NAME[name](*(_restored(entry) for entry in values))
