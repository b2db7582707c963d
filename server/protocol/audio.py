"""The forms of /v1/audio/transcriptions and /translations."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator
from pydantic_core import PydanticKnownError

from ...callers.errors import InputError
from .body import Body, Part, Refused

_SPEAKERS = ("known_speaker_names", "known_speaker_references")
LISTS = ("timestamp_granularities", "include", "keywords", "languages", "boost", *_SPEAKERS)
"""Fields that are lists, which forms write with `[]`."""
_NO_SPEAKERS = "speakers of translations are not told apart"
_SAMPLING = ("seed", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class ServerVad(Part):
    """How recordings are cut into windows. Cuts lie in silence, and windows keep the sound around the speech, in any case."""

    model_config = ConfigDict(strict=False)
    refused: ClassVar[Refused] = {"threshold": ((0.5, "0.5"), "voice detection adapts to the noise")}
    type: Literal["server_vad"]
    prefix_padding_ms: int = Field(300, ge=0)
    silence_duration_ms: int = Field(200, ge=0)


def check_clips(clips: list[str]) -> list[str]:
    """Return the clips of known speakers.

    Raises:
        InputError: one is no data URL; the server opens no other for a client.
    """
    for index, clip in enumerate(clips):
        if clip[:5].lower() != "data:":
            reason = f"<<param>>[{index}] must be a data URL with 2 to 10 s of speech, such as data:audio/wav;base64,..."
            raise InputError(reason, code="invalid_value", param="known_speaker_references")
    return clips


class AudioForm(Body):
    """Values of a form are texts, so numbers are converted."""

    model_config = ConfigDict(strict=False)
    refused: ClassVar[Refused] = {
        "stream": (("false", "0", "False"), "translations are sent whole"),
        "include": (([],), "translations have no log probabilities of tokens"),
        **dict.fromkeys(_SPEAKERS, (([],), _NO_SPEAKERS)),
        "to_language": (("en", "english"), "translations are into English"),
        "length_penalty": (("1", "1.0"), "beams are ranked by their mean log probability"),
        "include_stop_str_in_output": (("false", "0", "False"), "transcripts have no stop strings"),
        "vllm_xargs": (("{}",), "requests cannot name logits processors"),
    }
    chunking_strategy: ServerVad | None = None
    language: str | None = None
    prompt: str = ""
    hotwords: str = ""
    boost: list[str | tuple[str, float]] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)
    languages: list[str] = Field(default_factory=list, max_length=1)
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] = "json"
    temperature: float = 0.0
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    use_beam_search: bool = False
    n: int = Field(1, ge=1)
    vad: bool = True
    track: str = "default"
    channel: str = "mix"
    cache_salt: str | None = None

    @field_validator("chunking_strategy", mode="before")
    @classmethod
    def _read_json(cls, value: Any) -> Any:
        """Read "auto", and an object that a client has written as JSON into a form."""
        if value == "auto":
            return None
        if isinstance(value, str) and value.startswith("{"):
            with suppress(ValueError):
                return json.loads(value)
        if isinstance(value, str):
            raise PydanticKnownError("literal_error", {"expected": "'auto' or an object"})
        return value

    @field_validator("boost", mode="before")
    @classmethod
    def _read_phrases(cls, value: Any) -> Any:
        """Read a list that a client has written as JSON into one field of a form."""
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and value[0].startswith("["):
            with suppress(ValueError):
                return json.loads(value[0])
        return value

    @property
    def detects_speech(self) -> bool:
        """Return True if only the parts with speech are transcribed.

        Raises:
            InputError: `vad` contradicts `chunking_strategy`.
        """
        if self.chunking_strategy is not None and not self.vad:
            raise InputError("<<param>> finds speech, and vad=false takes all sound; leave one out", param="chunking_strategy")
        return self.vad

    @property
    def spoken(self) -> str | None:
        """The language spoken, None to detect it.

        Raises:
            InputError: `language` and `languages` differ.
        """
        if self.language is not None and self.languages and self.languages != [self.language]:
            raise InputError(
                "language and languages name different languages; give one of them", code="invalid_value", param="languages"
            )
        return next(iter(self.languages), self.language)

    @property
    def words(self) -> str:
        """Words to expect."""
        return " ".join(filter(None, (self.hotwords, *self.keywords)))

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields that are sampling parameters, by their names in SamplingParams, except the temperature."""
        names = {name: name for name in _SAMPLING} | {"max_completion_tokens": "max_tokens"}
        return {param: getattr(self, name) for name, param in names.items() if getattr(self, name) is not None}

    @property
    def beam_size(self) -> int:
        """The number of beams, which vLLM calls `n` of `use_beam_search`.

        Raises:
            InputError: `n` without `use_beam_search`.
        """
        if self.n > 1 and not self.use_beam_search:
            raise InputError("a transcription has one text; leave n out, or set use_beam_search for n beams", param="n")
        return self.n


class TranscriptionForm(AudioForm):
    refused: ClassVar[Refused] = {
        **{name: entry for name, entry in AudioForm.refused.items() if name not in ("stream", "include", *_SPEAKERS)},
        "to_language": ((), "transcriptions are in the language spoken; use /v1/audio/translations"),
    }
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json", "diarized_json"] = "json"  # type: ignore[assignment]
    stream: bool = False
    speakers: str | None = None
    known_speaker_names: list[str] = Field(default_factory=list)
    known_speaker_references: list[str] = Field(default_factory=list)
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    include: list[Literal["logprobs"]] = Field(default_factory=list)

    @property
    def has_logprobs(self) -> bool:
        """Return True if the response has the log probabilities of tokens.

        Raises:
            InputError: its format has no place for them.
        """
        if self.include and self.response_format != "json":
            raise InputError("<<param>> has logprobs, which need response_format=json; set it", param="include")
        return bool(self.include)

    @property
    def tells_speakers(self) -> bool:
        """True if the response has the speakers."""
        asked = self.response_format == "diarized_json" or self.channel == "each" or bool(self.known_speaker_names)
        return asked or self.speakers is not None or bool(self.known_speaker_references)

    @property
    def clips(self) -> list[str]:
        """The clips of known speakers. See `check_clips`."""
        return check_clips(self.known_speaker_references)

    @property
    def as_vllm(self) -> bool:
        """True if the stream has vLLM's chunks, because the request has vLLM's fields of a stream."""
        return self.stream_include_usage is not None or self.stream_continuous_usage_stats is not None

    @property
    def has_continuous_usage(self) -> bool:
        """True if each of vLLM's chunks has the usage so far."""
        return bool(self.stream_include_usage and self.stream_continuous_usage_stats)
