"""Words and segments with their times, and the windows of audio that they were transcribed in, with faster-whisper's names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from ...callers.errors import ErrorInfo
from ...callers.repr_mixin import ReprMixin
from ...engine.outputs import RequestOutput
from ...mm.speech import TimestampRule
from ..doubt import compression_ratio
from .windows import Window

MIN_OFF = 0.2  # seconds: shorter pauses belong to a turn of a speaker


@dataclass(frozen=True)
class Word:
    """A word with the space before it, and the punctuation next to it.

    Args:
        start, end: seconds.
        probability: mean probability of its tokens.
        speaker: who says it, or None if speakers were not requested. other_speakers: who else speaks at the same time.
    """

    start: float
    end: float
    word: str
    probability: float
    speaker: str | None = None
    other_speakers: tuple[str, ...] = ()


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
        speaker: who says it, or None if speakers were not requested.
        language: code of the language spoken, or None if it is not known.
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
    language: str | None = field(default=None, repr=False, compare=False)

    @property
    def compression_ratio(self) -> float:
        return compression_ratio(self.text)


@dataclass(frozen=True)
class SpeakerTurn:
    """A stretch, in seconds, in which a speaker speaks without a pause. Turns of different speakers may overlap."""

    start: float
    end: float
    speaker: str


@dataclass(frozen=True)
class Attempt:
    """One answer for a window.

    Args:
        avg_logprob: mean log probability of all tokens of the answer, timestamps and the end token included, as in Whisper's
            own code; its thresholds are made for this mean.
        rejected: the gate that the answer failed, "compression_ratio" or "avg_logprob"; None if it passed.
        timestamps: whether the answer was written with timestamps.
    """

    temperature: float
    avg_logprob: float | None
    compression_ratio: float
    rejected: str | None = None
    timestamps: bool = False


@dataclass(frozen=True)
class WindowResult:
    """One window of an audio item, and how its text was chosen.

    Args:
        start, end: seconds.
        text: text of the whole window. If windows overlap, some of its words are also in the previous window.
        attempts: answers in order. `accepted` is the index of the one that is used.
        no_speech_prob: probability of "no speech"; None if the model has no token for it.
        skipped: "no_speech" if the text was dropped because of `no_speech_prob`, else None.
        num_tokens, num_prompt_tokens: number of tokens of the answer, and of its prompt.
        token_logprobs: (token, log probability) of each token of the text, without timestamps and special tokens; empty for a
            model without a decoder.
        overlap: seconds shared with the previous window.
        skip_error: why speech that the text may skip could not be transcribed in shorter windows, or None.
        language: code of the language spoken, or None if it is not known.
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
    token_logprobs: tuple[tuple[int, float], ...] = field(default=(), repr=False, compare=False)
    finish_reason: str | None = None
    overlap: float = 0.0
    skip_error: ErrorInfo | None = None
    language: str | None = None


def main_language(windows: Iterable[WindowResult]) -> str | None:
    """Return the language of the most seconds with text, None if no window names one."""
    seconds: dict[str, float] = {}
    for window in windows:
        if window.text and window.language is not None:
            seconds[window.language] = seconds.get(window.language, 0.0) + window.end - window.start
    return max(seconds, key=lambda code: seconds[code], default=None)


@dataclass(frozen=True)
class WindowText:
    """The text of a window with its last output; `output.error` is set if there is none.

    `token_times`: start of each token of the segments, and end of the last one, in seconds; None if they are not known.
    """

    result: WindowResult
    segments: tuple[Segment, ...] | None
    output: RequestOutput
    window: Window | None = field(default=None, repr=False)
    token_times: list[float] | None = field(default=None, repr=False)


def segments(
    tokens: Sequence[int],
    times: TimestampRule,
    decode: Callable[[Sequence[int]], str],
    logprobs: Sequence[float] = (),
    temperature: float = 0.0,
) -> tuple[Segment, ...]:
    """Split an answer at its timestamp tokens. `logprobs`: of each token, if they are known."""
    made: list[Segment] = []
    start, begin = 0.0, 0

    def add(end: float | None, stop: int) -> None:
        text = decode(tokens[begin:stop]).strip()
        if stop > begin and (text or end is not None):
            mean = sum(logprobs[begin:stop]) / (stop - begin) if logprobs else None
            made.append(Segment(start, end, text, len(made) + 1, tuple(tokens[begin:stop]), mean, temperature))

    for index, token in enumerate(tokens):
        if token >= times.first:
            time = round((token - times.first) * times.step, 3)
            add(time, index)
            start, begin = time, index + 1
    add(None, len(tokens))
    return tuple(made)
