"""Finds speech that the text of a window skips, and transcribes it in shorter windows.

Whisper may stop in the middle of a window, or leave out sentences. Timestamps may show this. Without timestamps, or if the
skipped speech is inside a segment, a word that lasts longer than it takes to say shows it.

Another reading of the same speech does not change a text: what is added must fit into the speech that the text does not account
for, and must have passed the checks of an answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from ...engine.outputs import RequestOutput
from .decode import FATAL, answer_tokens
from .merge import join_texts, merge_overlap
from .readings import count_other_words, says
from .segments import Segment, WindowText, Word
from .spoken_length import fast_seconds, is_number_like, normal_seconds, number_groups, slow_seconds, spoken_words
from .windows import Window
from .words import drop_segment_words, drop_words, merge_punctuation, separate_segments, split_tokens

_LONGEST_WORD = 2.0  # seconds of speech
_MIN_END = 1.0  # seconds; more speech than this in the last word, or after the last timestamp, counts as skipped
_SLOW_START = 0.5  # seconds that a long word, such as a number, may last longer than slow speech takes to say it
_ADDED_FACTOR, _ADDED_SECONDS = 1.25, 0.3  # by which the added text, said fast, may exceed the speech left for it
_CROWDED_FACTOR = 2.0  # words that, said fast, take this many times as long as the speech at their place were said elsewhere
_NUMBER_FACTOR = 2.0  # a number said up to this many times as slowly as usual may take all of the speech
_WORDS_PER_DIGIT = 2  # of a number that a reading has in words: "one million three hundred" is 1,300,000
_MARGIN, _SHARP = 1.5, 0.1  # seconds transcribed before and after skipped speech; _SHARP: before, if a sentence ends there
_CUT_PAUSE = 0.3  # minimum seconds of a pause at which skipped speech is cut
_SPOKEN = 0.5  # seconds; assumed length of a word before skipped speech
_MIN_RATE = 0.5  # words per second of skipped speech; fewer are no reason to change the text
_MIN_WORDS = 3  # two skips with fewer words between them are one skip
_MIN_CHECKED = 5.0  # seconds; shorter windows are not checked
_MIN_SPARSE = 3.0  # seconds; the same for windows with less than a word per second of speech
_MAX_DEPTH = 2  # levels of shorter windows inside a window

WordTimes = Callable[[Window, Sequence[int]], Awaitable[list[float] | RequestOutput]]
"""Returns the start of each token of a window's text, and the end of the last one, in seconds."""
Part = tuple[str, list[Segment]]
"""A part of a text: a word without segments, or a segment."""


@dataclass(frozen=True)
class Reading:
    """A text that is joined to others.

    Args:
        overlap: seconds that it shares with the text before.
    """

    text: str
    segments: Sequence[Segment] = ()
    overlap: float = 0.0


@dataclass(frozen=True)
class _Skip:
    """Speech that a window's text skips.

    Args:
        start, end: seconds from the start of the window.
        left: number of the text's parts before it.
        right: index of the text's first part after it.
        after_sentence: the text stops at a segment's end or at punctuation, whose times are sharp.
        word: the words that are said within the skipped speech or directly before it, if they are known.
        said: the same if they are a number; "" otherwise.
        said_from: second at which this number begins; `start` if there is none.
    """

    start: float
    end: float
    left: int
    right: int
    after_sentence: bool
    word: str
    said: str
    said_from: float


@dataclass(frozen=True)
class _Cut:
    """A segment, or the part of one before skipped speech.

    `end`: whether its end is sharp, the words and the number said there, and where this number begins; see `_Skip`.
    """

    segment: Segment
    end: tuple[bool, str, str, float] = (True, "", "", inf)


class SegmentMerger:
    """Joins texts and segments in order; each call returns those that are final. Words that two texts share are kept once."""

    def __init__(self) -> None:
        self._text, self._parts = "", list[Segment]()  # the last ones, which are not final

    def add(self, text: str, segments: Sequence[Segment], overlap: float) -> tuple[str, list[Segment], float | None]:
        """Add a text, which shares `overlap` seconds with the last one.

        Return the last text, its segments, and when the next word begins if the two were cut there and its time is known.
        """
        parts, following = list(segments), None
        if overlap and self._text and text:
            self._text, text, lost, own_lost = merge_overlap(self._text, text, overlap)
            left, right = drop_segment_words(self._parts, lost, last=True), drop_segment_words(parts, own_lost, last=False)
            self._parts, parts = separate_segments(left, right)
            following = next((word.start for part in parts for word in part.words or ()), None)
        final_text, final_parts = self._text, self._parts
        self._text, self._parts = text, parts
        return final_text, final_parts, following


def merge_texts(readings: Sequence[Reading]) -> tuple[str, list[Segment]]:
    """Join texts and segments in order. Words in the shared seconds of two texts are kept once."""
    merger = SegmentMerger()
    final = [merger.add(reading.text, reading.segments, reading.overlap) for reading in (*readings, Reading(""))]
    return join_texts([text for text, _, _ in final]), [part for _, parts, _ in final for part in parts]


class WindowTranscriber:
    """Transcribes windows. Skipped speech is transcribed, too; its text is kept if it adds words for which there is time.

    Args:
        transcribe: transcribes a window once.
        word_times: None if the model has no cross-attention; then only timestamps show what a text skips.
        decode: returns the text of tokens.
        language: returns the language of the text.
        checks_end: also find skipped speech after the last segment. False if the next window begins where that segment ends.
            Speech between its last word and its end is found anyway.
    """

    def __init__(
        self,
        rate: int,
        transcribe: Callable[[Window], Awaitable[WindowText]],
        word_times: WordTimes | None,
        decode: Callable[[Sequence[int]], str],
        language: Callable[[], str | None],
        checks_end: bool = True,
    ) -> None:
        self._rate, self._transcribe, self._word_times = rate, transcribe, word_times
        self._decode, self._language, self._checks_end = decode, language, checks_end

    async def __call__(self, window: Window, depth: int = _MAX_DEPTH) -> WindowText:
        text = await self._transcribe(window)
        if not depth or text.output.error or not text.result.text or text.result.finish_reason == "length":
            return text
        find = self._skips_of_words if text.segments is None else self._skips_of_segments
        checked = await find(text, window)
        if isinstance(checked, RequestOutput):
            return _unchecked(text, checked)
        text_parts, skips = checked
        skips = self._with_room_beside(text_parts, skips, window)
        is_words, chain, at, overlap, inner = text.segments is None, list[Reading](), 0, 0.0, None
        for skip in skips:
            before = _group(text_parts[at : skip.left], overlap, is_words)
            readings, ranges = list[Reading](), _ranges(skip, len(window.samples) / self._rate, self._pauses(window))
            is_likely = True
            for index, (start, end) in enumerate(ranges):
                part = await self(self._part(window, start, end), depth - 1)
                if part.output.error:
                    return _unchecked(text, part.output)
                inner, is_likely = inner or part.result.skip_error, is_likely and _passed(part)
                shared = ranges[index - 1][1] - start if index else skip.start - start
                readings.append(Reading(part.result.text, _shifted(part.segments or (), start), shared))
            late = max(0.0, ranges[-1][1] - skip.end)
            after = _group(text_parts[skip.right :], late, is_words)
            if is_likely and self._adds(skip, [before, *readings, after], text_parts, window):
                chain += [before, *readings]
                at, overlap = skip.right, late
            elif not is_words:  # a segment was cut there
                return replace(text, result=replace(text.result, skip_error=inner))
        if not chain:
            return replace(text, result=replace(text.result, skip_error=inner)) if inner else text
        chain.append(_group(text_parts[at:], overlap, is_words))
        merged, segments = merge_texts([reading for reading in chain if reading.text])
        result = replace(text.result, text=merged, skip_error=inner)
        return replace(text, result=result, segments=None if is_words else tuple(segments), token_times=None)

    def _with_room_beside(self, text_parts: Sequence[Part], skips: Sequence[_Skip], window: Window) -> list[_Skip]:
        """Return the skipped speech beside which the words before and after it can be said in the speech at their place.

        If they cannot, the times of these words are wrong: the seemingly skipped speech is what they stand for.
        """
        crowded = set[int]()  # numbers of the skips beside such words
        texts_from, speech_from = [0, *(skip.right for skip in skips)], [0.0, *(skip.end for skip in skips)]
        texts_to = [*(skip.left for skip in skips), len(text_parts)]
        speech_to = [*(skip.start for skip in skips), len(window.samples) / self._rate]
        stretches = zip(texts_from, texts_to, speech_from, speech_to, strict=True)
        for number, (first, last, start, end) in enumerate(stretches):
            room = self._speech(window, start, max(start, end)) + _ADDED_SECONDS
            text = "".join(f" {text}" if parts else text for text, parts in text_parts[first:last])
            if fast_seconds(text) > _CROWDED_FACTOR * room:
                crowded |= {number - 1, number}
        return [skip for number, skip in enumerate(skips) if number not in crowded]

    def _adds(self, skip: _Skip, readings: Sequence[Reading], text_parts: Sequence[Part], window: Window) -> bool:
        """Return whether the reading of skipped speech adds enough words, and no more than its speech has room for.

        If the reading does not say a number that is said there, its digits are another reading of that number. Unless the text
        before keeps the number, so are as many words as it has, and the whole reading if the number may take all of the speech.

        Args:
            readings: the text before the skipped speech, what was read of it, and the text after it.
            text_parts: the parts of the text.
        """
        before, *between, after = (reading.text for reading in readings)
        merged, _ = merge_texts([reading for reading in readings if reading.text])
        kept = join_texts([before, "".join(text for text, _ in text_parts[skip.left : skip.right]).strip(), after])
        is_said, is_kept = says(join_texts(between), skip.said), says(before, skip.said)
        added = count_other_words(merged, skip.word, is_said) - count_other_words(kept, skip.word, is_said)
        if not (is_said or is_kept):
            added -= _WORDS_PER_DIGIT * spoken_words(skip.said)
        if added < 1 + _MIN_RATE * (skip.end - skip.start):
            return False
        left = self._speech(window, skip.said_from, skip.end) - normal_seconds(skip.said)
        if fast_seconds(merged) - fast_seconds(kept) > _ADDED_FACTOR * max(0.0, left) + _ADDED_SECONDS:
            return False
        may_be_number = left < (_NUMBER_FACTOR - 1) * normal_seconds(skip.said)
        return is_said or is_kept or not may_be_number

    async def _times(self, text: WindowText, window: Window, tokens: Sequence[int]) -> list[float] | RequestOutput | None:
        """Return the times of the tokens, None if they are not known or the window needs no check, or a failed output.

        They are not requested if `text` has them, which are those of the same tokens.
        """
        seconds = len(window.samples) / self._rate
        is_sparse = seconds >= _MIN_SPARSE and spoken_words(text.result.text) < self._speech(window, 0.0, seconds)
        if self._word_times is None or not (is_sparse or seconds >= _MIN_CHECKED):
            return None
        return text.token_times or await self._word_times(window, tokens)

    async def _skips_of_words(self, text: WindowText, window: Window) -> tuple[list[Part], list[_Skip]] | RequestOutput:
        """Return the words of a text and the skipped speech inside words that seem to last too long, or a failed output."""
        tokens, seconds = answer_tokens(text.output.outputs[0]), len(window.samples) / self._rate
        times = await self._times(text, window, tokens)
        if times is None or isinstance(times, RequestOutput):
            return times or ([], [])
        words, starts, at, skips = list[str](), list[float](), 0, list[_Skip]()
        for word, count in split_tokens(tokens, self._decode, self._language()):
            words.append(word)
            starts.append(times[min(at, len(times) - 1)])
            at += count
        groups = number_groups(words)
        for index, (start, end) in enumerate(pairwise([*starts, seconds])):
            least = _MIN_END if index + 1 == len(words) else _LONGEST_WORD
            if not self._is_long(window, words, [*starts, seconds], groups[index], index, least):
                continue
            word, said, said_from = _spoken_there(words, starts, groups[index])
            ends = not words[index][-1:].isalnum()  # the word, or the punctuation after it, ends before the skipped speech
            start += _SPOKEN if ends and any(map(str.isalnum, words[index])) else 0.0
            skip = _Skip(start, end, index + ends, index + 1, ends, word, said, min(said_from, start))
            if skips and index - skips[-1].right < _MIN_WORDS:
                first = skips.pop()
                skip = _joined(first, skip, end)
            skips.append(skip)
        return [(word, []) for word in words], skips

    async def _skips_of_segments(self, text: WindowText, window: Window) -> tuple[list[Part], list[_Skip]] | RequestOutput:
        """Return the segments, cut where they skip speech, and the speech skipped between or after them, or a failed output."""
        parts = list(text.segments or ())
        times = await self._times(text, window, [token for part in parts for token in part.tokens])
        if isinstance(times, RequestOutput):
            return times
        cut = [_Cut(part) for part in parts] if times is None else self._cut_all(parts, times, window)
        kept_segments = [piece.segment for piece in cut]
        stop = len(window.samples) / self._rate if self._checks_end else max((part.end or 0.0 for part in parts), default=0.0)
        ends, starts = [0.0, *(part.end for part in kept_segments)], [*(part.start for part in kept_segments), stop]
        skips = list[_Skip]()
        for index, (end, start) in enumerate(zip(ends, starts, strict=True)):
            least = _MIN_END if index == len(kept_segments) and self._checks_end else _LONGEST_WORD
            if end is not None and end < start and self._speech(window, end, start) > least:
                sharp, word, said, said_from = cut[index - 1].end if index else _Cut.end
                skip = _Skip(end, start, index, index, sharp, word, said, min(end, said_from))
                if skips and end < skips[-1].end + _MARGIN:  # the first one's window would reach into this one
                    first = skips.pop()
                    skip = _joined(first, skip, max(start, first.end))
                skips.append(skip)
        return [(part.text, [part]) for part in kept_segments], skips

    def _cut_all(self, parts: Sequence[Segment], times: Sequence[float], window: Window) -> list[_Cut]:
        """Return the segments without the speech that none of their words covers. `times`: start of each token."""
        pieces, at = list[_Cut](), 0
        for part, following in zip(parts, [*(part.start for part in parts[1:]), None], strict=True):
            words = list[Word]()
            for word, count in split_tokens(part.tokens, self._decode, self._language()):
                start = times[min(at, len(times) - 1)]
                words.append(Word(start, start, word, 0.0))
                at += count
            if words and part.end is not None and words[-1].start > part.end:  # the model closed the segment too early
                latest = len(window.samples) / self._rate if following is None else following
                part = replace(part, end=max(part.end, min(words[-1].start + _SPOKEN, latest)))
            stop = min((end for end in (part.end, following) if end is not None), default=None)
            pieces += self._cut(part, merge_punctuation(words), stop, window) if words else [_Cut(part)]
        return pieces

    def _cut(self, part: Segment, words: Sequence[Word], stop: float | None, window: Window) -> list[_Cut]:
        """Cut a segment at words that seem to last too long. `stop`: time at which its last word has ended.

        Such a word is left out, since it may be in the middle of the skipped speech, unless punctuation after it ends a phrase.
        """
        texts, starts = [word.word for word in words], [word.start for word in words]
        groups, times = number_groups(texts), [*starts, starts[-1] if stop is None else stop]
        cuts = [i for i in range(len(words)) if self._is_long(window, texts, times, groups[i], i, _LONGEST_WORD)]
        late = self._speech(window, part.start, words[0].start) > _LONGEST_WORD
        if not cuts and not late:
            return [_Cut(part)]
        pieces, first = list[_Cut](), 0
        for i in [*cuts, len(words)]:
            is_sharp = i == len(words) or not words[i].word[-1:].isalnum()
            said, new_words = words[: i + is_sharp], words[first : i + is_sharp]
            if kept := _text(new_words):
                start = words[first].start if first or late else part.start
                end = part.end and max(part.end, start) if i == len(words) else words[i].start + _SPOKEN * is_sharp
                timed = part.words and drop_words(drop_words(part.words, _text(said), last=True), kept, last=False)
                number = ("", "", inf) if i == len(words) else _spoken_there(texts, starts, groups[i])
                segment = replace(part, start=start, end=end, text=kept, tokens=(), words=timed)
                pieces.append(_Cut(segment, (is_sharp, *number)))
            first = i + 1
        return pieces

    def _is_long(
        self, window: Window, words: Sequence[str], times: Sequence[float], group: tuple[int, int], index: int, least: float
    ) -> bool:
        """Return whether a word, and the number that it is a part of, have more speech than slow speech takes to say them.

        Args:
            times: start of each word, and the end of the last one.
            group: first word of the number and the one after its last.
            least: seconds of speech that any word may have.
        """
        first, end = group
        if self._speech(window, times[index], times[index + 1]) <= least:
            return False
        text = "".join(words[first:end])
        spare = _SLOW_START if least == _LONGEST_WORD or is_number_like(text) else 0.0
        return self._speech(window, times[first], times[end]) > max(least, slow_seconds(text) + spare)

    def _speech(self, window: Window, start: float, end: float) -> float:
        """Return the seconds of speech between two times of a window."""
        first, last = (window.start + round(time * self._rate) for time in (start, end))
        pauses = sum(max(0, min(last, b) - max(first, a)) for a, b in window.pauses)
        return (last - first - pauses) / self._rate

    def _pauses(self, window: Window) -> list[tuple[float, float]]:
        """Return the pauses at which skipped speech may be cut, in seconds of the window."""
        return [(start, end) for start, end in window.pause_times(self._rate) if end - start >= _CUT_PAUSE]

    def _part(self, window: Window, start: float, end: float) -> Window:
        first, last = round(start * self._rate), round(end * self._rate)
        begin, stop = window.start + first, min(window.start + last, window.end)
        return Window(begin, stop, window.samples[first:last], stop, 0, window.pauses)


def _unchecked(text: WindowText, failed: RequestOutput) -> WindowText:
    """Return the text with the error of a request about its skipped speech; with a fatal error there is no text."""
    if failed.error is not None and failed.error.code in FATAL:
        return replace(text, result=replace(text.result, text=""), segments=None, output=failed)
    return replace(text, result=replace(text.result, skip_error=failed.error))


def _ranges(skip: _Skip, seconds: float, pauses: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the start and end of the one or two windows in which skipped speech is transcribed, in seconds of the window.

    There are two if the speech and its margins are longer than 0.6 of the window. They meet in the longest pause whose middle
    is in the middle third. Without such a pause, they overlap by 2 * _MARGIN around the middle.
    """
    margin = _SHARP if skip.after_sentence else _MARGIN
    start, end = max(0.0, skip.start - margin), min(seconds, skip.end + _MARGIN)
    if end - start <= 0.6 * seconds:
        return [(start, end)]
    third, middle = (end - start) / 3, (start + end) / 2
    cuts = [pause for pause in pauses if start + third <= sum(pause) / 2 <= end - third]
    if cuts:
        first, last = max(cuts, key=lambda pause: pause[1] - pause[0])
        at = (first + last) / 2
        return [(start, at), (at, end)]
    return [(start, min(end, middle + _MARGIN)), (max(start, middle - _MARGIN), end)]


def _passed(text: WindowText) -> bool:
    """Return whether the answer of a window passed the gates."""
    attempts = text.result.attempts
    return not attempts or attempts[text.result.accepted].rejected is None


def _spoken_there(words: Sequence[str], starts: Sequence[float], group: tuple[int, int]) -> tuple[str, str, float]:
    """Return the text of a group and, if it is a number, this text again and where it begins."""
    text = "".join(words[slice(*group)]).strip()
    return (text, text, starts[group[0]]) if is_number_like(text) else (text, "", inf)


def _joined(first: _Skip, second: _Skip, end: float) -> _Skip:
    """Return two skips as one that ends at `end`. Their words may be of the same number, which then counts once."""
    word = first.word if first.word == second.word else f"{first.word} {second.word}"
    said = first.said if first.said == second.said else f"{first.said} {second.said}".strip()
    return replace(first, end=end, right=second.right, word=word, said=said)


def _text(words: Sequence[Word]) -> str:
    return "".join(word.word for word in words).strip()


def _group(parts: Sequence[tuple[str, list[Segment]]], overlap: float, is_words: bool) -> Reading:
    text = "".join(text for text, _ in parts).strip() if is_words else join_texts([text for text, _ in parts])
    return Reading(text, [part for _, segments in parts for part in segments], overlap)


def _shifted(parts: Sequence[Segment], seconds: float) -> list[Segment]:
    """Return segments that are `seconds` later."""
    return [
        replace(
            part,
            start=part.start + seconds,
            end=None if part.end is None else part.end + seconds,
            words=part.words and tuple(replace(w, start=w.start + seconds, end=w.end + seconds) for w in part.words),
        )
        for part in parts
    ]
