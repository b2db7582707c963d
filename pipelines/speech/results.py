"""Results of `transcribe`, with the names of faster-whisper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

from ...callers.errors import ErrorInfo, InputError, short_repr
from ...engine.outputs import RequestOutput
from ..doubt import TextResult
from .segments import Segment, SpeakerTurn, WindowResult
from .subtitles import LINE_LENGTH, WRITERS, SubtitleLayout
from .timeline import SkippedSpan, SpeechTimeline, file_segments


@dataclass(frozen=True)
class TranscriptionInfo:
    """Language and duration of a transcribed audio item.

    Args:
        language: the language code, or None if it is not known.
        language_probability: probability of the language among all; 1 if it was given, None if the model only names it.
        duration: length of the audio in seconds.
        duration_after_vad: length of the audio that was transcribed, in seconds.
        all_language_probs: code and probability of each language, the most probable first; None if it was not detected.
    """

    language: str | None
    language_probability: float | None
    duration: float
    duration_after_vad: float
    all_language_probs: tuple[tuple[str, float], ...] | None = None


@dataclass(frozen=True)
class LanguageSpan:
    """A stretch of audio in one language. `start`, `end`: seconds. `language`: its code."""

    start: float
    end: float
    language: str


@dataclass(frozen=True, repr=False)
class Transcript(TextResult):
    """The text of one audio item. `doubt` says why it is probably wrong (noise, for example); its thresholds are Whisper's.

    Args:
        text: the text before the fault if there is an error, else the whole text.
        language: the language code, or None if it is not known; with `language="auto"`, that of the most seconds.
        segments: in order, or None if timestamps were not requested.
        error: why there is no text, or only the text up to a fault in the audio; or None.
        output: the request's output, with tokens and timings; with several windows, the output of the last one.
        language_probability, all_language_probs: as in TranscriptionInfo.
        windows: the transcribed windows, each with its attempts.
        speech_spans: start and end of each stretch of speech in seconds, or None without voice detection.
        duration: seconds.
        warnings: what is odd about the file, such as channels that cancel each other out, or a part that cannot be read.
        source: the path or URL of the audio; "" for bytes and samples.
        turns: when each speaker speaks, in order, or None if speakers were not requested.
    """

    text: str
    language: str | None
    segments: tuple[Segment, ...] | None
    error: ErrorInfo | None
    output: RequestOutput = field(repr=False)
    language_probability: float | None = field(default=None, repr=False)
    windows: tuple[WindowResult, ...] = field(default=(), repr=False)
    speech_spans: tuple[tuple[float, float], ...] | None = field(default=None, repr=False)
    duration: float = field(default=0.0, repr=False)
    all_language_probs: tuple[tuple[str, float], ...] | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = field(default=(), repr=False)
    source: str = ""
    turns: tuple[SpeakerTurn, ...] | None = field(default=None, repr=False)

    min_avg_logprob: ClassVar[float] = -1.0
    max_compression_ratio: ClassVar[float] = 2.4

    def __iter__(self) -> Iterator[Any]:
        """Yield the segments and `info`: `segments, info = transcript`. Without timestamps, the text is one segment.

        Raises:
            InputError, MediaError, ...: the exception of `error`.
        """
        if self.error is not None:
            raise self.error.exception()
        single = (Segment(0.0, self.duration, self.text, 1, avg_logprob=self.avg_logprob),) if self.text else ()
        yield single if self.segments is None else self.segments
        yield self.info

    @property
    def info(self) -> TranscriptionInfo:
        """The language and the duration under faster-whisper's names."""
        read = sum(window.end - window.start - window.overlap for window in self.windows)
        return TranscriptionInfo(self.language, self.language_probability, self.duration, read, self.all_language_probs)

    @property
    def skipped(self) -> str | None:
        """ "silence" if voice detection found no speech, but silence, noise or tones, so that nothing was transcribed."""
        return "silence" if self.error is None and self.speech_spans == () and not self.windows else None

    @property
    def skipped_spans(self) -> tuple[SkippedSpan, ...]:
        """The stretches that were not transcribed, or whose text was dropped, in order."""
        speech = ((0.0, self.duration),) if self.speech_spans is None else self.speech_spans
        edges = [0.0, *(edge for span in speech for edge in span), self.duration]
        spans = [SkippedSpan(start, end, "silence") for start, end in list(pairwise(edges))[::2] if start < end]
        for window in self.windows:
            if window.skipped is not None:
                parts = ((max(start, window.start), min(end, window.end)) for start, end in speech)
                spans += [SkippedSpan(start, end, window.skipped) for start, end in parts if start < end]
        return tuple(sorted(spans, key=lambda span: span.start))

    @property
    def timeline(self) -> SpeechTimeline:
        """Words, pauses and speakers with their times, from which the formats of files are made."""
        segments = self.segments
        if segments is None:
            segments = (Segment(0.0, self.duration, self.text, 1),) if self.text else ()
        ended = file_segments(segments, self.windows, self.duration)
        is_timed = self.segments is not None
        facts = self.language, self.duration, self.source
        return SpeechTimeline(ended, self.text, is_timed, self.turns, self.skipped_spans, *facts)

    @property
    def languages(self) -> tuple[LanguageSpan, ...]:
        """The languages spoken, in order. Only `language="auto"` finds more than one."""
        spans = list[LanguageSpan]()
        for window in self.windows:
            if not window.text or window.language is None:
                continue
            if spans and spans[-1].language == window.language:
                spans[-1] = replace(spans[-1], end=window.end)
            else:
                spans.append(LanguageSpan(window.start, window.end, window.language))
        return tuple(spans)

    def to_srt(self, max_line_width: int = LINE_LENGTH, max_line_count: int | None = None) -> str:
        """Return the transcript as SRT subtitles. It needs timestamps: without them the whole text is one subtitle.

        Args:
            max_line_width: characters of a line.
            max_line_count: lines of a subtitle; longer segments are cut, at the end of a sentence if possible. None: not cut.

        Raises:
            InputError, MediaError, ...: the exception of `error`, if there is no text.
        """
        return self._write("srt", max_line_width, max_line_count)

    def to_vtt(self, max_line_width: int = LINE_LENGTH, max_line_count: int | None = None) -> str:
        """Return the transcript as WebVTT subtitles; see `to_srt`."""
        return self._write("vtt", max_line_width, max_line_count)

    def to_tsv(self) -> str:
        """Return a table of start and end in milliseconds and text; see `to_srt`."""
        return self._write("tsv")

    def to_markdown(self) -> str:
        """Return one paragraph per segment, with its time if there are timestamps; see `to_srt`."""
        return self._write("md")

    def to_rttm(self) -> str:
        """Return who spoke when, one line per turn; see `to_srt`. Raise InputError if speakers were not requested."""
        return self._write("rttm")

    def to_stm(self) -> str:
        """Return who said what, one line per segment; see `to_rttm`."""
        return self._write("stm")

    def to_diarized_json(self) -> str:
        """Return OpenAI's object of a transcription with speakers as one line of JSON; see `to_rttm`."""
        return self._write("diarized_json")

    def to_dict(self) -> dict[str, Any]:
        """Return all results as values that JSON can hold."""
        segments = None
        if self.segments is not None:
            segments = [asdict(segment) | {"compression_ratio": segment.compression_ratio} for segment in self.segments]
        return {
            "text": self.text,
            "language": self.language,
            "languages": [asdict(span) for span in self.languages],
            "segments": segments,
            "turns": None if self.turns is None else [asdict(turn) for turn in self.turns],
            "finish_reason": self.finish_reason,
            "avg_logprob": self.avg_logprob,
            "compression_ratio": self.compression_ratio,
            "duration": self.duration,
            "speech_spans": self.speech_spans,
            "skipped": self.skipped,
            "skipped_spans": [asdict(span) for span in self.skipped_spans],
            "doubt": self.doubt,
            "warnings": self.warnings,
            "error": None if self.error is None else asdict(self.error),
        }

    def to_json(self) -> str:
        """Return `to_dict` as one line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def _write(self, name: str, width: int = LINE_LENGTH, count: int | None = None) -> str:
        if self.error is not None and not self.text:
            raise self.error.exception()
        for param, value in (("max_line_width", width), ("max_line_count", count)):
            is_default = value is None and param == "max_line_count"
            if not is_default and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(
                    f"<<param=>>{short_repr(value)} must be an integer, 1 or above", code="invalid_value", param=param
                )
        return WRITERS[name](self.timeline, SubtitleLayout(width, count))

    @property
    def finish_reason(self) -> str | None:
        """ "length" if the text of any window was cut off at the token limit."""
        if self.error is None and any(window.finish_reason == "length" for window in self.windows):
            return "length"
        return super().finish_reason

    @property
    def avg_logprob(self) -> float | None:
        """The mean of the windows' log probabilities (see `Attempt`), weighted by their tokens, or None if there are none."""
        if not self.windows:
            return super().avg_logprob
        chosen = [(window.attempts[window.accepted].avg_logprob, window.num_tokens) for window in self.windows]
        means = [(logprob, count) for logprob, count in chosen if logprob is not None and count]
        return sum(logprob * count for logprob, count in means) / sum(count for _, count in means) if means else None

    @property
    def doubt(self) -> str | None:
        """Why the text is probably wrong, or None; about the first window with a `skip_error` or only rejected answers."""
        doubt = super().doubt if len(self.windows) < 2 else None
        for window in self.windows if doubt is None else ():
            chosen = window.attempts[window.accepted] if window.attempts else None
            sentence_start = f"from {window.start:.1f} to {window.end:.1f} s it"
            if window.text and chosen is not None and chosen.rejected:
                value = getattr(chosen, chosen.rejected)
                return f"{sentence_start}s {chosen.rejected} is {value:.2f}"
            if window.skip_error is not None:
                return f"{sentence_start} may skip speech, which could not be transcribed: {window.skip_error}"
        return doubt
