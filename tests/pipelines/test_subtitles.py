"""Transcripts as subtitles, tables and Markdown."""

from __future__ import annotations

import re
from functools import partial

from sensorium.pipelines.speech.results import Transcript
from sensorium.pipelines.speech.segments import Segment, WindowResult, Word
from sensorium.pipelines.speech.subtitles import WRITERS as LAID_OUT
from sensorium.pipelines.speech.subtitles import SubtitleLayout

WRITERS = {name: partial(write, layout=SubtitleLayout()) for name, write in LAID_OUT.items()}

LONG = "He said that <two> lines are as many as fit on a screen & no more"
PARTS = (Segment(0.0, 2.5, "Hello."), Segment(3661.2345, None, LONG))
HEARD = Transcript("", "en", PARTS, None, None, duration=3700.0)  # type: ignore[arg-type]
PLAIN = Transcript("Hello there.", "en", None, None, None, duration=2.0)  # type: ignore[arg-type]


def test_srt() -> None:
    first, second = WRITERS["srt"](HEARD.timeline).split("\n\n")
    assert first == "1\n00:00:00,000 --> 00:00:02,500\nHello."
    lines = second.splitlines()
    assert lines[:2] == ["2", "01:01:01,234 --> 01:01:40,000"]
    assert max(map(len, lines[2:])) <= 42
    assert " ".join(lines[2:]) == LONG


def test_vtt() -> None:
    head, first, second = WRITERS["vtt"](HEARD.timeline).split("\n\n")
    assert (head, first) == ("WEBVTT", "00:00:00.000 --> 00:00:02.500\nHello.")
    assert "&lt;two&gt;" in second
    assert "&amp;" in second


def test_tables_and_markdown() -> None:
    assert WRITERS["tsv"](HEARD.timeline).splitlines()[1:] == ["0\t2500\tHello.", f"3661234\t3700000\t{LONG}"]
    assert WRITERS["md"](HEARD.timeline).startswith("**00:00:00** Hello.\n\n**01:01:01** He said")
    assert WRITERS["md"](PLAIN.timeline) == "Hello there."


def test_text_without_timestamps_is_one_cue() -> None:
    assert WRITERS["srt"](PLAIN.timeline) == "1\n00:00:00,000 --> 00:00:02,000\nHello there."
    assert WRITERS["srt"](Transcript("", "en", (), None, None).timeline) == ""  # type: ignore[arg-type]


def test_a_segment_without_an_end_lasts_until_the_next_one_or_the_end_of_its_window() -> None:
    parts = (Segment(0.0, None, "a"), Segment(4.0, None, "b"), Segment(40.0, None, "c"))
    windows = (WindowResult(0.0, 30.0, "a b", (), 0), WindowResult(38.0, 60.0, "c", (), 0))
    found = Transcript("", "en", parts, None, None, windows=windows, duration=3700.0)  # type: ignore[arg-type]
    assert WRITERS["tsv"](found.timeline).splitlines()[1:] == ["0\t4000\ta", "4000\t30000\tb", "40000\t60000\tc"]


def test_cues_of_few_lines_are_cut_at_the_ends_of_sentences() -> None:
    spoken = "One two three four five. Six seven, eight nine ten eleven. Thirteen!"
    part = Segment(1.0, 9.0, spoken)
    for layout in (SubtitleLayout(20, 2), SubtitleLayout(20, 1), SubtitleLayout(10, 2)):
        found = LAID_OUT["srt"](Transcript("", "en", (part,), None, None, duration=9.0).timeline, layout).split("\n\n")  # type: ignore[arg-type]
        lines = [cue.splitlines()[2:] for cue in found]
        assert all(len(own) <= layout.count and all(len(line) <= layout.width for line in own) for own in lines)
        assert " ".join(line for own in lines for line in own) == spoken
        times = re.findall(r"00:00:(\d\d),(\d{3})", "".join(found))
        assert times == sorted(times)
        assert (times[0], times[-1]) == (("01", "000"), ("09", "000"))
    two = LAID_OUT["srt"](Transcript("", "en", (part,), None, None).timeline, SubtitleLayout(20, 2)).split("\n\n")  # type: ignore[arg-type]
    assert [" ".join(cue.splitlines()[2:])[-1] for cue in two] == [".", ".", "!"]


def test_cues_have_the_times_of_words() -> None:
    words = tuple(Word(float(i), i + 0.5, word, 1.0) for i, word in enumerate((" One", " two.", " Three", " four.")))
    part = Segment(0.0, 3.5, "One two. Three four.", words=words)
    found = LAID_OUT["srt"](Transcript("", "en", (part,), None, None).timeline, SubtitleLayout(12, 1))  # type: ignore[arg-type]
    assert re.findall(r"00:00:0(\d),(\d)00 --> 00:00:0(\d),(\d)00", found) == [("0", "0", "1", "5"), ("2", "0", "3", "5")]
