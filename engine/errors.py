"""Conversion of exceptions to ErrorInfo."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NoReturn

import torch

from ..mm.errors import ErrorInfo, InputError, SensoriumError, clip, one_line

_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")
_log = logging.getLogger(__name__)


def error_info(error: BaseException, action: str) -> ErrorInfo:
    """Return the ErrorInfo of an exception that failed a request.

    A SensoriumError carries its own. Any other exception is a lack of memory or a bug, and is logged with its traceback.

    Args:
        action: what failed, as in "a step" or "reading a prompt".
    """
    if isinstance(error, SensoriumError):
        return error.info
    _log.error("%s failed", action, exc_info=error)
    text = error_text(error)
    if is_out_of_memory(error):
        return ErrorInfo("out_of_memory", f"{action} failed: {text}; ask for fewer or smaller requests at once")
    reason = f"internal error in {action}: {text}"
    return ErrorInfo("internal", f"{reason}; report it with its traceback (in the log, or with --debug)")


def warn_of_failures(errors: Sequence[ErrorInfo | None], requests: str = "prompts") -> None:
    """Log one warning with the number of failed requests and the first reason; nothing if none failed."""
    failed = [(index, error) for index, error in enumerate(errors) if error is not None]
    if failed:
        index, first = failed[0]
        reason = f"{len(failed)} of {len(errors)} {requests} failed; the first is number {index}: {first}"
        _log.warning("%s (each result has its `error`)", reason)


def error_text(error: BaseException) -> str:
    """Return an exception on one line, with its type unless it is a SensoriumError."""
    text = clip(one_line(str(error)))
    return text if isinstance(error, SensoriumError) else f"{type(error).__name__}: {text}"


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if the device or the host ran out of memory. The same item may succeed at another time."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _MEMORY_TEXTS)


class NotPicklable:
    """Base of classes that cannot be pickled or copied, because they hold threads and caches."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        name = type(self).__name__
        reason = f"the {name} cannot be pickled or copied: it holds threads and caches"
        raise InputError(f"{reason}; make one in each process, and send prompts and outputs between processes")
