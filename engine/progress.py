"""Progress of a batch: a bar on terminals and in notebooks, or lines of the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ..callers.errors import InputError, short_repr

ShowProgress = bool | str | Callable[..., Any] | None
"""True or None: a bar on terminals and in notebooks. False: nothing. "log": an INFO line in the log every 10 seconds. A
callable such as `tqdm.tqdm`: it is called with `total`, `desc` and `unit`, and returns the bar."""
_log = logging.getLogger("sensorium")
_SECONDS = 10.0  # between two lines of the log


def make_progress(total: int, show: ShowProgress) -> Any:
    """Return a context manager with `update(n)`."""
    options = {"total": total, "desc": "Answered prompts", "unit": "prompt"}
    show = True if show is None else show
    if callable(show):
        return show(**options)
    if isinstance(show, str) and show == "log":
        return _LogProgress(total)
    if not isinstance(show, bool):
        raise InputError(
            f'<<param=>>{short_repr(show)} must be True, False, "log" or a class like tqdm',
            code="invalid_value",
            param="use_tqdm",
        )
    from tqdm.auto import tqdm

    return tqdm(**options, disable=None if show else True)


class _LogProgress:
    """Logs the number of answered prompts, at most every 10 seconds and at the end."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._next = self._start + _SECONDS

    def __enter__(self) -> _LogProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()

    def update(self, count: int) -> None:
        self._done += count
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS
            self._write()

    def _write(self) -> None:
        _log.info("answered %d of %d prompts in %.0f s", self._done, self._total, time.monotonic() - self._start)
