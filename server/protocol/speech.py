"""The body of /v1/audio/speech."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import BaseModel, Field

from .body import Body, Refused


class VoiceId(BaseModel):
    """A voice as an object, as newer clients write it."""

    id: str


class SpeechBody(Body):
    """OpenAI's fields, and `language`, `phonemes` and `seed`."""

    refused: ClassVar[Refused] = {
        "instructions": (("",), "the style is that of the voice"),
        "task_type": ((), "the voices are those of the checkpoint"),
    }
    input: str | None = None
    voice: str | VoiceId | None = None
    response_format: str = "mp3"
    speed: float = 1.0
    stream_format: Literal["audio", "sse"] = "audio"
    language: str | None = None
    phonemes: str | None = Field(None, description="in place of input")
    seed: int | None = None

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice
