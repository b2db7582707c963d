"""Live transcription: the text of an audio stream while it is spoken, at a constant cost per second."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from ...engine.sampling_params import SamplingParams
from ...mm.errors import ErrorInfo, InputError
from ...mm.media.audio import SampleStream
from ...mm.repr_mixin import ReprMixin
from ..tasks import Task
from ..transcribe import make_request, window_size
from ..validation import check_type
from .agreement import OpenText
from .arguments import check_gates, check_language, check_model, check_number, check_sampling, check_vad, check_words
from .decode import Decoding, SpokenLanguage, WindowText, window_task
from .live_windows import Cut, LiveWindows
from .results import Segment, WindowResult
from .windows import Window

if TYPE_CHECKING:
    from ...engine.llm import LLM

_MAX_CONTEXT = 800  # characters of final text in a prompt
_OVERLAP = 4.0  # seconds that two windows share if there is no pause and the model writes no timestamps
_MAX_WINDOW = 30.0  # seconds
_FATAL = {"engine_asleep", "engine_closed", "engine_dead"}  # error codes that end a session
EventKind = Literal["speech_started", "partial", "final", "speech_stopped", "ended"]


@dataclass(frozen=True, repr=False)
class LiveEvent(ReprMixin):
    """An event of a live stream. Times are seconds since its start.

    Args:
        kind: "speech_started"; "speech_stopped"; "partial": `text` of the open window so far; "final": text that is never
            taken back; "ended": the last event, with a `reason`.
        stable_upto: number of characters at the start of a partial `text` that will not change.
        start, end: times of the audio of a text; in other events, both are the time of the event.
        lag: seconds of audio after `end` that had arrived when the event was made.
        language: the language code, or None if it is not known.
        reason: why the stream ended: "finished", or "idle" after `idle_timeout`.
        window: how the text of a final event was chosen.
        error: why the window of a final event could not be transcribed; `text` is then its stable part.
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


@dataclass(frozen=True)
class Gap:
    """Marks `seconds` of lost audio in a live stream. The open window ends before it.

    `Gap(0)` ends the open window at once.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, 0.0, 1e9)


class LiveTranscriber:
    """Transcribes a live stream: holds its samples and open window, and makes its passes. It has no thread and no clock.

    The caller runs the tasks of `next_task` one at a time. Other threads may call `push`, `gap` and `finish`.

    Args:
        rate: hertz of the samples; None: the model's.
        language, task, context, prompt, hotwords, vad, sampling_params, temperature, thresholds: see `transcribe`.
        condition_on_previous_text: the prompt contains the last final text, if the model's prompt takes text.
        min_chunk: minimum seconds of new audio between two passes over the open window.
        pause: seconds of silence that end a window.
        max_window: seconds of the longest window; None: 30, or what the model takes.
        max_buffer_bytes: limit on the samples that no final text covers yet.

    Attributes:
        events: events that the caller has not taken yet.
        ended: True if the stream is finished and has no open window.

    Raises:
        ConfigError: the model does not transcribe speech.
        InputError: an argument that is invalid, or that this model cannot honour.
    """

    def __init__(
        self,
        llm: LLM,
        rate: float | None = None,
        language: str | None = None,
        task: str = "transcribe",
        context: str = "",
        prompt: str = "",
        hotwords: str = "",
        vad: object = True,
        sampling_params: SamplingParams | None = None,
        temperature: float | Sequence[float] | None = None,
        no_speech_threshold: float | None = 0.6,
        log_prob_threshold: float | None = -1.0,
        compression_ratio_threshold: float | None = 2.4,
        condition_on_previous_text: bool = False,
        min_chunk: float = 1.0,
        pause: float = 1.5,
        max_window: float | None = None,
        max_buffer_bytes: int = 1 << 24,
    ) -> None:
        model_rate = check_model(llm, task)
        assert llm.speech is not None
        code = check_language(llm, language)
        self._words = check_words(llm, {"hotwords": hotwords, "context": context, "prompt": prompt})
        check_vad(vad, model_rate)
        params, temperatures = check_sampling(sampling_params, temperature)
        gates = check_gates(no_speech_threshold, log_prob_threshold, compression_ratio_threshold)
        check_type("condition_on_previous_text", condition_on_previous_text, bool)
        if condition_on_previous_text and not llm.speech.takes_context:
            reason = "this model's prompt takes no preceding text; leave condition_on_previous_text out"
            raise InputError(reason, param="condition_on_previous_text")
        longest = window_size(llm) / model_rate
        check_number("min_chunk", min_chunk, 0.02, 60.0)
        check_number("pause", pause, 0.1, 60.0)
        check_number("max_window", longest if max_window is None else max_window, min(0.5, longest), longest)
        size = round((min(longest, _MAX_WINDOW) if max_window is None else max_window) * model_rate)
        check_type("max_buffer_bytes", max_buffer_bytes, int)
        min_bytes = 8 * (size + 2 * model_rate)
        if max_buffer_bytes < min_bytes:
            reason = f"max_buffer_bytes={max_buffer_bytes} must be {min_bytes:,} or more: two windows and 4 s"
            raise InputError(reason, param="max_buffer_bytes")
        self._llm, self._rate, self._condition, self._max_bytes = llm, model_rate, condition_on_previous_text, max_buffer_bytes
        self._stream = SampleStream(check_rate(rate, model_rate), model_rate, llm.config.media)
        self._final_decoding = Decoding(partial(make_request, llm, task, False), params, temperatures, *gates)
        self._partial_decoding = replace(self._final_decoding, temperatures=(0.0,), no_speech_threshold=None)
        timed = replace(self._final_decoding, make_request=partial(make_request, llm, task, True))
        self._segment_decoding = timed if llm.speech.has_timestamps else None
        self._language = code
        self._chunk, self._pause = round(min_chunk * model_rate), round(pause * model_rate)
        self._windows = LiveWindows(model_rate, size, self._pause, vad)
        self._text, self._before = OpenText(), ""
        self._overlap = 0  # samples of the open window that are also in the previous one
        self._last_pass = self._last_speech = 0  # end of the last pass, and of the speech in it
        self._is_speaking, self._speech_end = False, 0
        self._lock = threading.Lock()  # guards the stream and the counts of samples
        self._received = self._queued = 0  # samples of the stream, and those in the queue
        self._queue: deque[Tensor | Gap | str] = deque()  # samples, gaps, and the reason of the end
        self.events: deque[LiveEvent] = deque()
        self.ended = False

    @property
    def buffered_bytes(self) -> int:
        """Bytes of the samples that no final text covers yet."""
        return 4 * (self._queued + self._windows.held)

    def has_room(self, block: object) -> bool:
        """Return whether `push` can take this block now."""
        return self.fits(block) and self.buffered_bytes + self._block_bytes(block) <= self._max_bytes

    def fits(self, block: object) -> bool:
        """Return whether the block is small enough for `push`: half of the buffer or less."""
        return self._block_bytes(block) <= self._max_bytes // 2

    def push(self, block: object) -> None:
        """Add samples in any form of an audio item, or bytes of PCM (int16, little-endian, mono).

        Raises:
            InputError: the block has another form or values that are not finite, or does not fit into the buffer. It is
                not added, and the stream goes on.
        """
        with self._lock:
            if not self.has_room(block):
                held, limit = self.buffered_bytes, f"max_buffer_bytes={self._max_bytes:,}"
                reason = (
                    f"a block of {self._block_bytes(block):,} bytes does not fit beside {held:,} buffered bytes into {limit}"
                )
                how = "push it later" if self.fits(block) else "push blocks of at most half of it"
                raise InputError(f"{reason}; {how}, or raise the limit", code="overloaded", param="max_buffer_bytes")
            self._add(self._stream.convert(block))

    def gap(self, gap: Gap) -> None:
        """End the open window. The next samples come `gap.seconds` later in the stream."""
        with self._lock:
            self._add(self._stream.rest())
            self._received += round(gap.seconds * self._rate)
            self._queue.append(gap)

    def finish(self, reason: str = "finished") -> None:
        """End the stream. The open window becomes final."""
        with self._lock:
            self._add(self._stream.rest())
            self._queue.append(reason)

    def next_task(self) -> Task[None] | None:
        """Return the next pass, or None if it has to wait for samples. A pass adds to `events` when it ends."""
        while not self.ended:
            at_break = bool(self._queue) and not isinstance(self._queue[0], Tensor)
            cut = self._windows.cut(last=False)
            if cut is None and (self._windows.classify(last=at_break) or self._take_samples()):
                continue
            cut = cut or self._windows.cut(last=at_break)
            self._report_speech(cut, at_break)
            if cut is None and not at_break:
                return self._partial() if self._is_due() else None
            if cut is None:
                self._take_break()
            elif self._windows.has_speech(cut.end):
                return self._final(cut)
            else:
                self._open_next(cut.end)
        return None

    def _block_bytes(self, block: object) -> int:
        """Return the bytes of a block's samples at the model's rate."""
        if isinstance(block, bytes | bytearray | memoryview):
            count = len(block) // 2
        else:
            shape = getattr(block, "shape", None)
            count = max(shape, default=0) if isinstance(shape, tuple) else len(block) if isinstance(block, list | tuple) else 0
        return math.ceil(4 * count * self._rate / self._stream.own)

    def _add(self, samples: Tensor) -> None:
        if len(samples):
            self._received += len(samples)
            self._queued += len(samples)
            self._queue.append(samples)

    def _take_samples(self) -> bool:
        """Move a block from the queue to the open window. Return False if none is next."""
        if not self._queue or not isinstance(self._queue[0], Tensor):
            return False
        with self._lock:
            samples = self._queue.popleft()
            assert isinstance(samples, Tensor)
            self._windows.add(samples)
            self._queued -= len(samples)
        return True

    def _take_break(self) -> None:
        item = self._queue.popleft()
        if isinstance(item, Gap):
            self._windows.jump(round(item.seconds * self._rate))
            self._open_next(self._windows.begin)
        else:
            self.ended = True
            self._emit("ended", self._windows.length, self._windows.length, reason=str(item))

    def _report_speech(self, cut: Cut | None, at_break: bool) -> None:
        """Emit an event if speech has started or stopped."""
        windows = self._windows
        end = windows.length if cut is None else cut.end
        runs = [run for run in windows.runs if run[0] < end]
        if runs and windows.has_speech(end):
            if not self._is_speaking:
                self._emit("speech_started", runs[0][0], runs[0][0])
            self._is_speaking, self._speech_end = True, runs[-1][1]
        silent = not windows.runs and (at_break or windows.length - self._speech_end >= self._pause)
        if self._is_speaking and (silent if cut is None else cut.reason == "pause"):
            self._is_speaking = False
            self._emit("speech_stopped", self._speech_end, self._speech_end)

    def _is_due(self) -> bool:
        """Return whether the open window has enough new audio for another pass."""
        start, windows = self._windows.start, self._windows
        if start is None or not windows.has_speech(windows.length):
            return False
        return windows.speech_end > self._last_speech and windows.end - max(start, self._last_pass) >= self._chunk

    def _partial(self) -> Task[None]:
        start, end = self._windows.start, self._windows.end
        assert start is not None
        self._last_pass, self._last_speech = end, self._windows.speech_end
        found, language = yield from self._transcribe(start, end, self._partial_decoding)
        if found.result.text and found.result.attempts[0].rejected is None:
            self._text.add_pass(found.result.text)
            self._emit("partial", start, end, self._text.text, self._text.stable_upto, language.code or language.spoken)

    def _final(self, cut: Cut) -> Task[None]:
        """Make the text up to the cut final. At the limit, the end of the text is left to the next window."""
        start, at_limit = self._windows.start, cut.reason == "limit"
        assert start is not None
        decoding = self._segment_decoding if at_limit and self._segment_decoding else self._final_decoding
        found, language = yield from self._transcribe(start, cut.end, decoding)
        whole, least = _whole_segments(found.segments or (), self._windows.size / self._rate / 4) if at_limit else ((), 0)
        at, overlap = cut.end, 0
        if whole:
            text, count = self._text.close_parts([part.text for part in whole], least)
            at = min(at, start + round((whole[count - 1].end or 0.0) * self._rate))
        elif at_limit and found.result.text:
            overlap = min(int(_OVERLAP * self._rate), self._windows.size // 4)
            at -= overlap
            text = self._text.close_overlapping(found.result.text, overlap / self._windows.size)
        else:
            text = self._text.close(found.result.text, keep=cut.reason == "short pause")
        self._open_next(at)
        self._overlap = overlap
        if text or found.output.error:
            self._language, spoken = language.code, language.code or language.spoken
            self._before = f"{self._before} {text}"[-_MAX_CONTEXT:]
            self._emit("final", start, at + overlap, text, len(text), spoken, window=found.result, error=found.output.error)

    def _transcribe(self, start: int, end: int, decoding: Decoding) -> Task[tuple[WindowText, SpokenLanguage]]:
        """Transcribe samples of the open window. A detected language holds for the stream when its first text is final."""
        language = SpokenLanguage(self._language)
        samples = self._windows.samples(start, end)
        window = Window(start, end, samples, end, self._overlap)
        context = f"{self._words} {self._before}".strip() if self._condition else self._words
        task = window_task(self._llm, (samples, self._rate), window, self._rate, decoding, language, context)
        found = yield from task  # type: ignore[misc]  # without beams, it makes one request at a time
        error = found.output.error
        if error is not None and error.code in _FATAL:
            raise error.exception()
        return found, language

    def _open_next(self, at: int) -> None:
        self._windows.drop(at)
        self._last_pass = self._last_speech = at
        self._overlap = 0

    def _emit(
        self, kind: EventKind, start: int, end: int, text: str = "", stable: int = 0, language: str | None = None, **more: Any
    ) -> None:
        times = (round(start / self._rate, 3), round(end / self._rate, 3), round((self._received - end) / self._rate, 3))
        self.events.append(LiveEvent(kind, text, stable, *times, language, **more))


def _whole_segments(found: Sequence[Segment], least: float) -> tuple[Sequence[Segment], int]:
    """Return the segments up to the last one with an end, and how many of them cover `least` seconds; none if too few do."""
    ends = [index for index, part in enumerate(found, 1) if part.end is not None]
    reaching = [index for index in ends if (found[index - 1].end or 0.0) >= least]
    return (found[: reaching[-1]], reaching[0]) if reaching else ((), 0)


def check_rate(rate: object, model_rate: int) -> float:
    """Return the rate of a stream's samples; None means the model's."""
    if rate is None:
        return model_rate
    check_number("rate", rate, 1.0, 1e9)
    return float(rate)  # type: ignore[arg-type]
