"""Words with times: tokens are joined to words, punctuation to its words, and implausible times are mended."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from statistics import median

from .merge import split_words
from .segments import Segment, Word

_UNSPACED = {"zh", "ja", "th", "lo", "my", "yue", "km"}  # languages that put no spaces between words
_BEFORE = "\"'“¿([{-"  # punctuation that belongs to the next word
_AFTER = "\"'.。,，!！?？:：”)]}、"  # punctuation that belongs to the previous word
_SENTENCE_END = ".。!！?？"
_SHORTEST = 0.1  # seconds that a word without a length gets at most
_LONGEST = 0.7  # seconds; longest median duration of a word
_BEFORE_PAUSE, _TAIL = 0.15, 0.5  # seconds before a pause, in which the next word begins or the last one ends too early
Decode = Callable[[Sequence[int]], str]


def split_tokens(tokens: Sequence[int], decode: Decode, language: str | None) -> list[tuple[str, int]]:
    """Split tokens at words. Return the text of each word, with the space before it, and its number of tokens."""
    words: list[tuple[str, int]] = []
    for text, count in _characters(tokens, decode):
        starts = text.startswith(" ") or text.strip() in string.punctuation
        if words and not starts and language not in _UNSPACED:
            words[-1] = (words[-1][0] + text, words[-1][1] + count)
        else:
            words.append((text, count))
    return words


def _characters(tokens: Sequence[int], decode: Decode) -> Iterator[tuple[str, int]]:
    """Yield the smallest runs of tokens that end at a character's end: their text and number."""
    full_text, done, begin = decode(tokens), 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        broken = text.find("\ufffd")
        if broken < 0 or full_text[done + broken : done + broken + 1] == "\ufffd" or end == len(tokens):
            yield text, end - begin
            done, begin = done + len(text), end


def merge_punctuation(words: Sequence[Word]) -> list[Word]:
    """Join punctuation to the next or the previous word."""
    joined: list[Word] = []
    for word in reversed(words):
        if joined and word.word.startswith(" ") and word.word.strip() in _BEFORE:
            joined[-1] = replace(joined[-1], word=word.word + joined[-1].word)
        else:
            joined.append(word)
    merged: list[Word] = []
    for word in reversed(joined):
        if merged and not merged[-1].word.endswith(" ") and word.word in _AFTER:
            merged[-1] = replace(merged[-1], word=merged[-1].word + word.word)
        else:
            merged.append(word)
    return merged


def end_at_pauses(words: Sequence[Word], pauses: Sequence[tuple[float, float]]) -> list[Word]:
    """Let words begin and end at the pauses next to them. Cross-attention does not tell silence from the words beside it.

    A word that begins in a pause, or shortly before a pause that it outlasts, then begins at the end of the pause. A word that
    ends in a pause, or shortly before a pause that comes before the next word, then ends at the start of the pause.
    """
    ended = list(words)
    for first, last in pauses:
        for i, word in enumerate(ended):
            if first - _BEFORE_PAUSE <= word.start < last < word.end:
                ended[i] = replace(word, start=last)
        for i, word in enumerate(ended):
            following = ended[i + 1].start if i + 1 < len(ended) else inf
            if word.start < first < word.end <= last or (word.end <= first <= following and first - word.end <= _TAIL):
                ended[i] = replace(word, end=first)
    return ended


def shorten_long_words(words: Sequence[Word]) -> list[Word]:
    """Shorten words that last much longer than the others: pauses next to a sentence's end are not part of its words."""
    durations = [word.end - word.start for word in words if word.end > word.start]
    longest = 2 * min(_LONGEST, median(durations)) if durations else 0.0
    shortened = list(words)
    for i, word in enumerate(shortened):
        if not longest or word.end - word.start <= longest:
            continue
        if word.word[-1:] in _SENTENCE_END:
            shortened[i] = replace(word, end=word.start + longest)
        elif not i or shortened[i - 1].word[-1:] in _SENTENCE_END:
            shortened[i] = replace(word, start=word.end - longest)
    return shortened


def put_in_order(
    parts: Sequence[Segment], duration: float, after: float = 0.0, following: float | None = None
) -> list[Segment]:
    """Make the times of all words monotone and at most `duration`, and let segments begin and end with their words.

    A word without a length gets one if there is room before the next word.

    Args:
        after: when the word before the first one ends.
        following: when the word after the last one begins, if that is known and before `duration`.
    """
    last, spans = after, list[tuple[float, float]]()
    for word in (word for part in parts for word in part.words or ()):
        start = min(max(word.start, last), duration)
        last = min(max(word.end, start), duration)
        spans.append((round(start, 3), round(last, 3)))
    for i, (start, end) in enumerate(spans):
        if end <= start:
            limit = duration if following is None else min(duration, max(following, start))
            room = spans[i + 1][0] if i + 1 < len(spans) else round(limit, 3)
            spans[i] = start, min(round(start + _SHORTEST, 3), room)
    left, ordered = iter(spans), []
    for part in parts:
        words = [replace(word, start=start, end=end) for word, (start, end) in zip(part.words or (), left, strict=False)]
        ordered.append(replace(part, words=tuple(words), start=words[0].start, end=words[-1].end) if words else part)
    return ordered


def drop_words(words: Sequence[Word], kept: str, last: bool) -> tuple[Word, ...]:
    """Return the words of the text `kept`, whose end (`last`) or start was cut off."""
    ordered = words if last else words[::-1]
    left, chosen = _visible(kept), []
    for word in ordered:
        if left <= 0:
            break
        chosen.append(word)
        left -= _visible(word.word)
    return tuple(chosen if last else chosen[::-1])


def _visible(text: str) -> int:
    return sum(map(len, text.split()))


def drop_segment_words(parts: Sequence[Segment], count: int, last: bool) -> list[Segment]:
    """Drop `count` words at the end (`last`) or at the start of consecutive segments. Segments without words are left out.

    A segment that loses words loses a share of its time in proportion.
    """
    left: list[Segment] = []
    for part in reversed(parts) if last else parts:
        words = split_words(part.text)
        dropped = min(count, len(words))
        count -= dropped
        kept = words[: len(words) - dropped] if last else words[dropped:]
        if kept and dropped:
            text, lost = "".join(kept).strip(), 0.0 if part.end is None else (part.end - part.start) * dropped / len(words)
            timed = part.words and drop_words(part.words, text, last)
            start = part.start if last else round(part.start + lost, 3)
            end = round(part.end - lost, 3) if last and part.end is not None else part.end
            part = replace(part, start=start, end=end, text=text, tokens=(), words=timed)
        if kept:
            left.append(part)
    return left[::-1] if last else left


def separate_segments(left: Sequence[Segment], right: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Return consecutive segments. If the last of `left` ends after the first of `right` begins, they meet in the middle."""
    before, after = list(left), list(right)
    if before and after and before[-1].end is not None and before[-1].end > after[0].start:
        middle = round(max(before[-1].start, (before[-1].end + after[0].start) / 2), 3)
        end = None if after[0].end is None else max(middle, after[0].end)
        before[-1], after[0] = replace(before[-1], end=middle), replace(after[0], start=middle, end=end)
    return before, after
