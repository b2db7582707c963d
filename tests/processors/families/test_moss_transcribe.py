"""MOSS-Transcribe-Diarize: the seconds between rows of audio, and the text of its answers."""

import json
from pathlib import Path
from typing import Any

import pytest
from sensorium.callers.errors import ConfigError
from sensorium.mm.types import ItemGeometry
from sensorium.models.families.moss_transcribe.processing import MossTranscribeProcessingInfo
from sensorium.processors.files import ProcessorFiles

AUDIO = 151671


def info_of(folder: Path, **settings: Any) -> MossTranscribeProcessingInfo:
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return MossTranscribeProcessingInfo(ProcessorFiles(folder=folder, encode=lambda text: [int(digit) for digit in text]))


def tokens(info: MossTranscribeProcessingInfo, rows: int) -> list[int]:
    return list(info.span("audio", ItemGeometry(rows, 1, 1, linear=True)).token_ids)


def test_seconds_stand_between_rows(tmp_path: Path) -> None:
    info = info_of(tmp_path)
    assert tokens(info, 24) == [AUDIO] * 24
    assert tokens(info, 25) == [*[AUDIO] * 25, 2]
    assert tokens(info, 130)[-8:] == [AUDIO, 1, 0, *[AUDIO] * 5]  # 10 s are two digits
    assert tokens(info_of(tmp_path, time_marker_every_seconds=0), 60) == [AUDIO] * 60


@pytest.mark.parametrize("settings", [{"time_marker_every_seconds": -1}, {"audio_tokens_per_second": "12"}])
def test_settings_are_checked(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        info_of(tmp_path, **settings)


def test_answers_become_text(tmp_path: Path) -> None:
    info, segments = info_of(tmp_path), "[0.00][S01]Hello there.[1.52][1.60] [S02] Hi. [2:03]<|im_end|>"
    assert info.parse_transcript(segments, None) == ("Hello there. Hi.", None)
    assert info.parse_transcript("no segments [S01]", "en") == ("no segments [S01]", "en")
