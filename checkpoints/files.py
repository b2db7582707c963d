"""Opens, maps and reads the files of checkpoints and caches. Only regular files are opened."""

from __future__ import annotations

import json
import mmap
import os
import stat
import sys
from io import BufferedReader
from pathlib import Path
from typing import Any

from ..callers.errors import CheckpointError

_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # of x86-64 and aarch64; the module mmap does not define it


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading. Never blocks, even if the path is a pipe or a device.

    Raises:
        OSError: the file does not exist or cannot be opened.
        CheckpointError: it is a folder, a pipe or a device.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{os.fspath(path)} is not a regular file; replace it by the file itself")
    return os.fdopen(handle, "rb")


def map_regular(path: str | os.PathLike[str], length: int = 0) -> mmap.mmap:
    """Map the first `length` bytes of a regular file, or all of it. Writes change this process's memory only.

    Nothing is reserved for such writes, so a file may be larger than the memory.

    Raises:
        CheckpointError: the file cannot be opened or mapped, is empty, or has become shorter than `length`.
    """
    flags, access = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), length, flags=flags, prot=access)
    except OSError as error:
        raise CheckpointError(
            f"{os.fspath(path)} cannot be mapped ({error.strerror or error}); check the file and ulimit -v"
        ) from None
    except ValueError:
        raise CheckpointError(f"{os.fspath(path)} is empty, or was cut off while it was read; download it again") from None


def read_file(path: Path) -> bytes | None:
    """Return the bytes of a file; None if it is missing. CheckpointError if it is unreadable or not a regular file."""
    try:
        with open_regular(path) as file:
            return file.read()
    except CheckpointError:
        raise
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: no file can have this name
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing. CheckpointError if it is unreadable or not a regular file."""
    text = read_file(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content
