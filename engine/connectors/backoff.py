"""Spares a place that has failed from further requests for a while."""

from __future__ import annotations

import time

RETRY_SECONDS = 5.0


class Backoff:
    """Remembers a failure for `RETRY_SECONDS`."""

    def __init__(self) -> None:
        self._retry_at = 0.0

    def check(self, place: str) -> None:
        """Raise ConnectionError if the place has failed a short while ago."""
        left = self._retry_at - time.monotonic()
        if left > 0:
            raise ConnectionError(f"{place} has failed; it is asked again in {left:.1f} s")

    def begin(self) -> None:
        """Remember a failure."""
        self._retry_at = time.monotonic() + RETRY_SECONDS
