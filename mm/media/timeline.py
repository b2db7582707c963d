"""Place the decoded blocks of a track on the time of its container: holes become silence."""

from __future__ import annotations

from ...callers.errors import InputError
from .policy import MediaPolicy

_HOLE = 0.1  # seconds; as `min_hard_comp` of FFmpeg's resampler: times of packets are rounded, and some recorders' jitter
_START = 0.03  # seconds before the first sample that are left out, such as those of an encoder's delay
_RESTART = 1.0  # seconds that times go back if a stream begins again
_JUMP = 300.0  # seconds that the times of two joined recordings are apart at least


class Timeline:
    """Tells how much silence precedes each block.

    Args:
        zero: time of the container at which the audio begins.
        jumps: whether times of the format may jump, as those of MPEG-TS do. A jump is not a hole then.
    """

    def __init__(self, zero: float, jumps: bool, policy: MediaPolicy) -> None:
        self._zero, self._jumps, self._limit = zero, jumps, policy.max_audio_gap
        self._position = 0.0  # seconds of audio so far, from `zero` on
        self._is_first = True
        self.silence_seconds = 0.0
        """Seconds of silence so far."""
        self.restarts = 0

    def gap(self, time: float | None) -> float:
        """Return the seconds of silence before a block that begins at `time`; negative: seconds that begin before zero.

        Raises:
            InputError: a hole is longer than the policy allows.
        """
        first, self._is_first = self._is_first, False
        if time is None:
            return 0.0
        gap = time - self._zero - self._position
        if first:
            hole = gap if gap < 0 or gap > _START else 0.0
        elif gap < -_RESTART or (self._jumps and gap > _JUMP):
            self._zero += gap
            self.restarts += 1
            hole = 0.0
        else:
            hole = gap if gap > _HOLE else 0.0
        if hole > self._limit:
            raise InputError(
                f"nothing is recorded for {hole:,.0f} s after {self._position:,.1f} s; at most {self._limit:g} s are filled "
                "(media: max_audio_gap); save it again, or raise the limit",
                code="over_limit",
                param="max_audio_gap",
                limit=self._limit,
                value=hole,
            )
        self._position += hole
        self.silence_seconds += max(0.0, hole)
        return hole

    def add(self, seconds: float) -> None:
        """Advance by the length of a block."""
        self._position += seconds
