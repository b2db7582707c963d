"""What a request is told of an error that ended it. Knows no request."""

from __future__ import annotations

import logging

from ..mm.errors import SensoriumError
from .quarantine import is_out_of_memory

_OURS = "internal error in "
_log = logging.getLogger(__name__)


def describe(error: Exception) -> str:
    """One line for an exception."""
    text = " ".join(str(error).split())
    return text if isinstance(error, SensoriumError) else f"{type(error).__name__}: {text}"


def explain(error: Exception, what: str) -> str:
    """One line for whoever asked: what to do, and whose fault it was.

    A SensoriumError is the caller's and speaks for itself. Anything else is logged with its traceback: memory that ran out,
    or a bug of ours.

    Args:
        what: that failed, as in "a step" or "reading a prompt".
    """
    if isinstance(error, SensoriumError):
        return describe(error)
    _log.error("%s failed", what, exc_info=error)
    if is_out_of_memory(error):
        return f"{what} failed: {describe(error)}; ask for fewer or smaller requests at once"
    return f"{_OURS}{what}: {describe(error)}; report it with its traceback (in the log, or with --debug)"


def is_ours(told: str) -> bool:
    """Whether what `explain` said of an error is that it is a bug."""
    return told.startswith(_OURS)
