"""Events that a client sends to /v1/realtime, and the formats of its audio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from ...callers.errors import InputError
from ...mm.media.data_url import base64_pieces, decoded, text_pieces
from .body import Body, Many, Part, Refused

_NO_ANSWERS = "a transcription session has no answers"


class Format(Part):
    type: Literal["audio/pcm", "audio/pcmu", "audio/pcma"] = "audio/pcm"
    rate: Literal[24000] | None = None

    @property
    def hertz(self) -> int:
        return 24_000 if self.type == "audio/pcm" else 8_000


class Transcription(Body):
    ignored: ClassVar[tuple[str, ...]] = ()
    refused: ClassVar[Refused] = {
        "delay": ((), "text is sent as soon as it is final"),
        "languages": ((), "give one language, or none to detect it"),
    }
    language: str | None = None
    prompt: str | None = None
    keywords: Many[str] | None = None
    boost: Many[str | tuple[str, float]] | None = None
    speakers: bool | int | list[int] = False
    known_speaker_names: Many[str] | None = None
    known_speaker_references: Many[str] | None = None

    @property
    def speaker_settings(self) -> tuple[object, ...]:
        """The settings of speakers. While they do not change, speakers keep their labels."""
        names, clips = self.known_speaker_names or (), self.known_speaker_references or ()
        return repr(self.speakers), tuple(names), tuple(clips)  # 0 and False are equal, and so are 1 and True


class TurnDetection(Part):
    refused: ClassVar[Refused] = {
        "threshold": ((0.5,), "voice detection adapts to the noise"),
        "create_response": ((False,), _NO_ANSWERS),
        "interrupt_response": ((False,), _NO_ANSWERS),
        "idle_timeout_ms": ((), _NO_ANSWERS),
    }
    type: Literal["server_vad"] = "server_vad"
    prefix_padding_ms: int = Field(default=300, ge=0, le=500)
    silence_duration_ms: int = Field(default=500, ge=100, le=60_000)


class AudioInput(Part):
    refused: ClassVar[Refused] = {"noise_reduction": ((), "audio is transcribed as it is")}
    format: Format | None = None
    transcription: Transcription | None = None
    turn_detection: TurnDetection | None = None


class SessionAudio(Part):
    input: AudioInput | None = None


class Session(Part):
    refused: ClassVar[Refused] = {"include": (([],), "there are no log probabilities of tokens")}
    type: Literal["transcription"]
    audio: SessionAudio | None = None


class _Event(Part):
    type: str
    event_id: str | None = None


class SessionUpdate(_Event):
    session: Session


class BufferAppend(_Event):
    audio: str


class BufferCommit(_Event):
    pass


class BufferClear(_Event):
    pass


EVENTS: Mapping[str, type[_Event]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": BufferAppend,
    "input_audio_buffer.commit": BufferCommit,
    "input_audio_buffer.clear": BufferClear,
}


def read_audio(audio: str, audio_format: Format) -> bytes:
    """Return base64 audio as int16 PCM, little-endian.

    Raises:
        InputError: it is not base64, or has half a sample.
    """
    try:
        data = b"".join(_samples(piece, audio_format) for piece in decoded(base64_pieces(text_pieces(audio))))
    except ValueError:
        raise InputError("audio is not base64; send samples in the session's format as base64", param="audio") from None
    if len(data) % 2:
        raise InputError("audio has half a sample; send whole samples of 16 bits", param="audio")
    return data


def _samples(data: bytes, audio_format: Format) -> bytes:
    return data if audio_format.type == "audio/pcm" else _TABLES[audio_format.type][np.frombuffer(data, np.uint8)].tobytes()


def _expand_mu(code: int) -> int:
    """Return the sample of a code of G.711's mu-law."""
    code = ~code & 255
    size = ((((code & 15) << 3) + 132) << (code >> 4 & 7)) - 132
    return -size if code & 128 else size


def _expand_a(code: int) -> int:
    """Return the sample of a code of G.711's A-law."""
    code ^= 85
    exponent, size = code >> 4 & 7, ((code & 15) << 4) + 8
    size = size + 256 << exponent - 1 if exponent else size
    return size if code & 128 else -size


_TABLES = {
    "audio/pcmu": np.array([_expand_mu(code) for code in range(256)], "<i2"),
    "audio/pcma": np.array([_expand_a(code) for code in range(256)], "<i2"),
}
