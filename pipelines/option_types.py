"""Keyword arguments of the tasks as types, for type checkers and editors. The tasks' docstrings explain them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypedDict

from ..engine.frontend.adapters import AdapterChoice
from ..engine.option_types import ChatOptions
from ..engine.pooling_params import PoolingParams
from ..engine.sampling_params import SamplingParams
from ..engine.voices import Voice
from .speech.live_voices import LiveVoices
from .speech.segments import Segment, WindowResult

SpeechTask = Literal["transcribe", "translate"]


class AdapterKeywords(TypedDict, total=False):
    """See `with_adapter.with_adapters`."""

    adapter: AdapterChoice | Sequence[AdapterChoice]
    lora_request: AdapterChoice | Sequence[AdapterChoice]


class OcrKeywords(AdapterKeywords, total=False):
    """See `ocr.OcrOptions`."""

    question: str | None
    max_tokens: int | None
    sampling_params: SamplingParams | None
    chat_template: str | os.PathLike[str] | None
    cache_salt: str | None


class ReadKeywords(AdapterKeywords, total=False):
    """See `documents.options.ReadOptions`."""

    pages: str | None
    text_layer: Literal["auto", "always", "never"]
    jobs: int | None
    max_pages: int | None
    max_characters: int | None
    question: str | None
    max_tokens: int | None
    cache_salt: str | None
    convert_office: bool
    reader: str
    calibration: str | os.PathLike[str] | None


class EmbedKeywords(AdapterKeywords, total=False):
    """See `embed.EmbedOptions`."""

    instruction: str | None
    dimensions: int | None
    chat_template: str | os.PathLike[str] | None
    pooling_params: PoolingParams | None
    cache_salt: str | None
    pooling: str | None
    prompt_name: str | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None


class ScoreKeywords(AdapterKeywords, total=False):
    """See `rank.ScoreOptions`."""

    instruction: str | None
    chat_template: str | os.PathLike[str] | None
    cache_salt: str | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None


class SpeechKeywords(TypedDict, total=False):
    """See `speech.options.SpeechOptions`."""

    timestamps: bool | Literal["none", "segment", "word"] | None
    context: str | None
    sampling_params: SamplingParams | None
    prompt: str | None
    hotwords: str | None
    boost: Sequence[str | tuple[str, float]] | None
    vad: object
    temperature: float | Sequence[float] | None
    no_speech_threshold: float | None
    log_prob_threshold: float | None
    compression_ratio_threshold: float | None
    condition_on_previous_text: bool | None
    cache_salt: str | None
    speakers: bool | int | tuple[int, int] | None
    speaker_model: str | Path | None
    known_speaker_names: Sequence[str] | None
    known_speaker_references: Sequence[object] | None


class TranscribeKeywords(SpeechKeywords, AdapterKeywords, total=False):
    """See `speech.options.FileOptions`."""

    sequential: bool | None
    aligner: str | Path | None
    beam_size: int | None
    track: int | str | None
    channel: int | str | None
    on_progress: Callable[[float], None] | None
    on_text: Callable[[int, str], None] | None
    on_window: Callable[[int, WindowResult], None] | None
    on_segments: Callable[[int, tuple[Segment, ...]], None] | None


class LiveKeywords(SpeechKeywords, AdapterKeywords, total=False):
    """See `speech.options.LiveOptions`."""

    language: str | None
    task: SpeechTask
    min_chunk: float | None
    pause: float
    max_window: float | None
    max_buffer_bytes: int
    turn_events: bool
    idle_timeout: float | None
    max_sessions: int
    voices: LiveVoices | None


class SpeakKeywords(ChatOptions, total=False):
    """See `speak.speech_requests` and, for models that turn texts into speech, `speak_text.SpeakTextOptions`."""

    speech_params: SamplingParams | None
    voice: Voice | None
    speed: float
    phonemes: str | Sequence[str] | None
    language: str | None
    phonemizer: Callable[[str], str] | Literal["misaki"] | None
    seed: int | None
