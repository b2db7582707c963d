"""Live streams with speakers, on a small random Whisper, with networks that hear tones as speakers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import family
import numpy as np
import pytest
import torch
from sensorium import LLM, AsyncLLM, ConfigError, Gap, InputError, LiveEvent
from sensorium.pipelines.speech import speakers
from sensorium.pipelines.speech.agreement import fit_segments, fit_words
from sensorium.pipelines.speech.diarization import VoiceReader, voice_of
from sensorium.pipelines.speech.live import LiveTranscriber
from sensorium.pipelines.speech.live_speakers import LiveSpeakers, live_voices
from sensorium.pipelines.speech.live_voices import LiveVoices
from sensorium.pipelines.speech.options import LiveOptions
from sensorium.pipelines.speech.segments import Segment, SpeakerTurn, Word
from sensorium.pipelines.speech.subtitles import WRITERS, SubtitleLayout
from sensorium.pipelines.speech.timeline import live_timeline
from streams import OPTIONS, RATE, blocks, check_promises, finals, play, run_passes
from tone_speakers import NETWORKS, conversation

EDGE = 0.07  # seconds: a frame hears this much around its middle
TALK = [(1.0, 4.0, 0), (6.0, 9.0, 1), (11.0, 14.0, 0), (16.0, 19.0, 2), (19.5, 22.0, 1)]
NAMES = ["SPEAKER_00", "SPEAKER_01", "SPEAKER_00", "SPEAKER_02", "SPEAKER_01"]


def hears_sound(rate: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """A voice detection for tones, which are no speech for others."""
    size = round(0.032 * rate)

    def detect(samples: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(samples, (0, -len(samples) % size))
        return (padded.reshape(-1, size).abs().amax(1) > 0.1).float()

    return detect


HEARD: Any = {"vad": hears_sound, "pause": 1.0, "speakers": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A Whisper with a window of 8 s."""
    folder = tmp_path_factory.mktemp("models") / "whisper"
    with LLM(family.save(family.load_rows()["whisper"], folder, seconds=8), max_num_seqs=8) as made:
        yield made


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speakers, "load_speaker_networks", lambda folder: NETWORKS)


def turns_of(events: Sequence[LiveEvent]) -> list[SpeakerTurn]:
    return [turn for event in events for turn in event.turns or ()]


def check_turns(turns: Sequence[SpeakerTurn], spoken: Sequence[tuple[float, float, int]]) -> None:
    assert len(turns) == len(spoken)
    for turn, (start, end, _) in zip(turns, spoken, strict=True):
        assert abs(turn.start - start) < EDGE
        assert abs(turn.end - end) < EDGE


def test_final_events_have_speakers(llm: LLM) -> None:
    events = play(llm, conversation(24.0, TALK).numpy(), **HEARD)
    check_promises(events)
    assert len(finals(events)) == 4
    check_turns(turns_of(events), TALK)
    assert [turn.speaker for turn in turns_of(events)] == NAMES
    for event in events:
        assert (event.turns is not None) == (event.segments is not None) == (event.kind == "final")
        for part in event.segments or ():
            assert part.speaker in {turn.speaker for turn in event.turns or ()}
            assert {word.speaker for word in part.words or ()} <= {part.speaker}
            assert part.end is not None
            assert event.start <= part.start <= part.end <= event.end
        assert " ".join(part.text for part in event.segments or ()).split() == (event.text if event.segments else "").split()


def test_the_timeline_of_a_stream_has_its_turns(llm: LLM) -> None:
    timeline = live_timeline(play(llm, conversation(24.0, TALK).numpy(), **HEARD), "talk.wav")
    assert timeline.turns is not None
    assert [turn.speaker for turn in timeline.turns] == NAMES
    lines = WRITERS["rttm"](timeline, SubtitleLayout()).splitlines()
    assert [line.split()[7] for line in lines] == NAMES
    assert '"speaker": "B"' in WRITERS["diarized_json"](timeline, SubtitleLayout())


@pytest.mark.parametrize("block", [0.0311, 2.0])
def test_speakers_do_not_depend_on_blocks(llm: LLM, block: float) -> None:
    samples, options = conversation(24.0, TALK).numpy(), HEARD | {"min_chunk": 60.0}
    whole = [event for event in play(llm, samples, **options) if event.kind == "final"]
    parts = [event for event in play(llm, samples, block=block, **options) if event.kind == "final"]
    assert [(event.text, event.segments, event.turns) for event in parts] == [
        (event.text, event.segments, event.turns) for event in whole
    ]


def test_the_text_is_that_without_speakers(llm: LLM) -> None:
    samples = conversation(24.0, TALK).numpy()
    for timestamps in ("none", "segment", "word"):
        plain = play(llm, samples, **HEARD | {"speakers": False, "timestamps": "word"})
        told = play(llm, samples, **HEARD | {"timestamps": timestamps})
        assert finals(told) == finals(plain)
        assert turns_of(plain) == []


@pytest.mark.parametrize("vad", [True, False])
def test_turns_across_windows_are_reported_once(llm: LLM, vad: bool) -> None:
    """Windows of the maximum length overlap, or end where a segment ends."""
    spoken = [(0.5, 7.0, 0), (7.3, 13.0, 1), (13.2, 16.0, 0)]
    options = HEARD | {"max_window": 3.0, "vad": hears_sound if vad else False}
    events = play(llm, conversation(17.0, spoken).numpy(), **options)
    check_promises(events)
    turns = turns_of(events)
    for name in {turn.speaker for turn in turns}:
        own = [turn for turn in turns if turn.speaker == name]
        assert all(left.end <= right.start for left, right in pairwise(own))
    timeline = live_timeline(events)
    assert len({turn.speaker for turn in timeline.turns or ()}) == 2
    assert sum(turn.end - turn.start for turn in turns) == pytest.approx(sum(end - start for start, end, _ in spoken), abs=1.0)


def test_words_have_times_without_speakers(llm: LLM) -> None:
    events = play(llm, conversation(24.0, TALK).numpy(), **HEARD | {"speakers": False, "timestamps": "word"})
    words = [word for event in events for part in event.segments or () for word in part.words or ()]
    assert " ".join(word.word.strip() for word in words).split() == " ".join(finals(events)).split()
    assert words
    assert all(left.start <= left.end <= right.start for left, right in pairwise(words))


def test_a_speaker_keeps_the_label_and_memory_is_flat() -> None:
    voices, kept = LiveVoices(NETWORKS, 64), list[int]()
    for minute in range(90):
        reader = VoiceReader(NETWORKS)
        tone = minute % 3
        reader.add(conversation(6.0, [(0.5, 5.5, tone)]))
        reader.finish()
        (turn,) = voices.identify(reader, 60.0 * minute)
        assert turn.speaker == f"SPEAKER_{tone:02}"
        assert 60.0 * minute < turn.start < turn.end < 60.0 * minute + 6.0
        kept.append(sum(speaker.total.nbytes for speaker in voices._speakers))
    assert kept[2:] == kept[2:3] * 88


def test_an_hour_of_a_stream_keeps_only_the_open_window(llm: LLM) -> None:
    options = OPTIONS | HEARD | {"min_chunk": 60.0, "max_window": 6.0, "cache_salt": "hour"}
    transcriber, most, turns = LiveTranscriber(llm.engine, LiveOptions(**options)), 0, 0
    assert transcriber._speakers is not None
    for minute in range(60):
        transcriber.push(conversation(8.0, [(0.5, 3.0, minute % 3), (3.2, 7.0, (minute + 1) % 3)]))
        turns += len(turns_of(run_passes(llm, transcriber)[0]))
        transcriber.gap(Gap(52.0))
        turns += len(turns_of(run_passes(llm, transcriber)[0]))
        reader = transcriber._speakers._reader
        most = max(most, len(reader._buffer) + sum(active.nbytes for active in reader.active))
    assert turns >= 120
    assert most == 0


def test_the_number_of_speakers_is_limited(llm: LLM) -> None:
    events = play(llm, conversation(24.0, TALK).numpy(), **HEARD | {"speakers": (1, 2)})
    check_turns(turns_of(events), TALK)
    assert {turn.speaker for turn in turns_of(events)} == {"SPEAKER_00", "SPEAKER_01"}


def test_known_speakers_have_their_names(llm: LLM) -> None:
    clips = [(conversation(3.0, [(0.2, 2.8, tone)]), RATE) for tone in (1, 3)]
    known: Any = {"known_speaker_names": ["Ann", "Bob"], "known_speaker_references": clips}
    events = play(llm, conversation(24.0, TALK).numpy(), **HEARD | known)
    assert [turn.speaker for turn in turns_of(events)] == ["SPEAKER_00", "Ann", "SPEAKER_00", "SPEAKER_01", "Ann"]


def test_a_short_word_of_a_stranger_is_no_known_speakers() -> None:
    voice = voice_of(NETWORKS, conversation(3.0, [(0.2, 2.8, 1)]))
    assert voice is not None
    voices, names = LiveVoices(NETWORKS, 64, [("Ann", voice)]), list[str]()
    for spoken in ([(0.5, 1.1, 0)], [(0.5, 4.0, 0)], [(0.5, 1.1, 1)], [(0.5, 1.1, 0)]):
        reader = VoiceReader(NETWORKS)
        reader.add(conversation(5.0, spoken))
        reader.finish()
        names += [turn.speaker for turn in voices.identify(reader, 0.0)]
    assert names == ["SPEAKER_00", "SPEAKER_00", "Ann", "SPEAKER_00"]


def test_labels_hold_for_later_streams(llm: LLM) -> None:
    voices = live_voices(llm.engine, LiveOptions(speakers=True))
    assert voices is not None
    names = list[str]()
    for tones in ((2, 0), (0, 1, 2)):
        spoken = [(4.0 * i + 0.5, 4.0 * i + 3.0, tone) for i, tone in enumerate(tones)]
        events = play(llm, conversation(4.0 * len(tones), spoken).numpy(), **HEARD, voices=voices)
        names += [turn.speaker for turn in turns_of(events)]
    assert names == ["SPEAKER_00", "SPEAKER_01", "SPEAKER_01", "SPEAKER_02", "SPEAKER_00"]


def test_another_rate(llm: LLM) -> None:
    voices = LiveVoices(NETWORKS, 64)
    finder = LiveSpeakers(llm.engine, voices, 2 * RATE)
    for part in torch.repeat_interleave(conversation(10.0, [(0.5, 4.0, 2), (5.0, 9.0, 0)]), 2).split(9_999):
        finder.hear(part)
    assert finder.num_heard == 20 * RATE
    turns = finder.turns(100.0)
    check_turns(turns, [(100.5, 104.0, 2), (105.0, 109.0, 0)])
    finder.keep(turns, 107.0)
    assert [turn.end for turn in finder.take()] == [turns[0].end, 107.0]
    finder.keep(turns, 120.0)
    assert [(turn.start, turn.end) for turn in finder.take()] == [(107.0, turns[1].end)]
    assert finder.take() == ()


def test_networks_run_in_a_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop of a server goes on while they read."""
    names, read = set[str](), VoiceReader._read
    monkeypatch.setattr(
        VoiceReader,
        "_read",
        lambda reader, windows: names.add(threading.current_thread().name.split("_")[0]) or read(reader, windows),
    )
    samples = conversation(12.0, TALK[:2]).numpy()

    async def events() -> list[LiveEvent]:
        parts = np.split(samples, range(RATE, len(samples), RATE))
        return [event async for event in AsyncLLM(llm).stream_transcribe(blocks(parts), RATE, **OPTIONS | HEARD)]

    streamed = asyncio.run(events())
    assert names == {"speakers"}
    with llm.live_audio(RATE, **OPTIONS | HEARD) as session:
        session.push(samples)
        session.finish()
        assert turns_of(list(session.events())) == turns_of(streamed) != []
    assert names == {"speakers"}


def test_wrong_options(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"speakers": 0}, "speakers"),
        ({"speakers": "2"}, "speakers"),
        ({"known_speaker_names": ["a"], "known_speaker_references": [b""]}, "speakers"),
        ({"speakers": True, "known_speaker_names": ["a"]}, "known_speaker_references"),
        ({"speakers": True, "known_speaker_names": ["a"], "known_speaker_references": [b""]}, "known_speaker_references"),
        ({"speakers": True, "voices": 3}, "voices"),
        ({"voices": LiveVoices(NETWORKS, 2)}, "speakers"),
    ]
    for options, param in wrong:
        with pytest.raises(InputError) as refused:
            llm.live_audio(RATE, **options)
        assert refused.value.info.param == param
    monkeypatch.undo()
    with pytest.raises(ConfigError) as missing:
        llm.live_audio(RATE, speakers=True, speaker_model=tmp_path)
    assert missing.value.info.param == "speaker_model"


def test_words_of_a_final_text_have_the_times_of_its_last_pass() -> None:
    words = [Word(0.0, 1.0, " Hello", 0.9), Word(1.0, 2.0, " dear", 0.8), Word(2.0, 4.0, " old world.", 0.7)]
    fitted = fit_words(words, "hello, my old world and more")
    assert [word.word for word in fitted] == ["hello,", " my", " old", " world", " and", " more"]
    assert [(word.start, word.end) for word in fitted] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 4), (4, 4)]
    assert [word.probability for word in fitted] == [0.9, 0.0, 0.7, 0.7, 0.0, 0.0]
    assert [word.word for word in fit_words([], "a b")] == ["a", " b"]
    assert fit_words(words, "") == []
    parts = [Segment(0.0, 2.0, "Hello dear", words=tuple(words[:2])), Segment(2.0, 4.0, "old world.", words=tuple(words[2:]))]
    first, second = fit_segments(parts, "Hello dear old world.")
    assert [word.word for word in first.words or ()] == ["Hello", " dear"]
    assert [word.word for word in second.words or ()] == [" old", " world."]
