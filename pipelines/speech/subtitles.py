"""A timeline as subtitles (SRT, WebVTT), a table or Markdown. `WRITERS` has all formats of files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from xml.sax.saxutils import escape

from .diarized import to_diarized_json, to_rttm, to_stm
from .merge import split_words
from .segments import Word
from .timeline import SpeechTimeline

LINE_LENGTH = 42  # characters of a line of subtitles, as is usual
_SENTENCE_END = tuple(".!?。！？…")
_CLAUSE_END = tuple(",;:，、；：")
_MIN_PART = 0.4  # of the largest cue: a cue is cut at a sentence's or a clause's end only if it is this long


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


@dataclass(frozen=True)
class _Cue:
    """A text with its times in seconds, and its speaker if speakers are known."""

    start: float
    end: float
    text: str
    speaker: str | None = None


def to_srt(timeline: SpeechTimeline, layout: SubtitleLayout) -> str:
    """Return subtitles. A cue begins with its speaker in brackets, if speakers are known, as WhisperX writes it."""
    cues = (replace(cue, text=_labelled(cue, "[{}]: ")) for cue in _subtitles(timeline, layout))
    return "\n\n".join(f"{number}\n{_block(cue, ',', layout)}" for number, cue in enumerate(cues, 1))


def to_vtt(timeline: SpeechTimeline, layout: SubtitleLayout) -> str:
    """Return subtitles. The speaker of a cue is the name of its voice, `<v NAME>`."""
    escaped = (
        replace(cue, text=escape(cue.text), speaker=cue.speaker and escape(cue.speaker)) for cue in _subtitles(timeline, layout)
    )
    cues = (replace(cue, text=_labelled(cue, "<v {}>")) for cue in escaped)
    return "\n\n".join(["WEBVTT", *(_block(cue, ".", layout) for cue in cues)])


def to_tsv(timeline: SpeechTimeline, layout: SubtitleLayout) -> str:
    """Return a table of start and end in milliseconds and text, as openai-whisper writes it, with a column of speakers."""
    has_speakers = timeline.turns is not None
    rows = ["start\tend\tspeaker\ttext" if has_speakers else "start\tend\ttext"]
    for cue in _cues(timeline):
        speaker = [" ".join((cue.speaker or "").split())] if has_speakers else []
        fields = (str(round(1000 * cue.start)), str(round(1000 * cue.end)), *speaker, " ".join(cue.text.split()))
        rows.append("\t".join(fields))
    return "\n".join(rows)


def to_markdown(timeline: SpeechTimeline, layout: SubtitleLayout) -> str:
    """Return one paragraph per segment, with its time if there are timestamps, and its speaker."""
    if not timeline.is_timed:
        return timeline.text
    return "\n\n".join(f"**{_time(cue.start, '.')[:8]}** {_labelled(cue, '**{}:** ')}" for cue in _cues(timeline))


WRITERS: Mapping[str, Callable[[SpeechTimeline, SubtitleLayout], str]] = {
    "srt": to_srt,
    "vtt": to_vtt,
    "tsv": to_tsv,
    "md": to_markdown,
    "rttm": lambda timeline, layout: to_rttm(timeline),
    "stm": lambda timeline, layout: to_stm(timeline),
    "diarized_json": lambda timeline, layout: to_diarized_json(timeline),
}


def _labelled(cue: _Cue, form: str) -> str:
    return cue.text if cue.speaker is None else form.format(cue.speaker) + cue.text


def _subtitles(timeline: SpeechTimeline, layout: SubtitleLayout) -> Iterator[_Cue]:
    """Yield the cues, each of at most `layout.count` lines."""
    for segment, cue in zip(timeline.segments, _cues(timeline), strict=True):
        if layout.count is None or len(layout.lines(cue.text)) <= layout.count:
            yield cue
        else:
            for part in _cut(segment.words or _spread(cue.start, cue.end, cue.text), layout, layout.count):
                yield replace(part, speaker=cue.speaker)


def _spread(start: float, end: float, text: str) -> list[Word]:
    """Return the words of a text with times in proportion to their letters."""
    words = split_words(text)
    second, at, spread = (end - start) / max(1, sum(map(len, words))), start, []
    for word in words:
        spread.append(Word(at, at + second * len(word), word, 0.0))
        at = spread[-1].end
    return spread


def _cut(words: Sequence[Word], layout: SubtitleLayout, count: int) -> Iterator[_Cue]:
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
        yield _Cue(cue[0].start, cue[-1].end, _join(cue))


def _join(words: Sequence[Word]) -> str:
    return "".join(word.word for word in words).strip()


def _cues(timeline: SpeechTimeline) -> Iterator[_Cue]:
    for segment in timeline.segments:
        assert segment.end is not None
        yield _Cue(segment.start, segment.end, segment.text, segment.speaker)


def _block(cue: _Cue, point: str, layout: SubtitleLayout) -> str:
    return "\n".join([f"{_time(cue.start, point)} --> {_time(cue.end, point)}", *layout.lines(cue.text)])


def _time(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
