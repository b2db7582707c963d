"""The timeline of an audio item or a stream: words, pauses, speakers. Every file format of a transcript is made from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING

from .merge import join_texts
from .segments import MIN_OFF, Segment, SpeakerTurn, WindowResult, Word

if TYPE_CHECKING:
    from .live_input import LiveEvent

_SAME_TURN = 0.9  # of the longest overlap with a turn: a word stays with the speaker of the word before it
_RECENT = 256  # turns of a live stream, one of which may go on in the next final event
_HEARD = 0.5  # share of a word during which another speaker speaks, too


@dataclass(frozen=True)
class SkippedSpan:
    """A stretch of audio without text.

    Args:
        start, end: seconds.
        reason: "silence" (voice detection found silence, noise or tones, but no speech), or "no_speech" (the model took it for
            something else than speech).
    """

    start: float
    end: float
    reason: str


@dataclass(frozen=True)
class SpeechTimeline:
    """The segments of a transcript with their words, times, speakers and pauses.

    Args:
        segments: in order, each with an end; one segment, of the whole audio, if the text has no times.
        text: of all segments.
        is_timed: whether the times of segments were requested.
        turns: of all speakers in order, or None if speakers were not requested.
        pauses: the stretches without text, in order.
        language: the language code, or None if it is not known.
        duration: seconds.
        source: the path or URL of the audio; "" if it has none.
    """

    segments: tuple[Segment, ...]
    text: str = ""
    is_timed: bool = True
    turns: tuple[SpeakerTurn, ...] | None = None
    pauses: tuple[SkippedSpan, ...] = field(default=(), repr=False)
    language: str | None = None
    duration: float = 0.0
    source: str = ""

    @property
    def words(self) -> tuple[Word, ...]:
        """All words, in order; () if their times were not requested."""
        return tuple(word for segment in self.segments for word in segment.words or ())


def live_timeline(events: Iterable[LiveEvent], source: str = "") -> SpeechTimeline:
    """Return the timeline of the final events of a live stream. Other events are left out."""
    segments, is_timed, language, end = list[Segment](), False, None, 0.0
    turns: list[SpeakerTurn] | None = None
    for event in events:
        end = max(end, event.end)
        if event.kind == "final" and event.text:
            is_timed, language = is_timed or event.segments is not None, event.language or language
            if event.turns is not None:
                turns = _joined(turns or [], event.turns)
            segments += _with_ends(event.segments or (Segment(event.start, event.end, event.text),), (), event.end)
    numbered = tuple(replace(segment, id=number) for number, segment in enumerate(segments, 1))
    text = join_texts([segment.text for segment in segments])
    ordered = None if turns is None else tuple(sorted(turns, key=lambda turn: (turn.start, turn.end)))
    return SpeechTimeline(numbered, text, is_timed, ordered, language=language, duration=end, source=source)


def _joined(turns: list[SpeakerTurn], more: Sequence[SpeakerTurn]) -> list[SpeakerTurn]:
    """Append the turns of a final event. One that goes on shortly after another one's end is the same turn."""
    last = {turns[number].speaker: number for number in range(max(0, len(turns) - _RECENT), len(turns))}
    for turn in more:
        number = last.get(turn.speaker)
        if number is not None and turn.start - turns[number].end <= MIN_OFF:
            turns[number] = replace(turns[number], end=turn.end)
        else:
            last[turn.speaker] = len(turns)
            turns.append(turn)
    return turns


def file_segments(segments: Sequence[Segment], windows: Sequence[WindowResult], duration: float) -> tuple[Segment, ...]:
    """Return segments with ends: without one, a segment lasts until its window or the audio ends, or the next one starts."""
    return tuple(_with_ends(segments, windows, duration))


def _with_ends(segments: Sequence[Segment], windows: Sequence[WindowResult], duration: float) -> list[Segment]:
    ended, starts = list[Segment](), [segment.start for segment in segments[1:]]
    for segment, following in zip_longest(segments, starts):
        if segment.end is None:
            ends = (window.end for window in windows if window.start <= segment.start < window.end)
            limits = (min(ends, default=None), following, duration)
            end = min(limit for limit in limits if limit is not None)
        else:
            end = segment.end
        ended.append(replace(segment, end=max(segment.start, end)))
    return ended


def with_speakers(segments: Iterable[Segment], turns: Sequence[SpeakerTurn]) -> tuple[Segment, ...]:
    """Return the segments with their speakers, cut where the speaker changes.

    A word belongs to the speaker whose turns cover most of it, or to the nearest turn. If several cover it almost equally, it
    belongs to the speaker of the word before it, and the others are its `other_speakers`. A segment without words belongs to
    one speaker.

    Args:
        segments: in order, each with an end.
        turns: in the order of their starts.
    """
    finder, done = _TurnFinder(turns), list[Segment]()
    for segment in segments:
        assert segment.end is not None
        if not segment.words:
            names = finder.speakers(segment.start, segment.end)
            done.append(replace(segment, speaker=names[0] if names else None))
            continue
        words = list[Word]()
        for word in segment.words:
            names = finder.speakers(word.start, word.end, words[-1].speaker if words else None)
            words.append(replace(word, speaker=names[0] if names else None, other_speakers=tuple(names[1:])))
        done += _cut_at_speakers(segment, words)
    return tuple(replace(segment, id=number) for number, segment in enumerate(done, 1))


def _cut_at_speakers(segment: Segment, words: Sequence[Word]) -> list[Segment]:
    runs = [list(run) for _, run in groupby(words, key=lambda word: word.speaker)]
    if len(runs) == 1:
        return [replace(segment, words=tuple(words), speaker=words[0].speaker)]
    return [
        replace(
            segment,
            start=run[0].start,
            end=run[-1].end,
            text="".join(word.word for word in run).strip(),
            tokens=(),
            words=tuple(run),
            speaker=run[0].speaker,
        )
        for run in runs
    ]


class _TurnFinder:
    """Finds the speakers of stretches whose starts do not decrease by more than `_BACK` seconds; turns are read once."""

    _BACK = 30.0  # the longest window in which segments may overlap

    def __init__(self, turns: Sequence[SpeakerTurn]) -> None:
        self._turns, self._next = turns, 0
        self._near = list[SpeakerTurn]()  # turns that have begun, and have not ended long ago
        self._last: SpeakerTurn | None = None  # of the turns that were left out, the one that ended last

    def speakers(self, start: float, end: float, before: str | None = None) -> list[str]:
        """Return the speaker of a stretch, and others who speak during it. `before`: the speaker of the word before it."""
        while self._next < len(self._turns) and self._turns[self._next].start < end:
            self._near.append(self._turns[self._next])
            self._next += 1
        self._forget(start - self._BACK)
        seconds = dict[str, float]()
        for turn in self._near:
            shared = min(end, turn.end) - max(start, turn.start)
            if shared > 0 or turn.start <= start == end < turn.end:
                seconds[turn.speaker] = seconds.get(turn.speaker, 0.0) + max(shared, 0.0)
        if not seconds:
            return self._nearest(start, end)
        longest = max(seconds.values())
        ranked = sorted(seconds, key=lambda name: -seconds[name])
        first = before if before is not None and seconds.get(before, -1.0) >= _SAME_TURN * longest else ranked[0]
        least = _HEARD * (end - start)
        return [first, *(name for name in ranked if name != first and seconds[name] >= least)]

    def _forget(self, time: float) -> None:
        ended = [turn for turn in self._near if turn.end < time]
        if ended:
            self._last = max([*ended, *([self._last] if self._last else [])], key=lambda turn: turn.end)
            self._near = [turn for turn in self._near if turn.end >= time]

    def _nearest(self, start: float, end: float) -> list[str]:
        near = [*self._near, *self._turns[self._next : self._next + 1], *([self._last] if self._last else [])]
        turn = min(near, key=lambda turn: max(turn.start - end, start - turn.end), default=None)
        return [] if turn is None else [turn.speaker]
