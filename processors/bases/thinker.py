"""Base of the Qwen Omni thinkers, which take images, videos and audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, ClassVar

from ...mm.languages import LANGUAGES
from ...mm.media.policy import DecodeSpec
from ...mm.positions import interleave_by_time
from ...mm.speech import SpeechRequest
from ...mm.types import ItemGeometry
from ..files import ProcessorFiles
from ..interface import Span, TokenRun
from .native import IMAGE_AND_VIDEO_KWARGS, NativeResolutionInfo
from .speech import SpeechMixin
from .with_audio import WithAudioInfo

_PIXEL_BOUNDS = ("size", "min_pixels", "max_pixels")
_USE_AUDIO = ("use_audio_in_video", "load_audio_from_video")  # two names of the same option


class ThinkerInfo(WithAudioInfo, NativeResolutionInfo, SpeechMixin):
    """A NativeResolutionInfo with audio beside images.

    The published processors ignore the video's pixel bounds in the JSON: they come from `patch_specs` or from the caller.
    With the option `use_audio_in_video` the audio of a video is interleaved with the video's rows by time, in chunks of
    `positions_per_chunk` temporal positions, and both replace the video's placeholder.

    `audio_text`: the text of an audio item in a prompt.
    """

    modalities = ("image", "video", "audio")
    valid_kwargs = {**IMAGE_AND_VIDEO_KWARGS, "video": (*IMAGE_AND_VIDEO_KWARGS["video"], *_USE_AUDIO), "audio": ()}
    audio_text: ClassVar[str]
    tasks = ("transcribe", "translate")
    default_positions_per_second: ClassVar[int] = 25

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        return replace(files, config=files.config.get("thinker_config") or files.config)

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        json = super().preprocessor_json(modality)
        return json if modality == "image" else {key: value for key, value in json.items() if key not in _PIXEL_BOUNDS}

    @property
    def positions_per_second(self) -> float:
        return float(self.files.config.get("position_id_per_seconds", self.default_positions_per_second))

    @property
    def positions_per_chunk(self) -> int:
        return 1

    def resolve_decode_spec(self) -> DecodeSpec:
        choices = [kwargs[name] for kwargs in self.processor_kwargs["video"] for name in _USE_AUDIO if name in kwargs]
        return replace(super().resolve_decode_spec(), use_audio_in_video=bool(choices) and choices[-1])

    def time_step(self, fps: float) -> float:
        return float(self.positions_per_second * self.specs["video"].temporal / fps)

    def spans(self, modality: str, geometries: Sequence[ItemGeometry]) -> Sequence[Span]:
        if modality != "video" or len(geometries) == 1:
            return super().spans(modality, geometries)
        video, audio = geometries
        start, end = self.config_token_id("audio_start_token_id", 151647), self.config_token_id("audio_end_token_id", 151648)

        @cache
        def row_runs() -> list[tuple[bool, int]]:
            """Return the rows in order, as (is video, length) of each run."""
            values, lengths = interleave_by_time(video, audio, self.positions_per_chunk).unique_consecutive(return_counts=True)
            return list(zip(values.tolist(), lengths.tolist(), strict=True))

        def runs(of_video: bool) -> list[TokenRun]:
            tokens = {True: (self.placeholder_ids["video"],), False: (self.placeholder_ids["audio"],)}
            rows = [TokenRun(tokens[is_video], length, is_video == of_video) for is_video, length in row_runs()]
            return [TokenRun((start,)), *rows, TokenRun((end,))]

        total = video.num_embeds + audio.num_embeds + 2
        first = Span(total, video.num_embeds, partial(runs, True))
        return first, Span(total, audio.num_embeds, partial(runs, False), modality="audio", shared=True)

    def options_key(self, modality: str) -> str:
        key = super().options_key(modality)
        return key + super().options_key("audio") if modality == "video" and self.decode_spec.use_audio_in_video else key

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None if modality == "audio" else super().shrink_kwargs(modality, grid, rows)

    def instruction(self, language: str | None, task: str) -> str:
        """Return the publisher's instruction. `language`: the English name of the language spoken, if it is known."""
        name = "" if language is None else f"{language} "
        if task == "translate":
            return f"Listen to the provided {name}speech and produce a translation in English text."
        return f"Transcribe the {name}audio into text."

    def system_turn(self, task: str) -> str:
        """Return the system turn of a task; none by default."""
        return ""

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        name = None if language is None else LANGUAGES[language].title()
        question = f"<|im_start|>user\n{self.audio_text}{self.instruction(name, task)}<|im_end|>\n"
        return SpeechRequest(f"{self.system_turn(task)}{question}<|im_start|>assistant\n")
