"""Stops requests to a connector for a while after it has failed."""

from __future__ import annotations

import time

RETRY_SECONDS = 5.0


class Backoff:
    """Refuses requests for `RETRY_SECONDS` after a failure."""

    def __init__(self) -> None:
        self._retry_at = 0.0

    def check(self, name: str) -> None:
        """Raise ConnectionError if the last failure was less than `RETRY_SECONDS` ago. `name`: that of the connector."""
        left = self._retry_at - time.monotonic()
        if left > 0:
            raise ConnectionError(f"{name} has failed; it is asked again in {left:.1f} s")

    def record_failure(self) -> None:
        """Begin a pause of `RETRY_SECONDS`."""
        self._retry_at = time.monotonic() + RETRY_SECONDS
