"""The forms of /v1/audio/transcriptions and /translations."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict, Field

from .body import Body, Refused

LISTS = ("timestamp_granularities", "include", "known_speaker_names", "known_speaker_references")
"""Fields that are lists, which forms write with `[]`."""
_NO_SPEAKERS = "speakers are not told apart"


class AudioForm(Body):
    """Values of a form are texts, so numbers are converted."""

    model_config = ConfigDict(strict=False)
    refused: ClassVar[Refused] = {
        "stream": (("false", "0", "False"), "translations are sent whole"),
        "include": (([],), "there are no log probabilities of tokens; verbose_json has those of segments"),
        "chunking_strategy": (("auto",), "windows follow the speech; give vad"),
        "known_speaker_names": (([],), _NO_SPEAKERS),
        "known_speaker_references": (([],), _NO_SPEAKERS),
    }
    language: str | None = None
    prompt: str = ""
    hotwords: str = ""
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: float = 0.0
    max_completion_tokens: int | None = Field(None, ge=1)
    vad: bool = True
    cache_salt: str | None = None


class TranscriptionForm(AudioForm):
    refused: ClassVar[Refused] = {name: entry for name, entry in AudioForm.refused.items() if name != "stream"}
    stream: bool = False
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None

    @property
    def as_vllm(self) -> bool:
        """True if the stream has vLLM's chunks, because the request has vLLM's fields of a stream."""
        return self.stream_include_usage is not None or self.stream_continuous_usage_stats is not None

    @property
    def has_continuous_usage(self) -> bool:
        """True if each of vLLM's chunks has the usage so far."""
        return bool(self.stream_include_usage and self.stream_continuous_usage_stats)
