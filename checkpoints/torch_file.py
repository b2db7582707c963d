"""Reads the tensors of a file that `torch.save` wrote, without unpickling.

Since torch 1.6 it is a zip archive: `data.pkl`, and the bytes of each tensor in `data/<key>`. Before, it was several pickles
one after the other (a magic number, a version, facts about the machine, the content, the keys of tensors), then the bytes.
The instructions of the pickles are listed and interpreted here; those that mappings, lists, numbers, texts and tensors need are
known, and all others are refused. An object of any other class becomes a `SavedObject`, which holds its name and its data.
Nothing is imported or called.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..callers.errors import CheckpointError, short_repr
from .files import open_regular

SAVED_SUFFIX = ".pth"
_MAX_BYTES = 256 << 20
_MAX_WEIGHT_BYTES = 4 << 30
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
}  # fmt: skip
_TENSOR, _MAPPING = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_MAGIC = 0x1950A86A20F9469CFC6C
_MARK = object()
_BROKEN = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, OSError, zipfile.BadZipFile)


@dataclass
class SavedObject:
    """An object of a class that is not read, as data.

    Args:
        name: module and class, with a space between.
        arguments: of its constructor.
        state: what it held, mostly a mapping of its attributes.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


def read_saved(file: Path, objects: bool = False) -> dict[str, Any]:
    """Return the mapping that a file holds: texts -> mappings, lists, numbers, texts and tensors on the CPU.

    Args:
        objects: other objects become SavedObject; otherwise they are refused.

    Raises:
        CheckpointError: the file is missing or broken, larger than 256 MiB, or holds anything else.
    """
    with _typed_errors(file), open_regular(file) as opened:
        content = _read_archive(file, opened, objects) if zipfile.is_zipfile(opened) else _read_stream(file, opened, objects)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no mapping; download it again")
    return content


def read_saved_tensor(file: Path) -> Tensor:
    """Return the tensor that an archive holds. Raise CheckpointError as `read_saved`."""
    with _typed_errors(file), open_regular(file) as opened:
        content = _read_archive(file, opened, False)
    if not isinstance(content, Tensor):
        raise CheckpointError(f"{file} holds no tensor; download it again")
    return content


def saved_tensors(file: Path, on_meta: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an archive by name. Names of mappings in mappings are joined by dots.

    Args:
        on_meta: yield tensors on the meta device; no tensor is read.

    Raises:
        CheckpointError: as `read_saved`, for files larger than 4 GiB, and for a mapping that stands in several places.
    """
    with _typed_errors(file), open_regular(file) as opened:
        content = _read_archive(file, opened, False, _MAX_WEIGHT_BYTES, on_meta)
    levels, seen = [("", content)], set[int]()
    while levels:
        prefix, level = levels.pop()
        if not isinstance(level, dict):
            continue
        if id(level) in seen:  # it may contain itself, or others that repeat it without end
            raise CheckpointError(f"{file} holds one mapping in several places; save it again")
        seen.add(id(level))
        for name, value in level.items():
            if isinstance(value, Tensor):
                yield f"{prefix}{name}", value
            else:
                levels.append((f"{prefix}{name}.", value))


@contextmanager
def _typed_errors(file: Path) -> Iterator[None]:
    """Raise CheckpointError where the file cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing from {file.parent}; download it again") from None
    except CheckpointError:
        raise
    except _BROKEN as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download it again") from None


def _read_archive(file: Path, opened: IO[bytes], objects: bool, max_bytes: int = _MAX_BYTES, on_meta: bool = False) -> Any:
    with zipfile.ZipFile(opened) as archive:
        if sum(entry.file_size for entry in archive.infolist()) > max_bytes:
            raise _too_large(file, max_bytes)
        (program,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        folder = program.removesuffix("data.pkl")

        @cache  # tensors may share the bytes of one key
        def read(key: str, dtype: torch.dtype) -> Tensor:
            name = f"{folder}data/{key}"
            if on_meta:
                return torch.empty(archive.getinfo(name).file_size // dtype.itemsize, dtype=dtype, device="meta")
            return torch.frombuffer(bytearray(archive.read(name)), dtype=dtype)

        return _interpret(io.BytesIO(archive.read(program)), read, objects, max_bytes=max_bytes)


def _read_stream(file: Path, opened: IO[bytes], objects: bool) -> Any:
    """Read the content before its tensors are known: first with empty ones, to learn the keys, then with the bytes."""
    opened.seek(0)
    data = opened.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _too_large(file, _MAX_BYTES)
    stream, dtypes = io.BytesIO(data), dict[str, torch.dtype]()

    def note(key: str, dtype: torch.dtype) -> None:
        dtypes[key] = dtype

    magic, _, machine = (_interpret(stream, note, False) for _ in range(3))
    if magic != _MAGIC or not machine.get("little_endian"):
        raise ValueError("it is no file of torch.save, or one of a big-endian machine")
    start = stream.tell()
    _interpret(stream, note, objects, with_tensors=False)
    storages = dict[str, Tensor]()
    for key in _interpret(stream, note, False):
        count, dtype = int.from_bytes(stream.read(8), "little"), dtypes[key]
        storages[key] = torch.frombuffer(bytearray(stream.read(count * dtype.itemsize)), dtype=dtype)
    stream.seek(start)
    return _interpret(stream, lambda key, dtype: storages[key], objects)


def _too_large(file: Path, limit: int) -> CheckpointError:
    return CheckpointError(f"{file} holds more than {limit >> 20} MiB; it is not a file of voices or a small network")


def _rearrange(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> bool:
    """Carry out an instruction about plain values, and return True; return False for another one."""

    def pop_marked() -> list[Any]:
        start = len(stack) - 1 - stack[::-1].index(_MARK)
        values = stack[start + 1 :]
        del stack[start:]
        return values

    if name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"):
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name]())
    elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
        memo[len(memo) if argument is None else argument] = stack[-1]
    elif name in ("BINGET", "LONG_BINGET"):
        stack.append(memo[int(argument or 0)])
    elif name == "TUPLE":
        stack.append(tuple(pop_marked()))
    elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        count = int(name[-1])
        stack[-count:] = [tuple(stack[-count:])]
    elif name in ("APPEND", "APPENDS"):
        values = pop_marked() if name == "APPENDS" else [stack.pop()]
        stack[-1].extend(values)
    elif name in ("SETITEM", "SETITEMS"):
        values = pop_marked() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
        if not isinstance(stack[-1], SavedObject):  # entries of a mapping that is not read
            if not all(map(_is_key, values[::2])):
                raise ValueError("it has a mapping whose keys are no texts or numbers")
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
    else:
        return False
    return True


def _interpret(
    program: IO[bytes],
    read: Callable[[str, torch.dtype], Any],
    objects: bool,
    with_tensors: bool = True,
    max_bytes: int = _MAX_BYTES,
) -> Any:
    """Return the value that the instructions build. Raise ValueError for an instruction or a name that is not known.

    Args:
        read: returns the storage of a key.
        with_tensors: otherwise tensors are None.
    """
    stack, memo, num_bytes = list[Any](), dict[int, Any](), 0
    for instruction, argument, _ in pickletools.genops(program):
        name = instruction.name
        if name in ("PROTO", "FRAME"):
            continue
        if _rearrange(name, argument, stack, memo):
            continue
        if name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(argument if name == "GLOBAL" else f"{stack.pop(-2)} {stack.pop()}")
        elif name == "BINPERSID":
            kind, storage, key = stack.pop()[:3]
            if kind != "storage":
                raise ValueError(f"it refers to a {short_repr(kind)}")
            stack.append(read(key, _STORAGES[storage.removeprefix("torch ")]))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments = stack.pop()
            stack[-1] = _call(stack[-1], arguments, objects, with_tensors)
            num_bytes += stack[-1].nbytes if isinstance(stack[-1], Tensor) else 0
            if num_bytes > max_bytes:  # tensors may share bytes, and repeat them
                raise ValueError(f"its tensors have more than {max_bytes >> 20} MiB")
        elif name == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], SavedObject):
                stack[-1].state = state
        elif name == "STOP":
            return stack.pop()
        else:
            raise ValueError(f"it has the instruction {name}")
    raise ValueError("it has no end")


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "MARK": lambda: _MARK, "NONE": lambda: None,
    "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
}  # fmt: skip


def _is_key(value: object) -> bool:
    """Return whether a value can be a key. Hashing tuples in tuples may take time without end."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(part is None or isinstance(part, str | int | float) for part in parts)


def _tensor(storage: Tensor, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return storage.as_strided(shape, stride, offset)


def _call(name: object, arguments: tuple[Any, ...], objects: bool, with_tensors: bool) -> Any:
    """Return what the call of a named class or function stands for."""
    if name == _TENSOR:
        return _tensor(*arguments[:4]) if with_tensors else None
    if name == _MAPPING and not arguments:
        return {}
    if not objects or not isinstance(name, str):
        raise ValueError(f"it calls {short_repr(name)}")
    return SavedObject(name, arguments)
