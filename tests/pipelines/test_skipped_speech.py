"""Speech that the text of a window skips is transcribed in shorter windows. A made-up model knows when each word is spoken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sensorium.callers.errors import ErrorCode, ErrorInfo
from sensorium.engine.outputs import CompletionOutput, RequestOutput
from sensorium.pipelines import transcribe as transcribing
from sensorium.pipelines.run import Run, Task
from sensorium.pipelines.speech.decode import SpokenLanguage
from sensorium.pipelines.speech.merge import find_merge_point
from sensorium.pipelines.speech.options import FileOptions
from sensorium.pipelines.speech.readings import says
from sensorium.pipelines.speech.results import Transcript
from sensorium.pipelines.speech.segments import Attempt, Segment, WindowResult, WindowText
from sensorium.pipelines.speech.skipped import Reading, WindowTranscriber, merge_texts
from sensorium.pipelines.speech.windows import Window, WindowReader
from sensorium.pipelines.transcribe import _next_start, _quietest

RATE = 100
WORDS = [f" word{number}" for number in range(60)]  # one each half a second
SAID = dict(enumerate(WORDS))
WINDOW = Window(1000, 1000 + 30 * RATE, torch.zeros(30 * RATE), 1000 + 30 * RATE)


def result_of(task: Task[Any]) -> Any:
    """Return the result of a task that makes no requests."""
    run = Run(task)
    assert run.start() == []
    assert run.done
    return run.result


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

    async def transcribe(self, window: Window) -> WindowText:
        self.windows.append((window.start - WINDOW.start, window.end - WINDOW.start))
        if (code := self.fails.get(len(self.windows) - 1)) is not None:
            return WindowText(WindowResult(0.0, 0.0, "", (), 0), None, failed(code))
        heard, begin = self.heard(window), (window.start - WINDOW.start) / RATE
        text = "".join(WORDS[n] for n in heard).strip()
        segments = tuple(self.segments(heard, begin, len(window.samples) / RATE))
        result = WindowResult(window.start / RATE, window.end / RATE, text, (), 0, finish_reason="stop")
        output = RequestOutput("", None, [], [CompletionOutput(0, text, heard, finish_reason="length")])
        return WindowText(result, segments if self.timed else None, output, window)

    def segments(self, heard: list[int], begin: float, seconds: float) -> Iterator[Segment]:
        """Yield a segment for each word or, if `late`, for each ten, which ends where the next one begins."""
        groups = [heard[i : i + 10] for i in range(0, len(heard), 10)] if self.late else [[n] for n in heard]
        starts = [0.0, *(group[0] / 2 - begin for group in groups[1:]), seconds]
        for group, start, end in zip(groups, starts, starts[1:], strict=False):
            times = (start, end) if self.late else (group[0] / 2 - begin, group[0] / 2 - begin + 0.5)
            yield Segment(*times, "".join(WORDS[n] for n in group).strip(), tokens=tuple(group))

    async def times(self, window: Window, tokens: Sequence[int]) -> list[float] | RequestOutput:
        begin = (window.start - WINDOW.start) / RATE
        if -1 in self.fails:
            return failed(self.fails[-1])
        return [0.0, *(n / 2 - begin for n in tokens[1:]), len(window.samples) / RATE]

    def run(self, window: Window = WINDOW, checks_end: bool = True) -> WindowText:
        decode = lambda tokens: "".join(SAID[token] for token in tokens)  # noqa: E731
        transcriber = WindowTranscriber(RATE, self.transcribe, self.times, decode, lambda: "en", checks_end)
        return result_of(lambda: transcriber(window))


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
    job, samples = SimpleNamespace(rate=RATE, size=30 * RATE), torch.ones(30 * RATE)
    window = Window(1000, 1000 + 30 * RATE, samples, 4000, pauses=((3000, 3060), (3500, 3520)))
    at, overlap = _next_start(window, 3059, job)
    assert abs(at - 3030) <= 1, "equally quiet places: the middle"
    assert overlap == 0
    samples[2005:2015] = 0.5  # the quiet part of the pause
    assert 3005 <= _next_start(window, 3059, job)[0] <= 3015
    at, overlap = _next_start(window, 3510, job)  # a pause of 0.2 s
    assert at == 3510
    assert 180 <= overlap <= 260


@pytest.mark.parametrize("space", [" ", ""], ids=["spaces", "Chinese"])
def test_sequential_windows_overlap_inside_speech(monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    """A model that leaves out the first word of a window, and whose segments end inside speech, loses no word.

    Texts of scripts without spaces are joined without them, in the transcript and in the context of the next window.
    """
    spoken = [f"word{number}" if space else chr(0x4E00 + number) for number in range(200)]  # one each half a second
    starts, progress = list[int](), list[float]()

    async def transcribe(llm: Any, window: Window, job: Any, language: Any, context: str) -> WindowText:
        assert (" " in context) == bool(space and context)
        assert bool(context) == bool(starts)
        starts.append(window.start)
        own = range(-(-window.start // 50) + (window.start > 0), window.end // 50)
        closed = own.stop - (3 if window.end < 200 * 50 else 0)
        ranges = [(own.start, closed), (closed, own.stop)]
        parts = tuple(
            Segment(
                (a * 50 - window.start) / RATE, (b * 50 - window.start) / RATE if b == closed else None, space.join(spoken[a:b])
            )
            for a, b in ranges
            if a < b
        )
        times = window.start / RATE, window.end / RATE
        result = WindowResult(
            *times, space.join(spoken[a] for a in own), (Attempt(0.0, -0.1, 1.0),), 0, overlap=window.overlap / RATE
        )
        return WindowText(result, parts, RequestOutput("", None, [], [CompletionOutput(0, "", [])]), window)

    monkeypatch.setattr(transcribing, "_transcribe_part", transcribe)
    reader = WindowReader(iter([torch.ones(200 * 50)]), RATE, 30 * RATE, lambda samples: torch.ones(-(-len(samples) // 3)))
    options = FileOptions(condition_on_previous_text=True, on_progress=progress.append)
    job = SimpleNamespace(words="", options=options, rate=RATE, size=30 * RATE)
    texts = list[str]()
    final = transcribing._FinalTexts(0, replace(options, on_text=lambda _, text: texts.append(text)), RATE)
    found = result_of(lambda: transcribing._read_sequentially(None, reader, job, SpokenLanguage(None), final))
    final.finish()
    merged = merge_texts([Reading(text.result.text, text.segments, text.result.overlap) for text in found])[0]
    assert merged == space.join(spoken)
    assert "".join(texts) == merged
    assert sum(progress) == pytest.approx(100)
    assert len(starts) == len(found) == 4


class Script:
    """A model with one answer for the whole window, another for parts of it, and given times of the whole answer's tokens."""

    def __init__(self, pieces: Sequence[str], times: Sequence[float], reading: str, attempts: tuple[Attempt, ...] = ()) -> None:
        self.pieces, self.starts, self.reading, self.attempts, self.parts = pieces, list(times), reading, attempts, 0
        self.window = Window(0, round(times[-1] * RATE), torch.zeros(round(times[-1] * RATE)), round(times[-1] * RATE))

    async def transcribe(self, window: Window) -> WindowText:
        is_whole = window.end - window.start == self.window.end
        self.parts += not is_whole
        text = "".join(self.pieces).strip() if is_whole else self.reading
        attempts = () if is_whole else self.attempts
        result = WindowResult(0.0, len(window.samples) / RATE, text, attempts, 0, finish_reason="stop")
        tokens = list(range(len(self.pieces))) if is_whole else [len(self.pieces)]
        segments = None
        if self.timed:
            segments = (Segment(0.0, len(window.samples) / RATE, text, tokens=tuple(tokens)),)
        answer = CompletionOutput(0, text, tokens, finish_reason="length")
        return WindowText(result, segments, RequestOutput("", None, [], [answer]), window)

    async def times(self, window: Window, tokens: Sequence[int]) -> list[float] | RequestOutput:
        seconds = len(window.samples) / RATE
        return self.starts if len(tokens) == len(self.pieces) else [0.0, seconds]

    def run(self, timed: bool) -> str:
        self.timed = timed
        decode = lambda tokens: "".join([*self.pieces, self.reading][token] for token in tokens)  # noqa: E731
        transcriber = WindowTranscriber(RATE, self.transcribe, self.times, decode, lambda: "en", True)
        return result_of(lambda: transcriber(self.window, 1)).result.text


NUMBERS = [
    (
        [" They", " counted", " 1", ",327", ",451", "."],
        [0.0, 0.3, 0.8, 2.9, 4.0, 5.6, 5.8],
        "1,327,000 and 27,400 and 5.",
    ),
    ([" $", "1", ",", "234", ".", "56", "."], [0.0, 0.1, 0.6, 0.9, 3.2, 3.4, 5.5, 5.9], "$1,234 $2.34 and $56."),
    ([" Sales", " rose", " 37", ".", "1138", "%."], [0.0, 0.3, 0.6, 1.6, 1.7, 4.6, 5.2], "37.1138%. 1, 1, 3, 8, percent."),
    (
        [" 총", "액은", " 1", ",327", ",451", "원", "입니다", "."],
        [0.0, 0.2, 0.4, 1.2, 2.0, 2.4, 2.8, 5.6, 5.8],
        "132만 7천 451원입니다. 132만 7451.",
    ),
    ([" 총", "액은", " 1,327,451원입니다", "."], [0.0, 0.2, 0.4, 5.6, 5.8], "132만 7천 451원입니다. 132만 7451."),
    ([" It", " is", " 1,327,451dollars", "."], [0.0, 0.2, 0.4, 5.6, 5.8], "$1,327,000 $327 and 27,400 and 5."),
    ([" My", " name", " is", " SCH", "MIDT", "."], [0.0, 0.2, 0.4, 0.6, 2.0, 5.2, 5.4], "S C H M I D T S C H ."),
    (
        [" visit", " www", ".", "example", ".", "com", " now", "."],
        [0, 0.3, 2.4, 2.6, 4.7, 4.9, 7.0, 7.2, 7.4],
        "w w w dot now.",
    ),
    ([" an", " m", "RNA", "."], [0.0, 0.3, 0.6, 3.1, 3.3], "m R N A m R N A."),
    ([" это", " СССР", "."], [0.0, 0.3, 3.2, 3.4], "С С С Р С С."),
    (
        [" Smith", ",", " S", "-M", "-I", "-T", "-H", "."],
        [0.0, 0.5, 0.6, 0.9, 3.0, 3.2, 3.4, 3.7, 4.0],
        "S, M, I, T, H. S.",
    ),
    ([" Call", " 555", "-0173", "."], [0.0, 0.3, 2.4, 4.4, 5.4], "Call 555 0173 5 5 5 0 1 7 3 now."),
]


@pytest.mark.parametrize("timed", [False, True], ids=["words", "segments"])
@pytest.mark.parametrize(("pieces", "times", "reading"), NUMBERS)
def test_a_number_that_lasts_long_is_no_skipped_speech(
    pieces: list[str], times: list[float], reading: str, timed: bool
) -> None:
    model = Script(pieces, times, reading)
    assert model.run(timed) == "".join(pieces).strip()
    assert model.parts == 0


@pytest.mark.parametrize(
    ("pieces", "times", "reading"),
    [
        (
            [" It", " is", " 8", ",674", "."],
            [0.0, 0.3, 0.6, 3.0, 6.4, 6.5],
            "$8 $8 $8,674 $2,000, $4,000, and $50,000.",
        ),
        ([" We", " said", " so", "."], [0.0, 0.3, 0.6, 3.4, 3.5], "one thousand two hundred thirty four and fifty six, " * 3),
    ],
)
def test_text_that_the_speech_has_no_room_for_is_not_added(pieces: list[str], times: list[float], reading: str) -> None:
    model = Script(pieces, times, reading)
    assert model.run(False) == "".join(pieces).strip()
    assert model.parts > 0


SPELLED = [
    (" SCHMIDT", "S C H M I D T S C H"),
    (" QWERTYU", "Q W E R T Y U, Q W E R T"),
    (" Miller", "M I L L E R M I L L"),
    (" MILLER", "M, I, double L, E, R, M, I"),
    (" www.example.com", "w w w dot example dot com dot com"),
    (" jsmith@example.com", "J Smith at example dot com J S M I T H at example dot com"),
    (" СССР", "С С С Р, С С С Р"),
    (" 127원입니다", "1 2 7 원입니다 1 2 7 원 12"),
]


@pytest.mark.parametrize("timed", [False, True], ids=["words", "segments"])
@pytest.mark.parametrize(("word", "reading"), SPELLED)
def test_spelling_a_word_adds_nothing(word: str, reading: str, timed: bool) -> None:
    """The word lasts so long that speech may be skipped there, but the reading only says it again, in another spelling."""
    model = Script([" This", " is", word, "."], [0.0, 0.3, 0.6, 13.0, 13.2], reading + ".")
    assert model.run(timed) == f"This is{word}."
    assert model.parts > 0
    more = f"{reading}, and after that all of them went home by bus in the evening."
    assert (
        Script([" This", " is", word, "."], [0.0, 0.3, 0.6, 13.0, 13.2], more)
        .run(timed)
        .rstrip(" .")
        .endswith("home by bus in the evening")
    )


@pytest.mark.parametrize("timed", [False, True], ids=["words", "segments"])
def test_a_reading_says_both_numbers_that_last_long(timed: bool) -> None:
    """Two numbers with few words between them are one stretch of speech. A reading without the second one is not added."""
    pieces, times = [" It", " costs", " 1", ",327", " and", " 8", ",674", "."], [0.0, 0.3, 0.6, 1.0, 4.5, 4.7, 5.1, 8.7, 8.8]
    rest = "and so on and on to the end of it."
    for numbers, is_added in (("1,327", False), ("8,674", False), ("1,327 and 8,674", True)):
        model = Script(pieces, times, f"{numbers} {rest}")
        assert (rest in model.run(timed)) == is_added, numbers
        assert model.parts > 0
    pieces, times = [" Ask", " SCHMIDT", " or", " MILLER", "."], [0.0, 0.3, 7.0, 7.3, 14.0, 14.2]
    model = Script(pieces, times, "S C H M I D T or M I L L E R M I L L E R M I L L E R.")
    assert model.run(timed) == "Ask SCHMIDT or MILLER."
    assert model.parts > 0


def test_another_reading_of_a_number_is_not_added() -> None:
    """The number is said slowly and may take all of the speech. A reading that has it and more is added."""
    pieces, times = [" $", "8", ",", "674", ".", "56", "."], [0.0, 0.1, 0.6, 0.9, 3.2, 3.4, 6.4, 6.9]
    assert Script(pieces, times, "$8,677,450 $174.56.").run(False) == "$8,674.56."
    pieces, times = [" It", " costs", " 1", ",327", "."], [0.0, 0.3, 0.6, 1.2, 3.6, 3.8]
    assert Script(pieces, times, "1,392 and so on today.").run(False) == "It costs 1,327."


@pytest.mark.parametrize("timed", [False, True], ids=["words", "segments"])
def test_words_without_room_after_skipped_speech_were_said_in_it(timed: bool) -> None:
    """The skipped speech is what these words stand for, so that another reading of it would say the same sounds again."""
    pieces = [" Move", " my", " meeting", " with", " Oliver", " to", " Thursday", "."]
    model = Script(pieces, [0.0, 5.8, 5.9, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0], "Today is Monday the twenty third.")
    assert model.run(timed) == "Move my meeting with Oliver to Thursday."
    assert not model.parts


def test_only_skipped_speech_beside_words_without_room_is_left() -> None:
    pieces = [
        " We",
        " met",
        ".",
        " All",
        " of",
        " us",
        " left",
        ".",
        " Then",
        " everybody",
        " immediately",
        " travelled",
        " home",
        ".",
    ]
    times = [0.0, 0.3, 0.6, 6.8, 7.0, 7.2, 7.4, 7.8, 14.0, 14.0, 14.0, 14.0, 14.0, 14.0, 14.0]
    reading = "and so it was that the train came and we sat down."
    assert Script(pieces, times, reading).run(False).count(reading) == 1


@pytest.mark.parametrize(
    ("text", "numbers", "said"),
    [
        ("It costs 1,327 today.", "1,327", True),
        ("It costs $1,327,451.", "1,327", False),
        ("15 of them", "5", False),
        ("1,327 or 8,674 of them", "1,327 8,674", True),
        ("1,327,451 of them", "1 327 451", True),
        ("one of them", "1", False),
    ],
)
def test_numbers_are_whole_words(text: str, numbers: str, said: bool) -> None:
    assert says(text, numbers) == said


def test_a_segment_that_is_closed_before_its_last_word_ends_with_it() -> None:
    """The words after the timestamp are no skipped speech."""

    class Early(Model):
        def segments(self, heard: list[int], begin: float, seconds: float) -> Iterator[Segment]:
            *parts, last = super().segments(heard, begin, seconds)
            return iter([*parts, replace(last, end=27.0)])

    model = Early([], timed=True, late=True)
    assert model.run().result.text.split() == [word.strip() for word in WORDS]
    assert len(model.windows) == 1


def test_a_reading_that_failed_the_gates_is_not_added() -> None:
    pieces, times = [" We", " said", " so", "."], [0.0, 0.3, 0.6, 6.4, 6.5]
    reading = "so and then all of them went home."
    for rejected, expected in ((None, f"We said {reading} ."), ("avg_logprob", "We said so.")):
        model = Script(pieces, times, reading, (Attempt(1.0, -2.0, 1.0, rejected),))
        assert model.run(False) == expected


@pytest.mark.parametrize("timed", [False, True], ids=["words", "segments"])
def test_speech_skipped_after_a_number_is_transcribed(timed: bool) -> None:
    pieces, times = [" It", " costs", " 1", ",327", "."], [0.0, 0.3, 0.6, 1.4, 2.6, 12.0]
    model = Script(pieces, times, "and after that all of them went home by bus in the evening.")
    assert model.run(timed) == "It costs 1,327. and after that all of them went home by bus in the evening."


JOINED = ["1.327.451Euro", "1,327,451원입니다", "1,327,451dollars", "2026年11月29日", "$1,234.56", "١٣٢٧٤٥١درهم", "1327451"]
REREAD = ["1.327.000 $327 and 27,400 and 5.", "1, 3, 2, 7, 4, 5, 1, 1, 3, 2, 7, 4, 5, 1.", "132만 7천 451원 132만 7451."]


@pytest.mark.parametrize("timed", [False, True], ids=["words", "segments"])
@pytest.mark.parametrize("seconds", [5.2, 9.0, 10.0, 12.0, 20.0])
@pytest.mark.parametrize("word", JOINED)
def test_a_number_is_never_replaced_by_another_reading_of_it(word: str, seconds: float, timed: bool) -> None:
    """However long it lasts: digits of a reading that does not say the number are no new words."""
    pieces, times = [" Es", " kostet", f" {word}", "."], [0.0, 0.3, 0.6, seconds, seconds + 0.2]
    for reading in REREAD:
        assert Script(pieces, times, reading).run(timed) == f"Es kostet {word}."


@pytest.mark.parametrize("written", ["1.327.451Euro", "1.327.451 Euro", "€1,327,451"])
def test_speech_skipped_after_a_number_with_letters_is_transcribed(written: str) -> None:
    """The reading says the number, whose unit it writes in another way."""
    pieces, times = [" Es", " kostet", " 1.327.451Euro"], [0.0, 0.3, 0.6, 12.0]
    rest = "und danach fahren alle mit dem Bus nach Hause."
    assert Script(pieces, times, f"{written} {rest}").run(False) == f"Es kostet {written} {rest}"
