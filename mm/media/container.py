"""Open an encoded container with PyAV, without access to other files and within a time limit."""

from __future__ import annotations

import io
import math
import time
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from av.container import InputContainer

HEADER_SECONDS = 5.0
"""CPU time limit of a header. FFmpeg reads most in milliseconds, but reads endless empty boxes without a limit."""


def open_container(data: bytes, formats: str, unknown: str) -> InputContainer:
    """Open the container and read its header.

    Args:
        formats: FFmpeg names of the accepted formats, without playlists, which would open files and URLs.
        unknown: error message for data that FFmpeg cannot open.

    Raises:
        InputError: the format is unknown, or the header takes longer than HEADER_SECONDS.
    """
    import av

    source = _Timed(data)
    options = {"format_whitelist": formats, "protocol_whitelist": "none"}
    try:
        container = av.open(source, "r", options=options, metadata_errors="ignore")
    except av.error.FFmpegError:
        container = None
    if source.late:
        raise InputError(f"reading its header takes longer than {HEADER_SECONDS:g} s; the file is broken or hostile")
    if container is None:
        raise InputError(unknown)
    source.deadline = math.inf
    return container


class _Timed(io.BytesIO):
    """A file that ends at the deadline. It does not raise, because PyAV prints further exceptions of a failed file."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.deadline, self.late = time.thread_time() + HEADER_SECONDS, False

    def read(self, size: int | None = -1, /) -> bytes:
        self.late = self.late or time.thread_time() > self.deadline
        return b"" if self.late else super().read(size)
