"""The timeline of a transcript: speakers of words, and the formats that are made from it."""

from __future__ import annotations

import json

import pytest
from sensorium.callers.errors import InputError
from sensorium.engine.outputs import CompletionOutput, RequestOutput
from sensorium.pipelines.speech.live_input import LiveEvent
from sensorium.pipelines.speech.results import Transcript
from sensorium.pipelines.speech.segments import Segment, Word
from sensorium.pipelines.speech.subtitles import WRITERS, SubtitleLayout
from sensorium.pipelines.speech.timeline import SkippedSpan, SpeakerTurn, SpeechTimeline, live_timeline, with_speakers

A, B = "SPEAKER_00", "SPEAKER_01"
OUTPUT = RequestOutput("0", None, [], [CompletionOutput(0, "", [], finish_reason="stop")])
TURNS = (SpeakerTurn(0.0, 2.0, A), SpeakerTurn(1.5, 4.0, B), SpeakerTurn(6.0, 8.0, A))


def make_words(*times: tuple[float, float]) -> tuple[Word, ...]:
    return tuple(Word(start, end, f" w{number}", 0.5) for number, (start, end) in enumerate(times))


def make_segment(start: float, end: float | None, *times: tuple[float, float]) -> Segment:
    words = make_words(*times)
    return Segment(start, end, "".join(word.word for word in words).strip(), 1, tokens=(1, 2), words=words or None)


def write(name: str, timeline: SpeechTimeline) -> str:
    return WRITERS[name](timeline, SubtitleLayout())


def test_segments_are_cut_where_the_speaker_changes() -> None:
    segment = make_segment(0.0, 8.0, (0.0, 1.0), (1.0, 1.6), (2.0, 3.0), (6.5, 7.0))
    parts = with_speakers([segment], TURNS)
    assert [(part.id, part.start, part.end, part.text, part.speaker) for part in parts] == [
        (1, 0.0, 1.6, "w0 w1", A), (2, 2.0, 3.0, "w2", B), (3, 6.5, 7.0, "w3", A),
    ]  # fmt: skip
    assert all(part.tokens == () for part in parts)
    assert [word.speaker for part in parts for word in part.words or ()] == [A, A, B, A]


def test_a_segment_of_one_speaker_is_kept() -> None:
    segment = make_segment(2.1, 3.5, (2.1, 2.5), (2.6, 3.0))
    (part,) = with_speakers([segment], TURNS)
    assert (part.start, part.end, part.tokens, part.speaker) == (2.1, 3.5, (1, 2), B)


def test_overlapping_speech_keeps_both_speakers() -> None:
    turns = (SpeakerTurn(0.0, 3.0, A), SpeakerTurn(1.0, 3.0, B))
    (part,) = with_speakers([make_segment(0.0, 3.0, (0.2, 0.8), (1.2, 1.8), (2.0, 2.5))], turns)
    assert [(word.speaker, word.other_speakers) for word in part.words or ()] == [(A, ()), (A, (B,)), (A, (B,))]
    turns = (SpeakerTurn(0.0, 1.3, A), SpeakerTurn(1.0, 3.0, B))
    _, second = with_speakers([make_segment(0.0, 3.0, (0.2, 0.8), (1.0, 2.0))], turns)
    assert [(word.speaker, word.other_speakers) for word in second.words or ()] == [(B, ())]


def test_words_outside_of_turns_belong_to_the_nearest_one() -> None:
    parts = with_speakers([make_segment(4.1, 5.9, (4.1, 4.5), (5.5, 5.9)), make_segment(50.0, 51.0, (50.0, 51.0))], TURNS)
    assert [part.speaker for part in parts] == [B, A, A]
    instant = with_speakers([make_segment(3.0, 3.0, (3.0, 3.0))], TURNS)
    assert instant[0].speaker == B
    assert with_speakers([make_segment(0.0, 1.0, (0.0, 1.0))], ())[0].speaker is None


def test_segments_without_words_have_one_speaker() -> None:
    parts = with_speakers([Segment(0.0, 1.0, "a"), Segment(1.2, 4.0, "b"), Segment(4.0, 7.0, "c")], TURNS)
    assert [part.speaker for part in parts] == [A, B, A]
    assert with_speakers([Segment(0.0, 1.0, "a")], ())[0].speaker is None


def test_speakers_are_found_in_time_that_grows_with_the_words() -> None:
    turns = [SpeakerTurn(float(i), i + 0.9, (A, B)[i % 2]) for i in range(20_000)]
    segments = [make_segment(i, i + 0.5, (i + 0.1, i + 0.4)) for i in range(20_000)]
    assert [part.speaker for part in with_speakers(segments, turns)] == [turn.speaker for turn in turns]


def spoken(source: str = "/tmp/two words.wav") -> SpeechTimeline:
    segments = with_speakers([make_segment(0.0, 8.0, (0.0, 1.0), (2.0, 3.0), (6.5, 7.0))], TURNS)
    return SpeechTimeline(segments, "w0 w1 w2", turns=TURNS, duration=8.0, source=source)


def test_rttm_and_stm() -> None:
    first, *_, last = write("rttm", spoken()).splitlines()
    assert first == f"SPEAKER two_words 1 0.000 2.000 <NA> <NA> {A} <NA> <NA>"
    assert last == f"SPEAKER two_words 1 6.000 2.000 <NA> <NA> {A} <NA> <NA>"
    assert write("stm", spoken("")).splitlines()[1] == f"audio 1 {B} 2.000 3.000 w1"
    named = SpeechTimeline((Segment(0.0, 1.0, "a\nb", speaker="Ann Lee"),), turns=(SpeakerTurn(0.0, 1.0, "Ann Lee"),))
    assert write("stm", named) == "audio 1 Ann_Lee 0.000 1.000 a b"
    assert "> Ann_Lee <" in write("rttm", named)


def test_diarized_json_has_the_types_of_openai() -> None:
    audio = pytest.importorskip("openai.types.audio")
    timeline = spoken()
    parsed = audio.TranscriptionDiarized.model_validate_json(write("diarized_json", timeline), strict=True)
    assert (parsed.task, parsed.duration, parsed.text) == ("transcribe", 8.0, "w0 w1 w2")
    assert [(part.id, part.speaker, part.text) for part in parsed.segments] == [
        ("seg_000", "A", "w0"), ("seg_001", "B", "w1"), ("seg_002", "A", "w2"),
    ]  # fmt: skip
    many = [Segment(float(i), i + 1.0, "a", speaker=f"SPEAKER_{i:02}") for i in range(28)]
    speakers = json.loads(write("diarized_json", SpeechTimeline((*many, Segment(28.0, 29.0, "b", speaker="Ann")), turns=())))
    assert [part["speaker"] for part in speakers["segments"][24:]] == ["Y", "Z", "AA", "AB", "Ann"]
    named = (Segment(0.0, 1.0, "a", speaker="SPEAKER_00"), Segment(1.0, 2.0, "b", speaker="A"))
    speakers = json.loads(write("diarized_json", SpeechTimeline(named, turns=())))
    assert [part["speaker"] for part in speakers["segments"]] == ["B", "A"]


@pytest.mark.parametrize("name", ["rttm", "stm", "diarized_json"])
def test_formats_of_speakers_need_speakers(name: str) -> None:
    with pytest.raises(InputError) as refused:
        write(name, SpeechTimeline((Segment(0.0, 1.0, "a"),)))
    assert (refused.value.info.code, refused.value.info.param) == ("invalid_input", "speakers")


def test_other_formats_name_the_speakers() -> None:
    timeline = spoken()
    assert write("srt", timeline).splitlines()[2] == f"[{A}]: w0"
    assert write("vtt", timeline).splitlines()[3] == f"<v {A}>w0"
    assert write("tsv", timeline).splitlines()[:2] == ["start\tend\tspeaker\ttext", f"0\t1000\t{A}\tw0"]
    assert write("md", timeline).split("\n\n")[0] == f"**00:00:00** **{A}:** w0"
    odd = SpeechTimeline((Segment(0.0, 1.0, "a", speaker="<A & B>"),), turns=())
    assert write("vtt", odd).splitlines()[3] == "<v &lt;A &amp; B&gt;>a"
    (both,) = with_speakers([make_segment(0.0, 1.0, (0.0, 0.4), (0.5, 1.0))], TURNS)
    cut = WRITERS["srt"](SpeechTimeline((both,), turns=TURNS), SubtitleLayout(3, 1))
    assert cut.count(f"[{A}]:") == 2


def test_a_transcript_has_a_timeline() -> None:
    heard = Transcript(
        "w0", "en", (make_segment(0.0, None, (0.0, 1.0)),), None, OUTPUT, speech_spans=((0.0, 2.0),), duration=8.0, turns=TURNS
    )
    timeline = heard.timeline
    assert timeline.segments[0].end == 8.0
    assert (timeline.turns, timeline.pauses, timeline.language) == (TURNS, (SkippedSpan(2.0, 8.0, "silence"),), "en")
    assert [word.word for word in timeline.words] == [" w0"]
    assert heard.to_rttm() == write("rttm", timeline)
    assert heard.to_dict()["turns"][0] == {"start": 0.0, "end": 2.0, "speaker": A}


def test_a_live_stream_has_a_timeline() -> None:
    parts = (Segment(0.0, 1.0, "one"), Segment(1.0, None, "two"))
    events = [
        LiveEvent("partial", "on", start=0.0, end=1.0),
        LiveEvent("final", "one two", start=0.0, end=2.0, language="en", segments=parts),
        LiveEvent("final", "three", start=2.5, end=3.0),
        LiveEvent("ended", start=4.0, end=4.0),
    ]  # fmt: skip
    timeline = live_timeline(events)
    assert [(part.id, part.start, part.end, part.text) for part in timeline.segments] == [
        (1, 0.0, 1.0, "one"), (2, 1.0, 2.0, "two"), (3, 2.5, 3.0, "three"),
    ]  # fmt: skip
    assert (timeline.language, timeline.duration, timeline.is_timed) == ("en", 4.0, True)
    assert write("tsv", timeline).splitlines()[3] == "2500\t3000\tthree"
