"""Text of a live stream: words that two passes agree on are never taken back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from sensorium.pipelines.speech.agreement import OpenText, fit_segments
from sensorium.pipelines.speech.segments import Segment

WORDS = st.lists(st.sampled_from(["a", "on", "on,", "the", "Tree.", "river", "goes", "down", "5"]), max_size=8).map(" ".join)
STEPS = st.lists(st.tuples(st.sampled_from(["pass", "pass", "pass", "keep", "close", "parts", "overlap"]), WORDS, WORDS))


@given(STEPS)
def test_stable_words_are_never_taken_back(steps: Sequence[tuple[str, str, str]]) -> None:
    text, done, promised = OpenText(), "", ""
    for kind, first, second in steps:
        final = ""
        if kind == "pass":
            text.add_pass(f"{first} {second}")
        elif kind == "overlap":
            final = text.close_overlapping(f"{first} {second}", 0.25)
        elif kind == "parts" and first and second:
            final, count = text.close_parts([first, second], 1)
            assert count in (1, 2)
        elif kind in ("close", "keep"):
            final = text.close(f"{first} {second}", keep=kind == "keep")
        done = f"{done} {final}".strip()
        shown = f"{done} {text.text}".strip()
        assert shown.startswith(promised)
        assert text.text == text.text.strip()
        promised = f"{done} {text.text[: text.stable_upto]}".strip()


def test_agreement_of_two_passes() -> None:
    text = OpenText()
    text.add_pass("and so my")
    assert text.stable == 0
    text.add_pass("and so am I")
    assert text.text[: text.stable_upto] == "and so"
    text.add_pass("And so, am I fellow")
    assert text.text == "and so am I fellow"
    assert text.text[: text.stable_upto] == "and so am I"
    assert text.close("And so am I, fellow Americans.", keep=False) == "and so am I fellow Americans."
    assert text.text == ""


def test_an_overlapping_window_continues_the_text() -> None:
    text = OpenText()
    final = text.close_overlapping("one two three four five six seven eight", 0.25)
    assert final == "one two three four five"
    text.add_pass("five six seven eight nine")
    assert text.text == "six seven eight nine"
    assert text.close("four five six seven eight nine ten", keep=False) == "six seven eight nine ten"


def test_parts_without_spaces_are_joined_without_them() -> None:
    text = OpenText()
    assert text.close_parts(["今天天气很好。", "我们去公园", "吧"], 3) == ("今天天气很好。我们去公园吧", 3)
    assert text.close_parts(["今日は", "いい天気", "です"], 2) == ("今日はいい天気", 2)
    assert text.text == "です"


def test_parts_that_agree_are_final() -> None:
    text = OpenText()
    text.add_pass("one two three four five")
    final, count = text.close_parts(["one two", "three four", "six"], 1)
    assert (final, count) == ("one two three four", 2)
    text.add_pass("six seven")
    assert text.text[: text.stable_upto] == "six"


def test_segments_share_the_words_of_a_final_text() -> None:
    parts = [Segment(0, 1, "And so, my", tokens=(1,)), Segment(1, 2, "fellow"), Segment(2, None, "Americans.", tokens=(2,))]
    assert [part.text for part in fit_segments(parts, "and so my fellow Americans.")] == ["and so my", "fellow", "Americans."]
    assert [part.tokens for part in fit_segments(parts, "and so my fellow Americans.")] == [(), (), (2,)]
    assert [part.text for part in fit_segments(parts, "my fellow citizens")] == ["my", "fellow", "citizens"]
    assert fit_segments(parts, "") == []
