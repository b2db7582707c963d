"""Progress of `transcribe`: seconds of audio, and how many times faster than real time they were transcribed."""

from __future__ import annotations

import sys
import time


class AudioProgress:
    """A progress line on stderr; nothing if it is no terminal."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._start, self._seconds = time.monotonic(), 0.0
        shape = "{desc}"
        self._bar = tqdm(desc="Transcribed 0 s", bar_format=shape, disable=not sys.stderr.isatty(), leave=True)

    def __enter__(self) -> AudioProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, seconds: float) -> None:
        """Count seconds of audio that were transcribed or skipped."""
        self._seconds += seconds
        speed = self._seconds / max(time.monotonic() - self._start, 1e-9)
        self._bar.set_description_str(f"Transcribed {self._seconds:.0f} s of audio, {speed:.1f} times faster than real time")
