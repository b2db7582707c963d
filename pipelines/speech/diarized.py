"""A timeline with speakers as RTTM (who spoke when), STM (who said what), and OpenAI's `diarized_json`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import PurePath
from string import ascii_uppercase
from typing import Any

from ...callers.errors import InputError
from .segments import SpeakerTurn
from .timeline import SpeechTimeline

UNNAMED = re.compile(r"SPEAKER_\d+")
"""Labels of speakers whose names are not known."""


def to_rttm(timeline: SpeechTimeline) -> str:
    """Return one line per turn, as the NIST Rich Transcription evaluations define it.

    Raises:
        InputError: speakers were not requested.
    """
    name = _file_name(timeline)
    lines = (
        f"SPEAKER {name} 1 {turn.start:.3f} {turn.end - turn.start:.3f} <NA> <NA> {_field(turn.speaker)} <NA> <NA>"
        for turn in _turns(timeline, "rttm")
    )
    return "\n".join(lines)


def to_stm(timeline: SpeechTimeline) -> str:
    """Return one line per segment: file, channel, speaker, start, end and text. See `to_rttm`."""
    _turns(timeline, "stm")
    name, lines = _file_name(timeline), list[str]()
    for segment in timeline.segments:
        times, text = f"{segment.start:.3f} {segment.end:.3f}", " ".join(segment.text.split())
        lines.append(f"{name} 1 {_field(segment.speaker or 'unknown')} {times} {text}")
    return "\n".join(lines)


def to_diarized_json(timeline: SpeechTimeline) -> str:
    """Return `diarized_fields` as one line of JSON. See `to_rttm`."""
    return json.dumps(diarized_fields(timeline), ensure_ascii=False)


def diarized_fields(timeline: SpeechTimeline) -> dict[str, Any]:
    """Return OpenAI's object of a transcription with speakers. See `to_rttm`.

    Unnamed speakers are A, B, C, ... in it, without those that are the name of another speaker.
    """
    turns, names = _turns(timeline, "diarized_json"), dict[str, str]()
    taken = {turn.speaker for turn in turns} | {segment.speaker for segment in timeline.segments}
    letters = (letter for letter in _letters() if letter not in taken)
    segments = []
    for number, segment in enumerate(timeline.segments):
        label = segment.speaker or "unknown"
        if label not in names:
            names[label] = next(letters) if UNNAMED.fullmatch(label) else label
        fields = {"type": "transcript.text.segment", "id": f"seg_{number:03}", "start": segment.start, "end": segment.end}
        segments.append({**fields, "text": segment.text, "speaker": names[label]})
    usage = {"type": "duration", "seconds": timeline.duration}
    head = {"task": "transcribe", "duration": timeline.duration, "text": timeline.text}
    return {**head, "segments": segments, "usage": usage}


def _turns(timeline: SpeechTimeline, output_format: str) -> tuple[SpeakerTurn, ...]:
    if timeline.turns is None:
        reason = f"{output_format} has the speakers, which were not requested; give <<param>>"
        raise InputError(reason, param="speakers")
    return timeline.turns


def _letters() -> Iterator[str]:
    """Yield A to Z, then AA, AB and so on."""
    yield from ascii_uppercase
    for first in _letters():
        yield from (first + last for last in ascii_uppercase)


def _file_name(timeline: SpeechTimeline) -> str:
    return _field(PurePath(timeline.source).stem or "audio")


def _field(text: str) -> str:
    """Return a text without spaces, which separate the fields of a line."""
    return "_".join(text.split()) or "unknown"
