"""Speech that the text of a window skips is transcribed in shorter windows. A made-up model knows when each word is spoken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sensorium.engine.types import CompletionOutput, RequestOutput
from sensorium.mm.errors import ErrorCode, ErrorInfo
from sensorium.pipelines import transcribe as transcribing
from sensorium.pipelines.speech.decode import WindowText
from sensorium.pipelines.speech.merge import find_merge_point
from sensorium.pipelines.speech.results import Attempt, Segment, Transcript, WindowResult
from sensorium.pipelines.speech.skipped import WindowTranscriber, merge_texts
from sensorium.pipelines.speech.windows import Window, WindowReader
from sensorium.pipelines.tasks import advance
from sensorium.pipelines.transcribe import _next_start, _quietest

RATE = 100
WORDS = [f" word{number}" for number in range(60)]  # one each half a second
SAID = dict(enumerate(WORDS))
WINDOW = Window(1000, 1000 + 30 * RATE, torch.zeros(30 * RATE), 1000 + 30 * RATE)


def failed(code: ErrorCode) -> RequestOutput:
    return RequestOutput("", None, [], [CompletionOutput(0, "", [], finish_reason="error")], error=ErrorInfo(code, "no room"))


class Model:
    """Hears the words of a window, without those that it skips in windows longer than 20 s."""

    def __init__(
        self,
        skipped: Sequence[int],
        timed: bool = False,
        longest: float = 20.0,
        fails: dict[int, ErrorCode] | None = None,
        late: bool = False,
    ) -> None:
        self.late = late
        self.fails = fails or {}  # number of a request (-1: times of words) -> code of its error
        self.skipped, self.timed, self.longest, self.windows = set(skipped), timed, longest, list[tuple[int, int]]()

    def heard(self, window: Window) -> list[int]:
        first, last = (2 * (at - WINDOW.start) / RATE for at in (window.start, window.end))
        heard = [number for number in range(60) if first <= number and number + 1 <= last]
        return [n for n in heard if n not in self.skipped] if len(window.samples) > self.longest * RATE else heard

    def transcribe(self, window: Window) -> Iterator[Any]:
        self.windows.append((window.start - WINDOW.start, window.end - WINDOW.start))
        if (code := self.fails.get(len(self.windows) - 1)) is not None:
            return WindowText(WindowResult(0.0, 0.0, "", (), 0), None, failed(code))
        heard, begin = self.heard(window), (window.start - WINDOW.start) / RATE
        text = "".join(WORDS[n] for n in heard).strip()
        segments = tuple(self.segments(heard, begin, len(window.samples) / RATE))
        result = WindowResult(window.start / RATE, window.end / RATE, text, (), 0, finish_reason="stop")
        output = RequestOutput("", None, [], [CompletionOutput(0, text, heard, finish_reason="length")])
        return WindowText(result, segments if self.timed else None, output, window)
        yield

    def segments(self, heard: list[int], begin: float, seconds: float) -> Iterator[Segment]:
        """Yield a segment for each word or, if `late`, for each ten, which ends where the next one begins."""
        groups = [heard[i : i + 10] for i in range(0, len(heard), 10)] if self.late else [[n] for n in heard]
        starts = [0.0, *(group[0] / 2 - begin for group in groups[1:]), seconds]
        for group, start, end in zip(groups, starts, starts[1:], strict=False):
            times = (start, end) if self.late else (group[0] / 2 - begin, group[0] / 2 - begin + 0.5)
            yield Segment(*times, "".join(WORDS[n] for n in group).strip(), tokens=tuple(group))

    def times(self, window: Window, tokens: Sequence[int]) -> Iterator[Any]:
        begin = (window.start - WINDOW.start) / RATE
        if -1 in self.fails:
            return failed(self.fails[-1])
        return [0.0, *(n / 2 - begin for n in tokens[1:]), len(window.samples) / RATE]
        yield

    def run(self, window: Window = WINDOW, checks_end: bool = True) -> WindowText:
        decode = lambda tokens: "".join(SAID[token] for token in tokens)  # noqa: E731
        task = WindowTranscriber(RATE, self.transcribe, self.times, decode, lambda: "en", checks_end)(window)
        with pytest.raises(StopIteration) as stop:
            next(task)
        return stop.value.value


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("skipped", [range(20, 40), range(42, 60), range(16), [*range(8, 20), *range(30, 44)]])
def test_skipped_speech_is_transcribed(skipped: Sequence[int], timed: bool) -> None:
    model = Model(skipped, timed)
    found = model.run()
    assert found.result.text.split() == [word.strip() for word in WORDS]
    assert len(model.windows) >= 2
    if timed:
        assert [part.text for part in found.segments] == [word.strip() for word in WORDS]
        assert [part.start for part in found.segments] == pytest.approx([number / 2 for number in range(60)])


@pytest.mark.parametrize("checks_end", [True, False], ids=["default", "sequential"])
@pytest.mark.parametrize("skipped", [range(20, 40), range(42, 60), range(16), [*range(8, 20), *range(30, 44)], range(2, 58)])
def test_timestamps_may_hide_skipped_speech(skipped: Sequence[int], checks_end: bool) -> None:
    """Segments whose timestamps cover speech that is not in their text are cut at words that seem to last too long."""
    model = Model(skipped, timed=True, late=True)
    found = model.run(checks_end=checks_end)
    assert found.result.text.split() == [word.strip() for word in WORDS]
    assert " ".join(part.text for part in found.segments) == found.result.text
    assert all(a.start <= a.end <= b.start for a, b in pairwise(found.segments))
    assert len(model.windows) <= 4 * (1 + (len(skipped) == 26))


def test_skipped_speech_on_both_sides_of_a_word_is_one() -> None:
    """A word after skipped speech is later than the end of its segment, after which speech is skipped, too."""

    class Early(Model):
        def segments(self, heard: list[int], begin: float, seconds: float) -> Iterator[Segment]:
            *parts, last = super().segments(heard, begin, seconds)
            return iter([*parts, replace(last, end=19.5) if len(heard) == 40 else last])

    model = Early([*range(39, 44), *range(45, 60)], timed=True, late=True)
    found = model.run()
    assert found.result.text.split() == [word.strip() for word in WORDS]
    assert all(a.start <= a.end <= b.start for a, b in pairwise(found.segments))
    assert len(model.windows) == 2


@pytest.mark.parametrize("timed", [False, True])
def test_long_skipped_speech_is_cut_in_a_pause(timed: bool) -> None:
    """Two windows meet in the longest pause near the middle. Without such a pause, they overlap."""
    pauses = [(10.0, 10.5), (13.0, 13.3), (14.8, 15.2), (16.0, 16.1)]
    places = tuple((WINDOW.start + round(start * RATE), WINDOW.start + round(end * RATE)) for start, end in pauses)
    model = Model(range(10, 50), timed)
    found = model.run(replace(WINDOW, pauses=places))
    assert found.result.text.split() == [word.strip() for word in WORDS]
    (_, at), (start, _) = model.windows[1:]
    assert at == start == 15 * RATE
    model = Model(range(10, 50), timed)
    assert model.run().result.text.split() == [word.strip() for word in WORDS]
    (_, at), (start, _) = model.windows[1:]
    assert at - start == 3 * RATE


def test_shorter_windows_are_checked_too() -> None:
    """A window of 10 s skips its second half, and has more than a word per second."""

    class Halves(Model):
        def heard(self, window: Window) -> list[int]:
            short = len(window.samples) < 20 * RATE
            return [n for n in super().heard(window) if not (short and len(window.samples) > 8 * RATE and 26 <= n <= 32)]

    model = Halves(range(20, 33))
    assert model.run().result.text.split() == [word.strip() for word in WORDS]
    assert [(end - start) / RATE for start, end in model.windows] == [30.0, 10.0, 5.0, 5.0]


def test_speech_after_the_last_word_is_transcribed() -> None:
    model = Model(range(57, 60))
    assert model.run().result.text.split() == [word.strip() for word in WORDS]
    assert len(model.windows) == 2


@pytest.mark.parametrize("timed", [False, True])
def test_pauses_are_not_skipped_speech(timed: bool) -> None:
    pause = (WINDOW.start + 10 * RATE, WINDOW.start + 20 * RATE)
    window = Window(WINDOW.start, WINDOW.end, WINDOW.samples, WINDOW.end, pauses=(pause,))
    model = Model(range(20, 40), timed)
    assert len(model.run(window).result.text.split()) == 40
    assert len(model.windows) == 1


def test_speech_that_gives_no_more_words_changes_nothing() -> None:
    model = Model(range(20, 40), longest=0.0)
    assert model.run().result.text.split() == [word.strip() for n, word in enumerate(WORDS) if n not in range(20, 40)]
    assert all(end - start <= 20 * RATE for start, end in model.windows[1:])


@pytest.mark.parametrize(
    ("timed", "request_number"), [(True, 1), (False, 1), (False, -1)], ids=["segments", "words", "times of words"]
)
def test_errors_of_shorter_windows_are_reported(timed: bool, request_number: int) -> None:
    """A window keeps its text and names the error, and an error that ends the engine fails the window."""
    kept = Model(range(20, 40), timed, fails={request_number: "overloaded"}).run()
    assert kept.output.error is None
    assert kept.result.text.split() == [word.strip() for n, word in enumerate(WORDS) if n not in range(20, 40)]
    assert kept.result.skip_error == ErrorInfo("overloaded", "no room")
    transcript = Transcript(kept.result.text, "en", None, None, kept.output, windows=(kept.result, kept.result))
    assert transcript.doubt == "from 10.0 to 40.0 s it may skip speech, which could not be transcribed: no room"
    lost = Model(range(20, 40), timed, fails={request_number: "engine_dead"}).run()
    assert (lost.output.error, lost.result.text, lost.segments) == (ErrorInfo("engine_dead", "no room"), "", None)


def test_error_in_a_shorter_window_of_a_shorter_window_is_reported() -> None:
    model = Model(range(16, 44), True, longest=6.0, fails={2: "out_of_memory"})
    assert model.run().result.skip_error == ErrorInfo("out_of_memory", "no room")


def test_phrases_that_come_again_are_not_merged() -> None:
    left = ["as", "the", "invention", "of", "the", "art", "of", "printing", "and", "so", "my", "fellow", "americans", "asked"]
    right = ["americans", "ask", "not", "what", "you", "can", "do", "and", "it", "was", "the", "invention", "of", "movable"]
    assert find_merge_point(left, right, 27) == (len(left) - 1, 1)
    assert find_merge_point(left, ["fellow", "americans", "ask", "not", "what"], 27) == (len(left) - 2, 1)
    said = [f"said{number}" for number in range(18)]  # comes again, after the overlap
    assert find_merge_point(said, [f"new{number}" for number in range(12)] + said, 27) == (len(said), 0)


def test_overlapping_sequential_windows_begin_between_words() -> None:
    samples = torch.ones(30 * RATE)
    samples[2550:2560] = 0.0  # a pause of 0.1 s between words
    window = Window(1000, 1000 + 30 * RATE, samples, 4000)
    assert 3550 <= _quietest(window, 1000 + 2590, RATE) < 3560
    assert _quietest(window, 900, RATE) >= 1000
    assert _quietest(Window(0, 2, samples[:2], 2), 1, RATE) == 1


def test_sequential_windows_begin_at_the_quietest_place_of_a_pause() -> None:
    """A segment's end may be late, and a pause include a soft onset: a window that began there would cut off the next word."""
    options, samples = SimpleNamespace(rate=RATE, size=30 * RATE), torch.ones(30 * RATE)
    window = Window(1000, 1000 + 30 * RATE, samples, 4000, pauses=((3000, 3060), (3500, 3520)))
    at, overlap = _next_start(window, 3059, options)
    assert abs(at - 3030) <= 1, "equally quiet places: the middle"
    assert overlap == 0
    samples[2005:2015] = 0.5  # the quiet part of the pause
    assert 3005 <= _next_start(window, 3059, options)[0] <= 3015
    at, overlap = _next_start(window, 3510, options)  # a pause of 0.2 s
    assert at == 3510
    assert 180 <= overlap <= 260


def test_sequential_windows_overlap_inside_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that leaves out the first word of a window, and whose segments end inside speech, loses no word."""
    spoken = [f"word{number}" for number in range(200)]  # one each half a second
    starts, progress = list[int](), list[float]()

    def transcribe(llm: Any, window: Window, options: Any, *_: Any) -> Iterator[Any]:
        starts.append(window.start)
        own = range(-(-window.start // 50) + (window.start > 0), window.end // 50)
        closed = own.stop - (3 if window.end < 200 * 50 else 0)
        ranges = [(own.start, closed), (closed, own.stop)]
        parts = tuple(
            Segment(
                (a * 50 - window.start) / RATE, (b * 50 - window.start) / RATE if b == closed else None, " ".join(spoken[a:b])
            )
            for a, b in ranges
            if a < b
        )
        times = window.start / RATE, window.end / RATE
        result = WindowResult(
            *times, " ".join(spoken[a] for a in own), (Attempt(0.0, -0.1, 1.0),), 0, overlap=window.overlap / RATE
        )
        return WindowText(result, parts, RequestOutput("", None, [], [CompletionOutput(0, "", [])]), window)
        yield

    monkeypatch.setattr(transcribing, "_task_of", transcribe)
    reader = WindowReader(iter([torch.ones(200 * 50)]), RATE, 30 * RATE, lambda samples: torch.ones(-(-len(samples) // 3)))
    options = SimpleNamespace(context="", condition=False, rate=RATE, size=30 * RATE, on_progress=progress.append)
    texts = list[str]()
    final = transcribing._FinalTexts(texts.append, lambda window: None)
    found = advance(transcribing._read_sequentially(None, reader, options, None, final))
    final.finish()
    merged = merge_texts([(one.result.text, list(one.segments), one.result.overlap) for one in found])[0]
    assert merged.split() == spoken
    assert "".join(texts) == merged
    assert sum(progress) == pytest.approx(100)
    assert len(starts) == len(found) == 4
