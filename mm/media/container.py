"""Opens an encoded container through PyAV, without other files and within a time. Knows no stream, no codec and no limits."""

from __future__ import annotations

import io
import math
import time
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from av.container import InputContainer

HEADER_SECONDS = 5.0
"""Of computing, on however busy a machine: FFmpeg reads most headers in milliseconds, but walks empty boxes without a limit."""


def open_container(data: bytes, formats: str, unknown: str) -> InputContainer:
    """The container, whose header has been read.

    Args:
        formats: FFmpeg's names of those that may be opened, without playlists, which would open files and URLs.
        unknown: what the error says of data that FFmpeg cannot open.

    Raises:
        InputError: data of no known format, or a header that takes longer than HEADER_SECONDS.
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
    """A file that ends when it is late: PyAV prints exceptions of a file that is read on after the first."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.deadline, self.late = time.thread_time() + HEADER_SECONDS, False

    def read(self, size: int | None = -1, /) -> bytes:
        self.late = self.late or time.thread_time() > self.deadline
        return b"" if self.late else super().read(size)
