"""`transcribe` with speakers, on a small random Whisper, with networks that hear tones as speakers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from sensorium import LLM, ConfigError, InputError
from sensorium.pipelines.speech import speakers
from sensorium.pipelines.speech.options import FileOptions, read_speakers
from tone_speakers import NETWORKS, conversation

TALK = [(1.0, 4.0, 0), (5.0, 9.0, 1), (10.0, 14.0, 0), (15.0, 19.0, 2)]


@pytest.fixture(scope="module")
def llm(whisper: Path) -> Iterator[LLM]:
    with LLM(whisper, max_model_len=24, device="cpu") as made:
        yield made


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speakers, "load_speaker_networks", lambda folder: NETWORKS)


def transcribe(llm: LLM, item: object, **options: Any) -> Any:
    (found,) = llm.transcribe(item, vad=False, use_tqdm=False, **{"language": "en", "temperature": 0.0, **options})
    return found


def test_segments_and_words_have_speakers(llm: LLM) -> None:
    reported = list[Any]()
    found = transcribe(
        llm, (conversation(20.0, TALK), 16_000), speakers=True, on_segments=lambda i, parts: reported.append(parts)
    )
    assert found.error is None
    assert [turn.speaker for turn in found.turns] == ["SPEAKER_00", "SPEAKER_01", "SPEAKER_00", "SPEAKER_02"]
    assert found.segments
    assert reported == [found.segments]
    names = {turn.speaker for turn in found.turns}
    for segment in found.segments:
        assert segment.speaker in names
        assert segment.end is not None
        assert {word.speaker for word in segment.words} == {segment.speaker}
    fields = json.loads(found.to_json())
    assert all(word["speaker"] == part["speaker"] for part in fields["segments"] for word in part["words"])
    assert fields["turns"][0]["speaker"] == "SPEAKER_00"
    assert json.loads(found.to_diarized_json())["segments"][0]["speaker"] == "A"


def test_the_text_is_that_without_speakers(llm: LLM) -> None:
    item = (conversation(20.0, TALK), 16_000)
    plain = transcribe(llm, item, timestamps="word")
    found = transcribe(llm, item, speakers=(1, 2))
    assert found.text == plain.text
    assert [word.word for part in found.segments for word in part.words] == [
        word.word for part in plain.segments for word in part.words
    ]
    assert plain.turns is None
    assert plain.segments[0].speaker is None
    assert len({turn.speaker for turn in found.turns}) == 2


def test_another_rate(llm: LLM) -> None:
    samples = conversation(20.0, TALK).numpy()
    stream = io.BytesIO()
    soundfile.write(stream, np.repeat(samples, 2), 32_000, format="WAV")
    found = transcribe(llm, stream.getvalue(), speakers=3)
    assert [turn.speaker for turn in found.turns] == ["SPEAKER_00", "SPEAKER_01", "SPEAKER_00", "SPEAKER_02"]


def test_known_speakers(llm: LLM) -> None:
    clips = [(conversation(3.0, [(0.2, 2.8, tone)]), 16_000) for tone in (1, 3)]
    options: Any = {"known_speaker_names": ["Ann", "Bob"], "known_speaker_references": clips, "speakers": True}
    found = transcribe(llm, (conversation(20.0, TALK), 16_000), **options)
    assert [turn.speaker for turn in found.turns] == ["SPEAKER_00", "Ann", "SPEAKER_00", "SPEAKER_01"]
    silent = (np.zeros(32_000, np.float32), 16_000)
    for clip, code in ((silent, "invalid_media"), ("/nowhere.wav", "invalid_media"), (3, "invalid_media")):
        with pytest.raises(InputError) as refused:
            transcribe(llm, silent, speakers=True, known_speaker_names=["Ann"], known_speaker_references=[clip])
        assert refused.value.info.param == "known_speaker_references"
        assert refused.value.info.code in (code, "invalid_input")


def test_each_channel_is_a_speaker(llm: LLM) -> None:
    left, right = conversation(12.0, [(1.0, 4.0, 0)]).numpy(), conversation(12.0, [(5.0, 9.0, 1)]).numpy()
    alone = [transcribe(llm, (samples, 16_000), timestamps="word") for samples in (left, right)]
    stereo, texts = (np.stack([left, right]), 16_000), list[str]()
    found = transcribe(
        llm, stereo, channel="each", known_speaker_names=["agent"], on_text=lambda index, text: texts.append(text)
    )
    assert found.error is None
    assert {segment.speaker for segment in found.segments} == {"agent", "SPEAKER_01"}
    for name, one in zip(("agent", "SPEAKER_01"), alone, strict=True):
        own = [segment.text for segment in found.segments if segment.speaker == name]
        assert own == [segment.text for segment in one.segments]
    assert [segment.start for segment in found.segments] == sorted(segment.start for segment in found.segments)
    assert [segment.id for segment in found.segments] == list(range(1, len(found.segments) + 1))
    assert texts == [found.text]
    mono = transcribe(llm, (left, 16_000), channel="each")
    assert {turn.speaker for turn in mono.turns} == {"SPEAKER_00"}
    broken = transcribe(llm, b"nothing", channel="each")
    assert broken.error is not None


def test_voices_are_heard_with_voice_detection(llm: LLM) -> None:
    (found,) = llm.transcribe((np.zeros(64_000, np.float32), 16_000), speakers=True, use_tqdm=False)
    assert (found.turns, found.segments, found.skipped) == ((), (), "silence")
    (found,) = llm.transcribe((np.zeros((2, 64_000), np.float32), 16_000), channel="each", use_tqdm=False)
    assert (found.turns, found.segments, found.speech_spans) == ((), (), ())


def test_a_fault_in_the_audio_keeps_the_speakers_before_it(llm: LLM) -> None:
    stream = io.BytesIO()
    soundfile.write(stream, conversation(20.0, TALK).numpy(), 16_000, format="WAV")
    found = transcribe(llm, stream.getvalue()[: 2 * 16_000 * 16], speakers=True)
    assert found.error is not None
    assert found.segments
    assert all(segment.speaker is not None for segment in found.segments)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"speakers": 0}, "speakers"),
        ({"speakers": 65}, "speakers"),
        ({"speakers": (3, 2)}, "speakers"),
        ({"speakers": (1, 2, 3)}, "speakers"),
        ({"speakers": (True, 2)}, "speakers"),
        ({"speakers": "2"}, "speakers"),
        ({"speakers": 2.0}, "speakers"),
        ({"speakers": True, "speaker_model": 3}, "speaker_model"),
        ({"speakers": True, "known_speaker_names": "Ann"}, "known_speaker_names"),
        ({"speakers": True, "known_speaker_names": [""], "known_speaker_references": [b""]}, "known_speaker_names"),
        ({"speakers": True, "known_speaker_names": ["a\n"], "known_speaker_references": [b""]}, "known_speaker_names"),
        ({"speakers": True, "known_speaker_names": ["a", "a"], "known_speaker_references": [b"", b""]}, "known_speaker_names"),
        ({"speakers": True, "known_speaker_names": ["a", "b"], "known_speaker_references": [b""]}, "known_speaker_references"),
        ({"speakers": True, "known_speaker_references": [b""]}, "known_speaker_references"),
        ({"known_speaker_names": ["a"], "known_speaker_references": [b""]}, "speakers"),
        ({"channel": "each", "speakers": 2}, "speakers"),
        ({"channel": "each", "known_speaker_names": ["a"], "known_speaker_references": [b""]}, "known_speaker_references"),
    ],
)
def test_wrong_options(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InputError) as refused:
        FileOptions(**options)
    assert (refused.value.info.param, refused.value.info.code in ("invalid_value", "invalid_input")) == (param, True)


def test_an_aligner_may_time_the_words_of_speakers() -> None:
    assert FileOptions(speakers=2, aligner="folder").tells_speakers
    assert FileOptions(channel="each", aligner="folder").each_channel
    with pytest.raises(InputError) as refused:
        FileOptions(aligner="folder")
    assert refused.value.info.param == "aligner"


def test_too_many_names() -> None:
    names = [str(number) for number in range(65)]
    with pytest.raises(InputError) as refused:
        FileOptions(channel="each", known_speaker_names=names)
    assert (refused.value.info.param, refused.value.info.code) == ("known_speaker_names", "over_limit")
    assert (refused.value.info.limit, refused.value.info.value) == (64, 65)


def test_numbers_of_speakers_as_text() -> None:
    assert [read_speakers(text) for text in ("true", "False", "3", "2-4")] == [True, False, 3, (2, 4)]
    for text in ("", "two", "0", "4-2", "1-2-3", "-2", "2-", "1e3", "9" * 20):
        with pytest.raises(InputError) as refused:
            read_speakers(text)
        assert (refused.value.info.param, refused.value.info.code) == ("speakers", "invalid_value")


def test_missing_weights(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ConfigError) as refused:
        transcribe(llm, (conversation(1.0, []), 16_000), speakers=True, speaker_model=tmp_path)
    assert refused.value.info.param == "speaker_model"
