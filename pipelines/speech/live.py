"""Live transcription: the text of an audio stream while it is spoken, at a constant cost per second."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ...callers.errors import InputError
from ...engine.outputs import CompletionOutput
from ...mm.speech import SpeechRequest
from ...mm.types import MultiModalFeature
from ..run import Task
from ..transcribe import make_request, place_segment, timestamped_request, window_size, word_aligner
from ..validation import check_number
from .agreement import OpenText, fit_segments
from .arguments import check_live_options, expected_words, known_language, times_for_speakers
from .boost import boost_arguments
from .decode import FATAL, Aligner, Decoding, SpokenLanguage, WindowInput, answer_start, transcribe_window
from .live_input import STEP_SECONDS, LiveInput
from .live_speakers import LiveSpeakers, live_voices
from .live_windows import Cut, LiveWindows
from .merge import join_texts
from .options import LiveOptions
from .segments import Segment, SpeakerTurn, WindowText
from .timeline import file_segments, with_speakers
from .windows import Window
from .words import put_in_order

if TYPE_CHECKING:
    from ...engine.engine import Engine

_MAX_CONTEXT = 800  # characters of final text in a prompt
_OVERLAP = 4.0  # seconds that two windows share if there is no pause and the model writes no timestamps
_MAX_WINDOW = 30.0  # seconds
_MIN_CHUNK = 1.0  # seconds


class LiveTranscriber(LiveInput):
    """Transcribes a live stream: holds its samples and open window, and makes its passes. It has no thread and no clock.

    The caller runs the tasks of `next_task` one at a time.

    Raises:
        ConfigError: the model does not transcribe speech.
        InputError: this model cannot honour an option.
    """

    def __init__(self, engine: Engine, options: LiveOptions) -> None:
        check_live_options(engine, options)
        assert engine.speech is not None
        rate = engine.speech.decode_spec.rate
        longest = window_size(engine) / rate
        if options.max_window is not None:
            check_number("max_window", options.max_window, min(0.5, longest), longest)
        size = round((min(longest, _MAX_WINDOW) if options.max_window is None else options.max_window) * rate)
        min_bytes = 8 * (size + 2 * rate)
        if options.max_buffer_bytes < min_bytes:
            reason = f"<<param=>>{options.max_buffer_bytes} must be {min_bytes:,} or more: two windows and 4 s"
            raise InputError(reason, code="invalid_value", param="max_buffer_bytes")
        super().__init__(engine, rate, options)
        self._options, self._language, self._words = options, known_language(engine, options), expected_words(engine, options)
        untimed, timed = (partial(make_request, engine, options.task, is_timed) for is_timed in (False, True))
        boost = boost_arguments(engine, options.boosted)
        later = timestamped_request(engine, options)
        self._decoding = Decoding(untimed, options, timestamped_request=later, boost=boost)
        self._times = times_for_speakers(engine, options) if options.tells_speakers else options.times
        aligner = word_aligner(engine, options) if self._times == "word" else None
        self._segment_decoding = replace(self._decoding, make_request=timed, aligner=aligner and _by_samples(aligner))
        self._partial_decoding = Decoding(untimed, replace(options, temperature=0.0, no_speech_threshold=None), boost=boost)
        self._chunk, self._pause = round((options.min_chunk or _MIN_CHUNK) * rate), round(options.pause * rate)
        self._windows = LiveWindows(rate, size, self._pause, options.vad)
        self._text, self._before, self._is_speaking, self._speech_end = OpenText(), "", False, 0
        self._answer_start: CompletionOutput | None = None  # stable start of the open window's answer
        self._hypothesis: Sequence[int] = ()  # tokens of its last pass
        self._overlap = 0  # samples of the open window that are also in the previous one
        self._last_pass = self._last_speech = 0  # end of the last pass, and of the speech in it
        self._window_id = secrets.randbits(62)  # of the open window, whose start does not move while it is open
        self._feature: MultiModalFeature | None = None  # the encoder input of its last pass
        self._word_end = 0.0  # seconds; the end of the last final word
        voices = options.voices or live_voices(engine, options)
        self._speakers = None if voices is None else LiveSpeakers(engine, voices, rate)

    @property
    def _num_samples(self) -> int:
        return self._windows.num_samples

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
                return self._partial if self._is_due() else None
            if cut is None:
                self._take_break(self._windows)
            elif self._windows.has_speech(cut.end):
                return partial(self._final, cut)
            else:
                self._begin(cut.end)
        return None

    def may_wait(self, task: Task[None]) -> bool:
        return task == self._partial

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

    async def _partial(self) -> None:
        start, end = self._windows.start, self._windows.end
        assert start is not None
        self._last_pass, self._last_speech = end, self._windows.speech_end
        self._hear()
        window_text, language = await self._transcribe(start, end, self._partial_decoding, self._answer_start)
        self._answer_start = None
        if window_text.result.text and window_text.result.attempts[0].rejected is None:
            agreed = self._text.add_pass(window_text.result.text)
            self._answer_start = answer_start(self._engine, window_text.output.outputs[0], language.code, agreed)
            self._emit("partial", start, end, self._text.text, self._text.stable_upto, language.code or language.spoken)

    async def _final(self, cut: Cut) -> None:
        """Make the text up to the cut final. At the limit, the end of the text is left to the next window."""
        start, at_limit = self._windows.start, cut.reason == "limit"
        assert start is not None
        assert self._engine.speech is not None
        turns = self._turns(start)
        timed = self._times != "none" or (at_limit and self._engine.speech.has_timestamps)
        decoding = self._segment_decoding if timed else self._decoding
        window_text, language = await self._transcribe(start, cut.end, decoding)
        segments = window_text.segments or ()
        complete, least = _complete_segments(segments, self._windows.size / self._rate / 4) if at_limit else ((), 0)
        at, overlap = cut.end, 0
        if complete:
            text, count = self._text.close_parts([part.text for part in complete], least)
            at = min(at, start + round((complete[count - 1].end or 0.0) * self._rate))
            window_text = replace(window_text, segments=tuple(complete[:count]))
        elif at_limit and window_text.result.text:
            overlap = min(int(_OVERLAP * self._rate), self._windows.size // 4)
            at -= overlap
            text = self._text.close_overlapping(window_text.result.text, overlap / self._windows.size)
        else:
            text = self._text.close(window_text.result.text, keep=cut.reason == "short pause")
        hypothesis = self._hypothesis if overlap else ()  # its end is the start of the next answer
        if self._speakers is not None and turns is not None:
            self._speakers.keep(turns, at / self._rate)
        self._begin(at)
        self._overlap, self._hypothesis = overlap, hypothesis
        if text or window_text.output.error:
            self._language, spoken = language.code, language.code or language.spoken
            self._before = join_texts([self._before, text])[-_MAX_CONTEXT:]
            more = {
                "window": window_text.result,
                "error": window_text.output.error,
                "segments": self._segments(window_text, text, (at + overlap) / self._rate, turns),
                "turns": None if self._speakers is None else self._speakers.take(),
            }
            self._emit("final", start, at + overlap, text, len(text), spoken, **more)
        self._end_turn(self._speech_end)

    def _segments(
        self, window_text: WindowText, text: str, end: float, turns: Sequence[SpeakerTurn] | None
    ) -> tuple[Segment, ...] | None:
        """Return the segments of a final text with their times in the stream, or None if they were not requested.

        Args:
            end: of the text, in seconds.
            turns: of the speakers, or None if these are not told apart.
        """
        if self._times == "none":
            return None
        parts = window_text.segments or (Segment(0.0, window_text.result.end - window_text.result.start, text),)
        placed = [place_segment(part, window_text, self._rate) for part in fit_segments(parts, text)]
        if self._times == "word":
            placed = put_in_order(placed, end, min(self._word_end, end))
            self._word_end = max([self._word_end, *(word.end for part in placed for word in part.words or ())])
        return tuple(placed) if turns is None else with_speakers(file_segments(placed, (), end), turns)

    def _hear(self) -> None:
        """Run the networks that tell speakers apart on the new part of the open window."""
        if self._speakers is not None and self._windows.start is not None:
            first = self._windows.start + self._speakers.num_heard
            self._speakers.hear(self._windows.samples(first, self._windows.length))

    def _turns(self, start: int) -> tuple[SpeakerTurn, ...] | None:
        """Return the turns in the open window and in the samples after it, or None if speakers are not told apart."""
        self._hear()
        return None if self._speakers is None else self._speakers.turns(start / self._rate)

    async def _transcribe(
        self, start: int, end: int, decoding: Decoding, answer_begin: CompletionOutput | None = None
    ) -> tuple[WindowText, SpokenLanguage]:
        """Transcribe samples of the open window. A detected language holds for the stream when its first text is final.

        If the language is followed, it holds for the next window unless another one is clearly likelier.
        """
        follows = self._options.follows_language
        language = SpokenLanguage(None if follows else self._language, before=self._language if follows else None)
        samples = self._windows.samples(start, end)
        pauses = self._windows.pauses(start, end) if decoding.aligner is not None else ()
        window = Window(start, end, samples, end, self._overlap, pauses)
        is_conditioned = self._options.condition_on_previous_text
        context = join_texts([self._words, self._before]) if is_conditioned else self._words
        item = self._item(samples, decoding is self._partial_decoding)
        part = WindowInput(item, window, context, answer_begin, self._hypothesis)
        window_text = await transcribe_window(self._engine, part, decoding, language)
        error = window_text.output.error
        if error is not None and error.code in FATAL:
            raise error.exception()
        self._hypothesis = () if error is not None else window_text.output.outputs[0].token_ids
        return window_text, language

    def _item(self, samples: Tensor, is_partial: bool) -> object:
        """Return the audio of a pass as the encoder's input.

        A local encoder gets the open window as one feature, and computes only what is new. For other models, a partial pass is
        split where encoder windows end, so that the encoder cache has the rows of complete ones; a final pass is one item.
        """
        speech, is_encoded = self._engine.speech, self._engine.config.encodes("audio")
        assert speech is not None
        if is_encoded:
            dtype, earlier = self._engine.dtype, self._feature
            self._feature = speech.open_window(samples, self._window_id, not is_partial, dtype, earlier)
            if self._feature is not None:
                return self._feature
        items = [(part, self._rate) for part in (self._closed_parts(samples) if is_partial else [samples])]
        return items if len(items) > 1 else items[0]

    def _closed_parts(self, samples: Tensor) -> list[Tensor]:
        """Split samples at the ends of encoder windows. Rows of complete windows do not change, so the cache has them."""
        assert self._engine.speech is not None
        size = self._engine.speech.closed_samples
        end = 0 if size is None else (len(samples) - self._rate) // size * size  # a second or more is left
        return [*samples[:end].split(size or 1), samples[end:]] if end > 0 else [samples]

    def _begin(self, at: int) -> None:
        self._windows.drop(at)
        self._last_pass = self._last_speech = at
        self._overlap, self._answer_start, self._hypothesis, self._window_id = 0, None, (), secrets.randbits(62)
        self._feature = None
        if self._speakers is not None:
            self._speakers.begin()


def _by_samples(aligner: Aligner) -> Aligner:
    """Return an aligner that gets a window's samples: the encoder's input of an open window is for its passes only."""

    async def align(
        engine: Engine, item: object, text: WindowText, request: SpeechRequest, language: str | None, rate: int
    ) -> WindowText:
        assert text.window is not None
        return await aligner(engine, (text.window.samples, rate), text, request, language, rate)

    return align


def _complete_segments(segments: Sequence[Segment], least: float) -> tuple[Sequence[Segment], int]:
    """Return the segments up to the last one with an end, and how many of them cover `least` seconds; none if too few do."""
    ends = [index for index, part in enumerate(segments, 1) if part.end is not None]
    reaching = [index for index in ends if (segments[index - 1].end or 0.0) >= least]
    return (segments[: reaching[-1]], reaching[0]) if reaching else ((), 0)
