"""A transcript as subtitles (SRT, WebVTT), a table or Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol
from xml.sax.saxutils import escape

from .merge import split_words
from .segments import Segment, WindowResult, Word

LINE_LENGTH = 42  # characters of a line of subtitles, as is usual
_SENTENCE_END = tuple(".!?。！？…")
_CLAUSE_END = tuple(",;:，、；：")
_MIN_PART = 0.4  # of the largest cue: a cue is cut at a sentence's or a clause's end only if it is this long


class TimedText(Protocol):
    """The part of a Transcript that is written."""

    @property
    def text(self) -> str: ...

    @property
    def segments(self) -> tuple[Segment, ...] | None: ...

    @property
    def windows(self) -> tuple[WindowResult, ...]: ...

    @property
    def duration(self) -> float: ...


@dataclass(frozen=True)
class SubtitleLayout:
    """Limits of the lines of subtitles.

    Args:
        width: characters of a line; longer words are not cut.
        count: lines of a cue; longer segments are cut at a sentence's end if there is one. None: a segment is one cue.
    """

    width: int = LINE_LENGTH
    count: int | None = None

    def lines(self, text: str) -> list[str]:
        return textwrap.wrap(text, self.width, break_long_words=False, break_on_hyphens=False)


def to_srt(transcript: TimedText, layout: SubtitleLayout) -> str:
    blocks = (f"{number}\n{_cue(*cue, ',', layout)}" for number, cue in enumerate(_subtitles(transcript, layout), 1))
    return "\n\n".join(blocks)


def to_vtt(transcript: TimedText, layout: SubtitleLayout) -> str:
    cues = ((start, end, escape(text)) for start, end, text in _subtitles(transcript, layout))
    return "\n\n".join(["WEBVTT", *(_cue(*cue, ".", layout) for cue in cues)])


def to_tsv(transcript: TimedText, layout: SubtitleLayout) -> str:
    """Return a table of start and end in milliseconds and text, as openai-whisper writes it."""
    rows = (f"{round(1000 * start)}\t{round(1000 * end)}\t{' '.join(text.split())}" for start, end, text in _cues(transcript))
    return "\n".join(["start\tend\ttext", *rows])


def to_markdown(transcript: TimedText, layout: SubtitleLayout) -> str:
    """Return one paragraph per segment, with its time if there are timestamps."""
    if transcript.segments is None:
        return transcript.text
    return "\n\n".join(f"**{_time(start, '.')[:8]}** {text}" for start, _, text in _cues(transcript))


WRITERS: Mapping[str, Callable[[TimedText, SubtitleLayout], str]] = {
    "srt": to_srt, "vtt": to_vtt, "tsv": to_tsv, "md": to_markdown,
}  # fmt: skip


def _subtitles(transcript: TimedText, layout: SubtitleLayout) -> Iterator[tuple[float, float, str]]:
    """Yield the cues, each of at most `layout.count` lines."""
    words = iter([part.words for part in transcript.segments or ()])
    for start, end, text in _cues(transcript):
        part_words = next(words, None)
        if layout.count is None or len(layout.lines(text)) <= layout.count:
            yield start, end, text
        else:
            yield from _cut(part_words or _spread(start, end, text), layout, layout.count)


def _spread(start: float, end: float, text: str) -> list[Word]:
    """Return the words of a text with times in proportion to their letters."""
    words = split_words(text)
    second, at, spread = (end - start) / max(1, sum(map(len, words))), start, []
    for word in words:
        spread.append(Word(at, at + second * len(word), word, 0.0))
        at = spread[-1].end
    return spread


def _cut(words: Sequence[Word], layout: SubtitleLayout, count: int) -> Iterator[tuple[float, float, str]]:
    """Yield cues of as many words as fit, but prefer to end a cue at the end of a sentence or of a clause."""
    rest = list(words)
    while rest:
        fits = 1
        while fits < len(rest) and len(layout.lines(_join(rest[: fits + 1]))) <= count:
            fits += 1
        for ends in (_SENTENCE_END, _CLAUSE_END) if fits < len(rest) else ():
            least = _MIN_PART * layout.width * count
            cuts = [i for i in range(1, fits + 1) if rest[i - 1].word.endswith(ends) and len(_join(rest[:i])) >= least]
            if cuts:
                fits = cuts[-1]
                break
        cue, rest = rest[:fits], rest[fits:]
        yield cue[0].start, cue[-1].end, _join(cue)


def _join(words: Sequence[Word]) -> str:
    return "".join(word.word for word in words).strip()


def _cues(transcript: TimedText) -> Iterator[tuple[float, float, str]]:
    """Yield start, end and text. A segment without an end lasts until its window or the audio ends, or the next one starts."""
    parts = transcript.segments
    if parts is None:
        parts = (Segment(0.0, transcript.duration, transcript.text),) if transcript.text else ()
    starts = [part.start for part in parts[1:]]
    for part, following in zip_longest(parts, starts):
        windows = (window.end for window in transcript.windows if window.start <= part.start < window.end)
        limits = (min(windows, default=None), following, transcript.duration)
        end = min(limit for limit in limits if limit is not None) if part.end is None else part.end
        yield part.start, max(part.start, end), part.text


def _cue(start: float, end: float, text: str, point: str, layout: SubtitleLayout) -> str:
    return "\n".join([f"{_time(start, point)} --> {_time(end, point)}", *layout.lines(text)])


def _time(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
