"""Results of `transcribe`, with the names of faster-whisper."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from ...engine.types import RequestOutput
from ...mm.errors import ErrorInfo
from ...mm.repr_mixin import ReprMixin
from ...mm.speech import TimestampRule
from ..doubt import TextResult, compression_ratio


@dataclass(frozen=True)
class Word:
    """A word with the space before it, and the punctuation next to it.

    Args:
        start, end: seconds.
        probability: mean probability of its tokens.
    """

    start: float
    end: float
    word: str
    probability: float


@dataclass(frozen=True, repr=False)
class Segment(ReprMixin):
    """The text between two timestamps.

    Args:
        start, end: seconds; `end` is None if the answer stopped before the closing timestamp.
        id: number of the segment, from 1.
        tokens: token ids of the text, without timestamps; empty if words were removed in merging overlapping windows.
        avg_logprob: mean log probability of these tokens. (In faster-whisper, all segments of a window have the window's.)
        temperature: sampling temperature.
        seek: start of the segment's window in frames of 10 ms.
        no_speech_prob: probability of "no speech" in the window; None if the model has no token for it.
        words: in order, or None if their times were not requested.
        speaker: None: speakers are not told apart.
    """

    start: float
    end: float | None
    text: str
    id: int = field(default=0, repr=False, compare=False)
    tokens: tuple[int, ...] = field(default=(), repr=False, compare=False)
    avg_logprob: float | None = field(default=None, repr=False, compare=False)
    temperature: float = field(default=0.0, repr=False, compare=False)
    seek: int = field(default=0, repr=False, compare=False)
    no_speech_prob: float | None = field(default=None, repr=False, compare=False)
    words: tuple[Word, ...] | None = field(default=None, repr=False, compare=False)
    speaker: str | None = field(default=None, repr=False, compare=False)

    @property
    def compression_ratio(self) -> float:
        return compression_ratio(self.text)


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
class Attempt:
    """One answer for a window.

    Args:
        avg_logprob: mean log probability of all tokens of the answer, timestamps and the end token included, as in Whisper's
            own code; its thresholds are made for this mean.
        rejected: the gate that the answer failed, "compression_ratio" or "avg_logprob"; None if it passed.
    """

    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    rejected: str | None = None


@dataclass(frozen=True)
class WindowResult:
    """One window of an audio item, and how its text was chosen.

    Args:
        start, end: seconds.
        text: text of the whole window. If windows overlap, some of its words are also in the previous window.
        attempts: answers in order of temperature. `accepted` is the index of the one that is used.
        no_speech_prob: probability of "no speech"; None if the model has no token for it.
        skipped: "no_speech" if the text was dropped because of `no_speech_prob`, else None.
        num_tokens, num_prompt_tokens: number of tokens of the answer, and of its prompt.
        overlap: seconds shared with the previous window.
        skip_error: why speech that the text may skip could not be transcribed in shorter windows, or None.
    """

    start: float
    end: float
    text: str
    attempts: tuple[Attempt, ...]
    accepted: int
    no_speech_prob: float | None = None
    skipped: str | None = None
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    finish_reason: str | None = None
    overlap: float = 0.0
    skip_error: ErrorInfo | None = None


@dataclass(frozen=True, repr=False)
class Transcript(TextResult):
    """The text of one audio item. `doubt` says why it is probably wrong (noise, for example); its thresholds are Whisper's.

    Args:
        text: the text before the fault if there is an error, else the whole text.
        language: the language code, or None if it is not known.
        segments: in order, or None if timestamps were not requested.
        error: why there is no text, or only the text up to a fault in the audio; or None.
        output: the request's output, with tokens and timings; with several windows, the output of the last one.
        language_probability, all_language_probs: as in TranscriptionInfo.
        windows: the transcribed windows, each with its attempts.
        speech_spans: start and end of each stretch of speech in seconds, or None without voice detection.
        duration: seconds.
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

    min_avg_logprob: ClassVar[float] = -1.0
    max_compression_ratio: ClassVar[float] = 2.4

    def __iter__(self) -> Iterator[tuple[Segment, ...] | TranscriptionInfo]:
        """Yield the segments and `info`: `segments, info = transcript`. Without timestamps, the text is one segment.

        Raises:
            InputError, MediaError, ...: the exception of `error`.
        """
        if self.error is not None:
            raise self.error.exception()
        whole = (Segment(0.0, self.duration, self.text, 1, avg_logprob=self.avg_logprob),) if self.text else ()
        yield whole if self.segments is None else self.segments
        yield self.info

    @property
    def info(self) -> TranscriptionInfo:
        """The language and the duration under faster-whisper's names."""
        read = sum(window.end - window.start - window.overlap for window in self.windows)
        return TranscriptionInfo(self.language, self.language_probability, self.duration, read, self.all_language_probs)

    @property
    def skipped(self) -> str | None:
        """ "silence" if voice detection found no speech, so that nothing was transcribed; else None."""
        return "silence" if self.error is None and self.speech_spans == () and not self.windows else None

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
        known = [(logprob, count) for logprob, count in chosen if logprob is not None and count]
        return sum(logprob * count for logprob, count in known) / sum(count for _, count in known) if known else None

    @property
    def doubt(self) -> str | None:
        """Why the text is probably wrong, or None; about the first window with a `skip_error` or only rejected answers."""
        whole = super().doubt if len(self.windows) < 2 else None
        for window in self.windows if whole is None else ():
            chosen = window.attempts[window.accepted] if window.attempts else None
            place = f"from {window.start:.1f} to {window.end:.1f} s it"
            if window.text and chosen is not None and chosen.rejected:
                value = getattr(chosen, chosen.rejected)
                return f"{place}s {chosen.rejected} is {value:.2f}"
            if window.skip_error is not None:
                return f"{place} may skip speech, which could not be transcribed: {window.skip_error}"
        return whole


def segments(
    tokens: Sequence[int],
    times: TimestampRule,
    decode: Callable[[Sequence[int]], str],
    logprobs: Sequence[float] = (),
    temperature: float = 0.0,
) -> tuple[Segment, ...]:
    """Split an answer at its timestamp tokens. `logprobs`: of each token, if they are known."""
    found: list[Segment] = []
    start, begin = 0.0, 0

    def add(end: float | None, stop: int) -> None:
        text = decode(tokens[begin:stop]).strip()
        if stop > begin and (text or end is not None):
            mean = sum(logprobs[begin:stop]) / (stop - begin) if logprobs else None
            found.append(Segment(start, end, text, len(found) + 1, tuple(tokens[begin:stop]), mean, temperature))

    for place, token in enumerate(tokens):
        if token >= times.first:
            time = round((token - times.first) * times.step, 3)
            add(time, place)
            start, begin = time, place + 1
    add(None, len(tokens))
    return tuple(found)
