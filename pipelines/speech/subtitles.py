"""A transcript as subtitles (SRT, WebVTT), a table or Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from xml.sax.saxutils import escape

from .results import Segment, Transcript

LINE_LENGTH = 42  # characters, as is usual for subtitles


def to_srt(transcript: Transcript) -> str:
    blocks = (f"{number}\n{_cue(*cue, ',')}" for number, cue in enumerate(_cues(transcript), 1))
    return "\n\n".join(blocks)


def to_vtt(transcript: Transcript) -> str:
    cues = ((start, end, escape(text)) for start, end, text in _cues(transcript))
    return "\n\n".join(["WEBVTT", *(_cue(*cue, ".") for cue in cues)])


def to_tsv(transcript: Transcript) -> str:
    """Return a table of start and end in milliseconds and text, as openai-whisper writes it."""
    rows = (f"{round(1000 * start)}\t{round(1000 * end)}\t{' '.join(text.split())}" for start, end, text in _cues(transcript))
    return "\n".join(["start\tend\ttext", *rows])


def to_markdown(transcript: Transcript) -> str:
    """Return one paragraph per segment, with its time if there are timestamps."""
    if transcript.segments is None:
        return transcript.text
    return "\n\n".join(f"**{_time(start, '.')[:8]}** {text}" for start, _, text in _cues(transcript))


WRITERS: Mapping[str, Callable[[Transcript], str]] = {"srt": to_srt, "vtt": to_vtt, "tsv": to_tsv, "md": to_markdown}


def _cues(transcript: Transcript) -> Iterator[tuple[float, float, str]]:
    """Yield start, end and text. A segment without an end lasts until its window or the audio ends, or the next one starts."""
    parts = transcript.segments
    if parts is None:
        parts = (Segment(0.0, transcript.duration, transcript.text),) if transcript.text else ()
    starts = [part.start for part in parts[1:]]
    for part, following in zip_longest(parts, starts):
        windows = (window.end for window in transcript.windows if window.start <= part.start < window.end)
        limits = (min(windows, default=None), following, transcript.duration)
        end = min(one for one in limits if one is not None) if part.end is None else part.end
        yield part.start, max(part.start, end), part.text


def _cue(start: float, end: float, text: str, point: str) -> str:
    lines = textwrap.wrap(text, LINE_LENGTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([f"{_time(start, point)} --> {_time(end, point)}", *lines])


def _time(seconds: float, point: str) -> str:
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
