"""Regular files of checkpoints and caches."""

from __future__ import annotations

import os
import stat
from io import BufferedReader

from .errors import CheckpointError


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
