"""Tells the speakers of a live stream apart, in constant memory. Labels of past audio never change.

The sound of each window of text is read as that of a file is (see `diarization`). Its voices are then compared with those of
the speakers heard so far, and of each speaker only the sum of its voices is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ...engine.speaker_networks import RATE
from ...mm.media.audio import SampleStream
from .diarization import VoiceReader
from .live_voices import LiveVoices
from .segments import SpeakerTurn
from .speakers import converted, speaker_job

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from .options import SpeechOptions

_MAX_KEPT = 256  # turns that wait for a final text


class LiveSpeakers:
    """Finds the turns in the windows of a stream's text.

    Args:
        rate: hertz of the stream's samples.
    """

    def __init__(self, engine: Engine, voices: LiveVoices, rate: int) -> None:
        self._engine, self._voices, self._rate = engine, voices, rate
        self._end = 0.0  # seconds up to which turns were kept
        self._kept = deque[SpeakerTurn](maxlen=_MAX_KEPT)
        self.begin()

    def begin(self) -> None:
        """Prepare for the samples of a new window. They may have been heard before."""
        self._reader = VoiceReader(self._voices.networks)
        self._stream = None if self._rate == RATE else SampleStream(float(self._rate), RATE, self._engine.config.media)
        self.num_heard = 0

    def hear(self, samples: Tensor) -> None:
        """Read further samples of the window, float32 `[n]`. `num_heard` counts them."""
        self.num_heard += len(samples)
        self._reader.add(samples if self._stream is None else converted(self._stream, samples), batch=1)

    def turns(self, start: float) -> tuple[SpeakerTurn, ...]:
        """Return the turns of all samples of the window. `start`: of the window, in seconds."""
        if self._stream is not None:
            self._reader.add(self._stream.flush(), batch=1)
        self._reader.finish()
        return self._voices.identify(self._reader, start)

    def keep(self, turns: Sequence[SpeakerTurn], end: float) -> None:
        """Keep the parts of turns that lie before `end`, in seconds, and after the turns that were kept before."""
        first, self._end = self._end, max(self._end, end)
        cut = (replace(turn, start=max(turn.start, first), end=min(turn.end, end)) for turn in turns)
        self._kept.extend(turn for turn in cut if turn.start < turn.end)

    def take(self) -> tuple[SpeakerTurn, ...]:
        """Return the turns that were kept, once."""
        taken = tuple(self._kept)
        self._kept.clear()
        return taken


def live_voices(engine: Engine, options: SpeechOptions) -> LiveVoices | None:
    """Load the networks, and read the clips of known speakers; None if speakers are not told apart. See `speaker_job`."""
    job = speaker_job(engine, options)
    return None if job is None else LiveVoices(job.networks, job.limits[1], job.known)
