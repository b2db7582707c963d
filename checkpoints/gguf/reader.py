"""GGUF files: their metadata and the table of their tensors. Files are untrusted: every count and offset is checked before use.

Source: the GGUF specification of ggml (versions 2 and 3).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...callers.errors import CheckpointError, ConfigError, short_repr
from ..files import map_regular, open_regular

SUFFIX = ".gguf"
MAX_HEADER = 128 << 20  # bytes; published files have at most 16 MB before their weights
_MAX_DIMENSIONS, _MAX_SHARDS = 4, 1024
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""Number of a type -> its name, the numbers of a block, and the bytes of a block."""


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Args:
        kind: name of its type.
        shape: as in torch, the inputs of a product last.
        offset: of its first byte in the file.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Gguf:
    """A GGUF model: one file, or all shards of one. Numbers of an array in `metadata` are a numpy array.

    `encoder`: the model's mmproj file.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    encoder: Gguf | None = None

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def files(self) -> list[Path]:
        paths = {tensor.path for tensor in self.tensors.values()} | {self.path}
        return sorted(paths if self.encoder is None else paths | {self.encoder.path})


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF model that a path names: the file itself, or the only one in a folder without safetensors; else None.

    Raises:
        ConfigError: the folder holds several models, or the file holds an encoder only.
    """
    if path.suffix == SUFFIX and not path.is_dir():
        if _is_encoder(path):
            raise ConfigError(f"{path.name} holds an encoder only; give the GGUF file of the text model beside it")
        return path
    if not path.is_dir() or any(path.glob("*.safetensors*")):
        return None
    files = [file for file in sorted(path.glob(f"*{SUFFIX}")) if not _is_encoder(file) and _shard_number(file) == 1]
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ConfigError(f"{path} holds {len(files)} GGUF models ({names}); give the path of one of these files")
    return files[0] if files else None


def find_encoder(model: Path) -> Path | None:
    """Return the file of the encoder (mmproj) in the folder of a model, or None. Raise ConfigError if there are several."""
    files = [file for file in sorted(model.parent.glob(f"*{SUFFIX}")) if _is_encoder(file)]
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:4])
        raise ConfigError(f"{model.parent} holds {len(files)} encoders ({names}); leave one of them in the folder")
    return files[0] if files else None


def _is_encoder(path: Path) -> bool:
    return "mmproj" in path.name.lower()


def _shard_number(path: Path) -> int:
    """Return the number of a shard, from 1 on; 1 for a file that is not one."""
    match = _SHARD.fullmatch(path.name)
    return int(match[2]) if match else 1


def read_gguf(path: Path) -> Gguf:
    """Read the headers of a model and of its shards.

    Raises:
        CheckpointError: a file is missing, truncated or not GGUF, or its header does not fit the file.
    """
    first = _read(path)
    count, match = first.metadata.get("split.count", 0), _SHARD.fullmatch(path.name)
    if not isinstance(count, int) or count <= 1:
        return first
    if match is None or int(match[2]) != 1 or int(match[3]) != count or count > _MAX_SHARDS:
        raise CheckpointError(f"{path.name} is a shard of {count}; give the file that ends in -00001-of-{count:05d}.gguf")
    tensors = dict(first.tensors)
    for number in range(2, count + 1):
        tensors |= _read(path.with_name(f"{match[1]}-{number:05d}-of-{match[3]}.gguf")).tensors
    return Gguf(path, first.metadata, tensors)


def _read(path: Path) -> Gguf:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
        return _read_header(path, status.st_size, status.st_mtime_ns)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing from {path.parent}; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None
    except _Broken as error:
        raise CheckpointError(f"{path} is not a readable GGUF file ({error}); download it again") from None


class _Broken(Exception):
    """A header that does not fit its file."""


@lru_cache(32)
def _read_header(path: Path, size: int, modified: int) -> Gguf:
    """Read a file's header. `modified` is part of the cache key, so a changed file is read again."""
    if size < 24:
        raise _Broken("it is truncated")
    with map_regular(path, min(size, MAX_HEADER)) as data:
        header = _Header(data)
        magic, version = header.take("<4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise _Broken(f"it begins with {magic!r}, version {version}; supported are GGUF versions 2 and 3")
        tensors, pairs = header.take("<QQ")
        metadata = header.metadata(pairs)
        infos = header.tensor_infos(tensors)
        start = header.position
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        raise _Broken(f"its alignment is {short_repr(alignment)}")
    start += -start % alignment
    tensor_data = _TensorData(path, start, alignment, size)
    return Gguf(path, metadata, {name: _tensor(tensor_data, name, *info) for name, info in infos.items()})


@dataclass(frozen=True)
class _TensorData:
    """Where the numbers of a file's tensors begin, in bytes, of which their offsets are multiples, and the file's size."""

    path: Path
    start: int
    alignment: int
    size: int


def _tensor(data: _TensorData, name: str, shape: tuple[int, ...], number: int, offset: int) -> GgufTensor:
    path, start = data.path, data.start
    if number not in TYPES:
        raise CheckpointError(f"{name} in {path.name} has type {number}, which is not known; use another file of the model")
    kind, block, each = TYPES[number]
    if shape[-1] % block:
        raise _Broken(f"{name} has rows of {shape[-1]} numbers, {kind} has blocks of {block}")
    nbytes = prod(shape) // block * each
    if offset % data.alignment or start + offset + nbytes > data.size:
        raise _Broken(f"{name} ends at byte {start + offset + nbytes}, the file has {data.size}")
    return GgufTensor(path, kind, shape, start + offset, nbytes)


def short_float(value: np.float32) -> float:
    """Return the number with the fewest digits that rounds to a float32 number: 1e-06, not 9.999999974752427e-07."""
    return float(str(value))


class _Header:
    """Reads values one after the other. Raises _Broken where the file, or MAX_HEADER, ends."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data, self.position = data, 0

    def take(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._bytes(struct.calcsize(layout)))

    def metadata(self, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):  # each entry consumes bytes, so a false count ends at the header's end
            name = self._string()
            if name in values:
                raise _Broken(f"{short_repr(name)} occurs twice")
            values[name] = self._value(self.take("<I")[0])
        return values

    def tensor_infos(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Return name -> shape, number of the type, offset."""
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name, (dimensions,) = self._string(), self.take("<I")
            if name in infos or not 1 <= dimensions <= _MAX_DIMENSIONS:
                raise _Broken(f"tensor {short_repr(name)} occurs twice, or has {dimensions} dimensions")
            shape = self.take(f"<{dimensions}Q")
            if not all(0 < length < 1 << 48 for length in shape):
                raise _Broken(f"tensor {short_repr(name)} has shape {list(shape)}")
            infos[name] = (shape[::-1], *self.take("<IQ"))
        return infos

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            value = np.frombuffer(self._bytes(np.dtype(_SCALARS[kind]).itemsize), _SCALARS[kind])[0]
            return short_float(value) if value.dtype == np.float32 else value.item()
        if kind != _ARRAY:
            raise _Broken(f"a value has type {kind}")
        inner, count = self.take("<IQ")
        if inner == _STRING:
            strings = list[str]()
            for _ in range(count):
                strings.append(self._string())
            return strings
        if inner not in _SCALARS:
            raise _Broken(f"an array has values of type {inner}")
        return np.frombuffer(self._bytes(count * np.dtype(_SCALARS[inner]).itemsize), _SCALARS[inner])

    def _string(self) -> str:
        try:
            return str(self._bytes(self.take("<Q")[0]), "utf-8")
        except UnicodeDecodeError:
            raise _Broken("a text is not UTF-8") from None

    def _bytes(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._data):
            raise _Broken(f"its header goes on after byte {len(self._data)}")
        start, self.position = self.position, end
        return self._data[start:end]
