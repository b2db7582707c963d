"""Live transcription: the text of an audio stream while it is spoken, at a constant cost per second."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ...engine.sampling_params import SamplingParams
from ...engine.types import CompletionOutput
from ...mm.errors import InputError
from ..tasks import Task
from ..transcribe import make_request, place_segment, window_size
from ..validation import check_type
from .agreement import OpenText, fit_segments
from .arguments import (
    NO_SPEECH,
    check_condition,
    check_gates,
    check_language,
    check_mode,
    check_model,
    check_number,
    check_sampling,
    check_vad,
    check_words,
)
from .decode import FATAL, Decoding, SpokenLanguage, WindowText, answer_start, window_task
from .live_input import STEP_SECONDS, LiveInput
from .live_windows import Cut, LiveWindows
from .results import Segment
from .windows import Window

if TYPE_CHECKING:
    from ...engine.llm import LLM

_MAX_CONTEXT = 800  # characters of final text in a prompt
_OVERLAP = 4.0  # seconds that two windows share if there is no pause and the model writes no timestamps
_MAX_WINDOW = 30.0  # seconds


class LiveTranscriber(LiveInput):
    """Transcribes a live stream: holds its samples and open window, and makes its passes. It has no thread and no clock.

    The caller runs the tasks of `next_task` one at a time.

    Args:
        rate: hertz of the samples; None: the model's.
        language, task, context, prompt, hotwords, vad, sampling_params, temperature, thresholds, cache_salt: see `transcribe`.
        timestamps: "segment" (or True): final events have segments.
        condition_on_previous_text: the prompt contains the last final text, if the model's prompt takes text.
        min_chunk: minimum seconds of new audio between two passes over the open window.
        pause: seconds of silence that end a window.
        max_window: seconds of the longest window; None: 30, or what the model takes.
        max_buffer_bytes: limit on the samples that no final text covers yet.
        turn_events: emit "turn_ended".

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
        timestamps: bool | str = False,
        context: str = "",
        prompt: str = "",
        hotwords: str = "",
        vad: object = True,
        sampling_params: SamplingParams | None = None,
        temperature: float | Sequence[float] | None = None,
        no_speech_threshold: float | None = NO_SPEECH,
        log_prob_threshold: float | None = -1.0,
        compression_ratio_threshold: float | None = 2.4,
        condition_on_previous_text: bool = False,
        min_chunk: float = 1.0,
        pause: float = 1.5,
        max_window: float | None = None,
        max_buffer_bytes: int = 1 << 24,
        turn_events: bool = False,
        cache_salt: str | None = None,
    ) -> None:
        model_rate = check_model(llm, task)
        assert llm.speech is not None
        if timestamps == "word":
            raise InputError('timestamps="word" is for files; use "segment" in a live stream', param="timestamps")
        self._timed = check_mode(llm, timestamps, False, False, None) != "none"
        check_type("cache_salt", cache_salt, str, type(None))
        self._language = check_language(llm, language, task)
        self._words = check_words(llm, {"hotwords": hotwords, "context": context, "prompt": prompt})
        check_vad(vad, model_rate)
        params, temperatures = check_sampling(llm, sampling_params, temperature)
        gates = check_gates(llm, no_speech_threshold, log_prob_threshold, compression_ratio_threshold)
        check_condition(llm, condition_on_previous_text)
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
        super().__init__(llm, model_rate, rate, max_buffer_bytes, turn_events)
        self._condition = condition_on_previous_text
        self._decoding = Decoding(partial(make_request, llm, task, False), params, temperatures, *gates, cache_salt=cache_salt)
        self._partial_decoding = replace(self._decoding, temperatures=(0.0,), no_speech_threshold=None)
        self._segment_decoding = replace(self._decoding, make_request=partial(make_request, llm, task, True))
        self._chunk, self._pause = round(min_chunk * model_rate), round(pause * model_rate)
        self._windows = LiveWindows(model_rate, size, self._pause, vad)
        self._text, self._before, self._is_speaking, self._speech_end = OpenText(), "", False, 0
        self._known: CompletionOutput | None = None  # stable start of the open window's answer
        self._overlap = 0  # samples of the open window that are also in the previous one
        self._last_pass = self._last_speech = 0  # end of the last pass, and of the speech in it
        self._window_id = secrets.randbits(62)  # of the open window, whose start does not move while it is open

    @property
    def _held(self) -> int:
        return self._windows.held

    def next_task(self) -> Task[None] | None:
        stop = self._windows.length + round(STEP_SECONDS * self._rate)
        while not self.ended:
            self.busy = self._windows.length >= stop
            if self.busy:
                return None
            at_break = bool(self._queue) and not isinstance(self._queue[0], Tensor)
            cut = self._windows.cut(last=False)
            if cut is None and (self._windows.classify(last=at_break) or self._take_samples(self._windows)):
                continue
            cut = cut or self._windows.cut(last=at_break)
            self._report_speech(cut, at_break)
            if cut is None or not self._windows.has_speech(cut.end):
                self._end_turn(self._speech_end)
            if cut is None and not at_break:
                return self._partial() if self._is_due() else None
            if cut is None:
                self._take_break(self._windows)
            elif self._windows.has_speech(cut.end):
                return self._final(cut)
            else:
                self._begin(cut.end)
        return None

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
        found, language = yield from self._transcribe(start, end, self._partial_decoding, self._known)
        self._known = None
        if found.result.text and found.result.attempts[0].rejected is None:
            agreed = self._text.add_pass(found.result.text)
            self._known = answer_start(self._llm, found.output.outputs[0], language.code, agreed)
            self._emit("partial", start, end, self._text.text, self._text.stable_upto, language.code or language.spoken)

    def _final(self, cut: Cut) -> Task[None]:
        """Make the text up to the cut final. At the limit, the end of the text is left to the next window."""
        start, at_limit = self._windows.start, cut.reason == "limit"
        assert start is not None
        assert self._llm.speech is not None
        timed = self._timed or (at_limit and self._llm.speech.has_timestamps)
        decoding = self._segment_decoding if timed else self._decoding
        found, language = yield from self._transcribe(start, cut.end, decoding)
        whole, least = _whole_segments(found.segments or (), self._windows.size / self._rate / 4) if at_limit else ((), 0)
        at, overlap = cut.end, 0
        if whole:
            text, count = self._text.close_parts([part.text for part in whole], least)
            at = min(at, start + round((whole[count - 1].end or 0.0) * self._rate))
            found = replace(found, segments=tuple(whole[:count]))
        elif at_limit and found.result.text:
            overlap = min(int(_OVERLAP * self._rate), self._windows.size // 4)
            at -= overlap
            text = self._text.close_overlapping(found.result.text, overlap / self._windows.size)
        else:
            text = self._text.close(found.result.text, keep=cut.reason == "short pause")
        self._begin(at)
        self._overlap = overlap
        if text or found.output.error:
            self._language, spoken = language.code, language.code or language.spoken
            self._before = f"{self._before} {text}"[-_MAX_CONTEXT:]
            more = {"window": found.result, "error": found.output.error, "segments": self._segments(found, text)}
            self._emit("final", start, at + overlap, text, len(text), spoken, **more)
        self._end_turn(self._speech_end)

    def _segments(self, found: WindowText, text: str) -> tuple[Segment, ...] | None:
        """Return the segments of a final text with their times in the stream, or None if they were not requested."""
        if not self._timed:
            return None
        parts = found.segments or (Segment(0.0, found.result.end - found.result.start, text),)
        return tuple(place_segment(part, found, self._rate) for part in fit_segments(parts, text))

    def _transcribe(
        self, start: int, end: int, decoding: Decoding, known: CompletionOutput | None = None
    ) -> Task[tuple[WindowText, SpokenLanguage]]:
        """Transcribe samples of the open window. A detected language holds for the stream when its first text is final."""
        language = SpokenLanguage(self._language)
        samples = self._windows.samples(start, end)
        window = Window(start, end, samples, end, self._overlap)
        context = f"{self._words} {self._before}".strip() if self._condition else self._words
        item = self._item(samples, decoding is self._partial_decoding)
        task = window_task(self._llm, item, window, self._rate, decoding, language, context, known)
        found = yield from task  # type: ignore[misc]  # without beams, it makes one request at a time
        error = found.output.error
        if error is not None and error.code in FATAL:
            raise error.exception()
        return found, language

    def _item(self, samples: Tensor, is_partial: bool) -> object:
        """Return the audio of a pass as the encoder's input.

        A local encoder gets the open window as one feature, and computes only what is new. For other models, a partial pass is
        split where encoder windows end, so that the encoder cache has the rows of complete ones; a final pass is one item.
        """
        speech, is_encoded = self._llm.speech, self._llm.config.encodes("audio")
        assert speech is not None
        feature = speech.open_window(samples, self._window_id, not is_partial, self._llm.dtype) if is_encoded else None
        if feature is not None:
            return feature
        items = [(part, self._rate) for part in (self._closed_parts(samples) if is_partial else [samples])]
        return items if len(items) > 1 else items[0]

    def _closed_parts(self, samples: Tensor) -> list[Tensor]:
        """Split samples at the ends of encoder windows. Rows of complete windows do not change, so the cache has them."""
        assert self._llm.speech is not None
        size = self._llm.speech.closed_samples
        end = 0 if size is None else (len(samples) - self._rate) // size * size  # a second or more is left
        return [*samples[:end].split(size or 1), samples[end:]] if end > 0 else [samples]

    def _begin(self, at: int) -> None:
        self._windows.drop(at)
        self._last_pass = self._last_speech = at
        self._overlap, self._known, self._window_id = 0, None, secrets.randbits(62)


def _whole_segments(found: Sequence[Segment], least: float) -> tuple[Sequence[Segment], int]:
    """Return the segments up to the last one with an end, and how many of them cover `least` seconds; none if too few do."""
    ends = [index for index, part in enumerate(found, 1) if part.end is not None]
    reaching = [index for index in ends if (found[index - 1].end or 0.0) >= least]
    return (found[: reaching[-1]], reaching[0]) if reaching else ((), 0)
