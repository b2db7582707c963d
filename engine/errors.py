"""Conversion of exceptions to ErrorInfo."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

from ..callers.errors import ErrorInfo, InputError, SensoriumError, error_reason, is_disk_full, is_out_of_memory

_log = logging.getLogger(__name__)


def error_info(error: BaseException, action: str) -> ErrorInfo:
    """Return the ErrorInfo of an exception that failed a request.

    A SensoriumError carries its own. Any other exception is a lack of memory or of space on a disk, or a bug, and is
    logged with its traceback.

    Args:
        action: what failed, as in "a step" or "reading a prompt".
    """
    if isinstance(error, SensoriumError):
        return error.info
    _log.error("%s failed", action, exc_info=error)
    text = error_text(error)
    if is_out_of_memory(error):
        return ErrorInfo("out_of_memory", f"{action} failed: {text}; ask for fewer or smaller requests at once")
    if is_disk_full(error):
        return ErrorInfo("disk_full", f"{action} failed: the disk is full; free space on it, or send the request again later")
    reason = f"internal error in {action}: {text}"
    return ErrorInfo("internal", f"{reason}; report it with its traceback (in the log, or with --debug)")


def warn_of_failures(errors: Sequence[ErrorInfo | None], requests: str = "prompts") -> None:
    """Log one warning with the number of failed requests and the first reason; nothing if none failed."""
    failed = [(index, error) for index, error in enumerate(errors) if error is not None]
    if failed:
        index, first = failed[0]
        reason = f"{len(failed)} of {len(errors)} {requests} failed; the first, at index {index}: {first}"
        _log.warning("%s (each result has its `error`)", reason)


def error_text(error: BaseException) -> str:
    """Return an exception on one line, with its type unless it is a SensoriumError."""
    text = error_reason(error, 960)
    return text if isinstance(error, SensoriumError) else f"{type(error).__name__}: {text}"


class NotPicklable:
    """Base of classes that cannot be pickled or copied, because they hold threads and caches."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        reason = f"the {name} cannot be pickled or copied: it holds threads and caches"
        raise InputError(f"{reason}; make one in each process, and send prompts and outputs between processes")
