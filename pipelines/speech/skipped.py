"""Finds speech that the text of a window skips, and transcribes it in shorter windows.

Whisper may stop in the middle of a window, or leave out sentences. Timestamps may show this. Where there are none, or where the
skipped speech is inside a segment, a word that seems to last for seconds does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...engine.types import RequestOutput
from ..tasks import Task, WideTask
from .decode import FATAL, WindowText, answer_tokens
from .merge import join_texts, merge_overlap, split_words
from .results import Segment, Word
from .windows import Window
from .words import drop_segment_words, drop_words, merge_punctuation, separate_segments, split_tokens

_LONGEST_WORD = 2.0  # seconds of speech
_MIN_END = 1.0  # seconds; more speech than this in the last word, or after the last timestamp, counts as skipped
_MARGIN, _SHARP = 1.5, 0.1  # seconds transcribed before and after skipped speech; _SHARP: before, if a sentence ends there
_CUT_PAUSE = 0.3  # minimum seconds of a pause at which skipped speech is cut
_SPOKEN = 0.5  # seconds; assumed length of a word before skipped speech
_MIN_RATE = 0.5  # words per second of skipped speech; fewer are no reason to change the text
_MIN_WORDS = 3  # two skips with fewer words between them are one skip
_MIN_CHECKED = 5.0  # seconds; shorter windows are not checked
_MIN_SPARSE = 3.0  # seconds; the same for windows with less than a word per second of speech
_MAX_DEPTH = 2  # levels of shorter windows inside a window

WordTimes = Callable[[Window, Sequence[int]], Task[list[float] | RequestOutput]]
"""Returns the start of each token of a window's text, and the end of the last one, in seconds."""
Part = tuple[str, list[Segment]]
"""A part of a text: a word without segments, or a segment."""
Merged = tuple[str, list[Segment], float]
"""A text, its segments, and the seconds that it shares with the text before."""


@dataclass(frozen=True)
class _Skip:
    """Skipped speech in seconds of the window. It follows `left` parts of the text; `right` is the index of the part after it.

    `after_sentence`: the text stops at a segment's end or at punctuation, whose times are sharp.
    """

    start: float
    end: float
    left: int
    right: int
    after_sentence: bool


def merge_texts(texts: Sequence[Merged]) -> tuple[str, list[Segment]]:
    """Join texts and segments in order. Words in the shared seconds of two texts are kept once."""
    found, parts = list[str](), list[list[Segment]]()
    for text, own, overlap in texts:
        if overlap and found and found[-1] and text:
            found[-1], text, lost, own_lost = merge_overlap(found[-1], text, overlap)
            left, right = drop_segment_words(parts[-1], lost, last=True), drop_segment_words(own, own_lost, last=False)
            parts[-1], own = separate_segments(left, right)
        found.append(text)
        parts.append(own)
    return join_texts(found), [part for own in parts for part in own]


class WindowTranscriber:
    """Transcribes windows. Skipped speech is transcribed, too, and its text is kept if it has enough words.

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
        transcribe: Callable[[Window], WideTask[WindowText]],
        word_times: WordTimes | None,
        decode: Callable[[Sequence[int]], str],
        language: Callable[[], str | None],
        checks_end: bool = True,
    ) -> None:
        self._rate, self._transcribe, self._word_times = rate, transcribe, word_times
        self._decode, self._language, self._checks_end = decode, language, checks_end

    def __call__(self, window: Window, depth: int = _MAX_DEPTH) -> WideTask[WindowText]:
        text = yield from self._transcribe(window)
        if not depth or text.output.error or not text.result.text or text.result.finish_reason == "length":
            return text
        find = self._skips_of_words if text.segments is None else self._skips_of_segments
        found = yield from find(text, window)
        if isinstance(found, RequestOutput):
            return _unchecked(text, found)
        whole, skips = found
        if not skips:
            return text
        chain, at, overlap, inner = list[Merged](), 0, 0.0, None
        for skip in skips:
            chain.append(_group(whole[at : skip.left], overlap, text.segments is None))
            ranges = _ranges(skip, len(window.samples) / self._rate, self._pauses(window))
            for index, (start, end) in enumerate(ranges):
                part = yield from self(self._part(window, start, end), depth - 1)
                if part.output.error:
                    return _unchecked(text, part.output)
                inner = inner or part.result.skip_error
                shared = ranges[index - 1][1] - start if index else skip.start - start
                chain.append((part.result.text, _shifted(part.segments or (), start), shared))
            at, overlap = skip.right, max(0.0, ranges[-1][1] - skip.end)
        chain.append(_group(whole[at:], overlap, text.segments is None))
        merged, segments = merge_texts([one for one in chain if one[0]])
        gained = len(split_words(merged)) - len(split_words(text.result.text))
        if gained < 1 + _MIN_RATE * sum(skip.end - skip.start for skip in skips):
            return replace(text, result=replace(text.result, skip_error=inner))
        result = replace(text.result, text=merged, skip_error=inner)
        parts = None if text.segments is None else tuple(segments)
        return replace(text, result=result, segments=parts, token_times=None)

    def _times(self, text: WindowText, window: Window, tokens: Sequence[int]) -> Task[list[float] | RequestOutput | None]:
        """Return the times of the tokens, None if they are not known or the window needs no check, or a failed output.

        They are not requested if `text` has them, which are those of the same tokens.
        """
        seconds = len(window.samples) / self._rate
        is_sparse = seconds >= _MIN_SPARSE and len(split_words(text.result.text)) < self._speech(window, 0.0, seconds)
        if self._word_times is None or not (is_sparse or seconds >= _MIN_CHECKED):
            return None
        return text.token_times or (yield from self._word_times(window, tokens))

    def _skips_of_words(self, text: WindowText, window: Window) -> Task[tuple[list[Part], list[_Skip]] | RequestOutput]:
        """Return the words of a text and the skipped speech inside words that seem to last too long, or a failed output."""
        tokens, seconds = answer_tokens(text.output.outputs[0]), len(window.samples) / self._rate
        times = yield from self._times(text, window, tokens)
        if times is None or isinstance(times, RequestOutput):
            return times or ([], [])
        words, starts, at, skips = list[str](), list[float](), 0, list[_Skip]()
        for word, count in split_tokens(tokens, self._decode, self._language()):
            words.append(word)
            starts.append(times[min(at, len(times) - 1)])
            at += count
        for index, (start, end) in enumerate(pairwise([*starts, seconds])):
            if self._speech(window, start, end) <= (_MIN_END if index + 1 == len(words) else _LONGEST_WORD):
                continue
            ends = not words[index][-1:].isalnum()  # the word, or the punctuation after it, ends before the skipped speech
            start += _SPOKEN if ends and any(map(str.isalnum, words[index])) else 0.0
            skip = _Skip(start, end, index + ends, index + 1, ends)
            if skips and index - skips[-1].right < _MIN_WORDS:
                skip = replace(skips.pop(), end=end, right=index + 1)
            skips.append(skip)
        return [(word, []) for word in words], skips

    def _skips_of_segments(self, text: WindowText, window: Window) -> Task[tuple[list[Part], list[_Skip]] | RequestOutput]:
        """Return the segments, cut where they skip speech, and the speech skipped between or after them, or a failed output."""
        parts = list(text.segments or ())
        times = yield from self._times(text, window, [token for part in parts for token in part.tokens])
        if isinstance(times, RequestOutput):
            return times
        cut = [(part, True) for part in parts] if times is None else self._cut_all(parts, times, window)
        found = [part for part, _ in cut]
        stop = len(window.samples) / self._rate if self._checks_end else max((part.end or 0.0 for part in parts), default=0.0)
        ends, starts = [0.0, *(part.end for part in found)], [*(part.start for part in found), stop]
        sharp, skips = [True, *(is_sharp for _, is_sharp in cut)], list[_Skip]()
        for index, (end, start) in enumerate(zip(ends, starts, strict=True)):
            least = _MIN_END if index == len(found) and self._checks_end else _LONGEST_WORD
            if end is not None and end < start and self._speech(window, end, start) > least:
                skip = _Skip(end, start, index, index, sharp[index])
                if skips and end < skips[-1].end + _MARGIN:  # the first one's window would reach into this one
                    first = skips.pop()
                    skip = replace(first, end=max(start, first.end), right=index)
                skips.append(skip)
        return [(part.text, [part]) for part in found], skips

    def _cut_all(self, parts: Sequence[Segment], times: Sequence[float], window: Window) -> list[tuple[Segment, bool]]:
        """Return the segments without the speech that none of their words covers, and whether their ends are sharp.

        `times`: start of each token.
        """
        found, at = list[tuple[Segment, bool]](), 0
        for part, following in zip(parts, [*(part.start for part in parts[1:]), None], strict=True):
            words = list[Word]()
            for word, count in split_tokens(part.tokens, self._decode, self._language()):
                start = times[min(at, len(times) - 1)]
                words.append(Word(start, start, word, 0.0))
                at += count
            stop = min((end for end in (part.end, following) if end is not None), default=None)
            found += self._cut(part, merge_punctuation(words), stop, window) if words else [(part, True)]
        return found

    def _cut(self, part: Segment, words: Sequence[Word], stop: float | None, window: Window) -> list[tuple[Segment, bool]]:
        """Cut a segment at words that seem to last too long. `stop`: time at which its last word has ended.

        Such a word is left out, since it may be in the middle of the skipped speech, unless punctuation after it ends a phrase.
        """
        ends = [*(word.start for word in words[1:]), stop]
        cuts = [i for i, (word, end) in enumerate(zip(words, ends, strict=True)) if end and self._is_long(window, word, end)]
        late = self._speech(window, part.start, words[0].start) > _LONGEST_WORD
        if not cuts and not late:
            return [(part, True)]
        found, first = list[tuple[Segment, bool]](), 0
        for i in [*cuts, len(words)]:
            is_sharp = i == len(words) or not words[i].word[-1:].isalnum()
            said, own = words[: i + is_sharp], words[first : i + is_sharp]
            if kept := _text(own):
                start = words[first].start if first or late else part.start
                end = part.end and max(part.end, start) if i == len(words) else words[i].start + _SPOKEN * is_sharp
                timed = part.words and drop_words(drop_words(part.words, _text(said), last=True), kept, last=False)
                found.append((replace(part, start=start, end=end, text=kept, tokens=(), words=timed), is_sharp))
            first = i + 1
        return found

    def _is_long(self, window: Window, word: Word, end: float) -> bool:
        return self._speech(window, word.start, end) > _LONGEST_WORD

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


def _text(words: Sequence[Word]) -> str:
    return "".join(word.word for word in words).strip()


def _group(parts: Sequence[tuple[str, list[Segment]]], overlap: float, is_words: bool) -> Merged:
    text = "".join(text for text, _ in parts).strip() if is_words else join_texts([text for text, _ in parts])
    return text, [part for _, own in parts for part in own], overlap


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
