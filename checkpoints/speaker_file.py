"""Reads the tensors of a `.pt` file, such as the voices of a talker, without unpickling.

`torch.save` writes a zip archive: `data.pkl`, and the bytes of each tensor in `data/<key>`. The instructions of data.pkl are
listed and interpreted here; those that mappings, numbers, texts and tensors need are known, and all others are refused.
Nothing is imported or called.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..callers.errors import CheckpointError
from .files import open_regular

_MAX_BYTES = 256 << 20
_STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
}  # fmt: skip
_TENSOR, _MAPPING = "torch._utils _rebuild_tensor_v2", "collections OrderedDict"
_GLOBALS = {_TENSOR, _MAPPING, *(f"torch {name}" for name in _STORAGES)}
_MARK = object()
_BROKEN = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ArithmeticError, OSError, zipfile.BadZipFile)


def read_saved(file: Path) -> dict[str, Any]:
    """Return the mapping that a file holds: texts -> mappings, numbers, texts and tensors on the CPU.

    Raises:
        CheckpointError: the file is missing or broken, larger than 256 MiB, or holds anything else.
    """
    try:
        with open_regular(file) as opened, zipfile.ZipFile(opened) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_BYTES:
                raise CheckpointError(f"{file} holds more than {_MAX_BYTES >> 20} MiB; it is not a file of voices")
            (program,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            folder = program.removesuffix("data.pkl")
            content = _interpret(archive.read(program), lambda key: archive.read(f"{folder}data/{key}"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing from {file.parent}; download it again") from None
    except CheckpointError:
        raise
    except _BROKEN as error:
        raise CheckpointError(f"{file} cannot be read ({error}); download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds no mapping; download it again")
    return content


def _interpret(program: bytes, read: Callable[[str], bytes]) -> Any:
    """Return the value that the instructions build. Raise ValueError for an instruction or a name that is not known."""
    stack, memo = list[Any](), dict[int, Any]()

    def pop_marked() -> list[Any]:
        start = len(stack) - 1 - stack[::-1].index(_MARK)
        values = stack[start + 1 :]
        del stack[start:]
        return values

    for instruction, argument, _ in pickletools.genops(program):
        name = instruction.name
        if name in ("PROTO", "FRAME"):
            continue
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
        elif name in ("SETITEM", "SETITEMS"):
            values = pop_marked() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            reference = argument if name == "GLOBAL" else f"{stack.pop(-2)} {stack.pop()}"
            if reference not in _GLOBALS:
                raise ValueError(f"it refers to {reference!r}")
            stack.append(reference)
        elif name == "BINPERSID":
            kind, storage, key = stack.pop()[:3]
            if kind != "storage":
                raise ValueError(f"it refers to a {kind!r}")
            stack.append(torch.frombuffer(bytearray(read(key)), dtype=_STORAGES[storage.removeprefix("torch ")]))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack[-1] = _tensor(*arguments[:4]) if stack[-1] == _TENSOR else _empty(stack[-1], arguments)
        elif name == "STOP":
            return stack.pop()
        else:
            raise ValueError(f"it has the instruction {name}")
    raise ValueError("it has no end")


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple, "MARK": lambda: _MARK, "NONE": lambda: None, "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}  # fmt: skip


def _tensor(storage: Tensor, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return storage.as_strided(shape, stride, offset).clone()


def _empty(name: object, arguments: tuple[object, ...]) -> dict[object, object]:
    if name != _MAPPING or arguments:
        raise ValueError(f"it calls {name!r}")
    return {}
