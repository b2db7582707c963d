"""The input of a live stream: samples in any form, gaps and the end, until its transcriber takes them."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ...callers.errors import ErrorInfo, InputError
from ...callers.repr_mixin import ReprMixin
from ...engine.frontend.request_handle import RequestHandle
from ...mm.media.audio import SampleStream, check_sample_rate
from ..run import Task
from ..validation import check_number
from .live_windows import LiveWindows
from .options import LiveOptions
from .segments import Segment, SpeakerTurn, WindowResult

if TYPE_CHECKING:
    from ...engine.engine import Engine

STEP_SECONDS = 0.5  # of audio that `next_task` classifies at a time, so that it does not hold an event loop
EventKind = Literal["speech_started", "partial", "final", "speech_stopped", "turn_ended", "ended"]


@dataclass(frozen=True, repr=False)
class LiveEvent(ReprMixin):
    """An event of a live stream. Times are seconds since its start.

    Args:
        kind: "speech_started"; "speech_stopped"; "partial": `text` of the open window so far; "final": text that is never
            taken back; "turn_ended": if requested, after the last text before a "speech_stopped"; "ended": the last event,
            with a `reason`.
        stable_upto: number of characters at the start of a partial `text` that will not change.
        start, end: times of the audio of a text; in other events, both are the time of the event.
        lag: seconds of audio after `end` that had arrived when the event was made.
        language: the language code, or None if it is not known.
        reason: why the stream ended: "finished", or "idle" after `idle_timeout`.
        window: how the text of a final event was chosen.
        error: why the window of a final event could not be transcribed; `text` is then its stable part.
        segments: of a final text, with `timestamps` or `speakers`; their texts together are `text`.
        turns: with `speakers`, when each speaker speaks after the turns of earlier final events, in order.
    """

    kind: EventKind
    text: str = ""
    stable_upto: int = 0
    start: float = 0.0
    end: float = 0.0
    lag: float = 0.0
    language: str | None = None
    reason: str | None = None
    window: WindowResult | None = None
    error: ErrorInfo | None = None
    segments: tuple[Segment, ...] | None = None
    turns: tuple[SpeakerTurn, ...] | None = None


@dataclass(frozen=True)
class Gap:
    """Marks `seconds` of lost audio in a live stream. The open window ends before it.

    `Gap(0)` ends the open window at once.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, 0.0, 1e9)


def _with_rate(block: object) -> tuple[Any, Any]:
    """Return the samples of a block, and its rate; None if it has none."""
    if isinstance(block, tuple) and len(block) == 2 and isinstance(block[1], Real) and not isinstance(block[0], Real):
        return block[0], float(block[1])
    return block, None


class LiveInput(ABC):
    """Takes the samples of a stream. Other threads than the one that calls `next_task` may call `push`, `gap` and `finish`.

    Args:
        rate: hertz of the samples that the model takes.

    Attributes:
        events: events that the caller has not taken yet.
        ended: True if the stream is finished and has no open window.
        busy: True if `next_task` returned None before it had looked at all samples. Events do not depend on such breaks, if
            nothing is pushed in them.
        handle: the sequence that is held open between passes, if there is one.
    """

    def __init__(self, engine: Engine, rate: int, options: LiveOptions) -> None:
        self._engine, self._rate, self._max_bytes = engine, rate, options.max_buffer_bytes
        self._stream = SampleStream(float(options.rate or rate), rate, engine.config.media)
        self._lock = threading.RLock()  # guards the stream and the counts of samples
        self._received = self._queued = 0  # samples of the stream, and those in the queue
        self._queue: deque[Tensor | Gap | str] = deque()  # samples, gaps, and the reason of the end
        self.events: deque[LiveEvent] = deque()
        self.ended = self.busy = False
        self._turn_events, self._turn_ends = options.turn_events, False  # speech has stopped, and its text may not be final yet
        self.handle: RequestHandle | None = None

    @abstractmethod
    def next_task(self) -> Task[None] | None:
        """Return the next pass, or None if it has to wait for samples or is `busy`. A pass adds to `events` when it ends."""

    def may_wait(self, task: Task[None]) -> bool:
        """Return whether a pass that is due may wait: a later one will cover its samples, too."""
        return False

    @property
    @abstractmethod
    def _num_samples(self) -> int:
        """Number of samples that were taken from the queue and that no final text covers."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the samples that no final text covers yet."""
        return 4 * (self._queued + self._num_samples)

    @property
    def lag(self) -> float:
        """Seconds of audio that no final text covers yet."""
        return self.buffered_bytes / 4 / self._rate

    def has_room(self, block: object) -> bool:
        """Return whether `push` can take this block now."""
        return self.fits(block) and self.buffered_bytes + self._block_bytes(block) <= self._max_bytes

    def fits(self, block: object) -> bool:
        """Return whether the block is small enough for `push`: half of the buffer or less."""
        return self._block_bytes(block) <= self._max_bytes // 2

    def push(self, block: object) -> None:
        """Add samples in any form of an audio item, or bytes of PCM (int16, little-endian, mono).

        A block `(samples, rate)` changes the rate in hertz, for itself and for blocks without one after it.

        Raises:
            InputError: the block has another form or values that are not finite, its rate is out of limits, or it does not
                fit into the buffer. It is not added, and the stream goes on.
        """
        with self._lock:
            for _ in self.push_in_steps(block):
                pass

    def push_in_steps(self, block: object) -> Generator[None, None, None]:
        """Do the same as `push`. A long block is converted in steps, between which the generator yields.

        Until it has ended, nothing else may be pushed.
        """
        if not self.has_room(block):
            size, limit = self.buffered_bytes, f"max_buffer_bytes={self._max_bytes:,}"
            reason = f"a block of {self._block_bytes(block):,} bytes does not fit beside {size:,} buffered bytes into {limit}"
            how = "push it later" if self.fits(block) else "push blocks of at most half of it"
            raise InputError(f"{reason}; {how}, or raise the limit", code="overloaded", param="max_buffer_bytes")
        samples, rate = _with_rate(block)
        stream = self._stream
        if rate not in (None, stream.source_rate):
            stream = SampleStream(rate, self._rate, self._engine.config.media)
        converted = yield from stream.convert(samples)
        with self._lock:
            if stream is not self._stream:
                self._add(self._stream.flush())
                self._stream = stream
            self._add(converted)

    def gap(self, gap: Gap) -> None:
        """End the open window. The next samples come `gap.seconds` later in the stream."""
        with self._lock:
            self._add(self._stream.flush())
            self._received += round(gap.seconds * self._rate)
            self._queue.append(gap)

    def finish(self, reason: str = "finished") -> None:
        """End the stream. The open window becomes final."""
        with self._lock:
            self._add(self._stream.flush())
            self._queue.append(reason)

    def _block_bytes(self, block: object) -> int:
        """Return the bytes of a block's samples at the model's rate."""
        samples, rate = _with_rate(block)
        if isinstance(samples, bytes | bytearray | memoryview):
            count = len(samples) // 2
        else:
            shape = getattr(samples, "shape", None)
            is_list = isinstance(samples, list | tuple)
            count = max(shape, default=0) if isinstance(shape, tuple) else len(samples) if is_list else 0
        if rate is not None:
            check_sample_rate(rate, self._engine.config.media)
        return math.ceil(4 * count * self._rate / (rate or self._stream.source_rate))

    def _add(self, samples: Tensor) -> None:
        if len(samples):
            self._received += len(samples)
            self._queued += len(samples)
            self._queue.append(samples)

    def _take_samples(self, windows: LiveWindows) -> bool:
        """Move a block from the queue to the windows. Return False if none is next."""
        if not self._queue or not isinstance(self._queue[0], Tensor):
            return False
        with self._lock:
            samples = self._queue.popleft()
            assert isinstance(samples, Tensor)
            windows.add(samples)
            self._queued -= len(samples)
        return True

    def _take_break(self, windows: LiveWindows) -> None:
        """Take a gap or the end from the queue; everything before it is final."""
        item = self._queue.popleft()
        if isinstance(item, Gap):
            windows.jump(round(item.seconds * self._rate))
            self._begin(windows.begin)
        else:
            self.ended = True
            self._emit("ended", windows.length, windows.length, reason=str(item))

    @abstractmethod
    def _begin(self, at: int) -> None:
        """Prepare for speech from the sample `at` of the stream on."""

    def _emit(
        self, kind: EventKind, start: int, end: int, text: str = "", stable: int = 0, language: str | None = None, **more: Any
    ) -> None:
        times = (round(start / self._rate, 3), round(end / self._rate, 3), round((self._received - end) / self._rate, 3))
        self.events.append(LiveEvent(kind, text, stable, *times, language, **more))
        if kind == "speech_stopped":
            self._turn_ends = self._turn_events

    def _end_turn(self, at: int) -> None:
        """Emit "turn_ended" if speech has stopped; all text before is final."""
        if self._turn_ends:
            self._turn_ends = False
            self._emit("turn_ended", at, at)
