"""Input processing of Gemma 4: images and frames at their own aspect ratio within a number of rows, audio of up to 30 s."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ....callers.errors import ConfigError, InputError
from ....mm.geometry import FrameSampling
from ....mm.languages import LANGUAGES
from ....mm.rules import PromptAttention, Rule
from ....mm.speech import SpeechRequest
from ....mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.attention_rules import item_runs
from ....processors.bases.audio import AudioInfo, audio_kwargs, audio_samples
from ....processors.bases.native import NativeResolutionInfo
from ....processors.bases.speech import SpeechMixin
from ....processors.bases.with_audio import WithAudioInfo
from ....processors.files import ProcessorFiles
from ....processors.images import apply_resample, read_pixel_spec
from ....processors.interface import Span
from ....processors.options import TIME_KWARGS, is_low_detail
from ....processors.patches import PatchSpec
from ....processors.spans import Piece, build_span
from ....processors.usm_mel import UsmMelSpec, read_usm_mel_spec, usm_log_mel

BUDGETS = (70, 140, 280, 560, 1120)
"""The published limits on the rows of an image, of which `max_soft_tokens` selects one."""
BIDIRECTIONAL_WINDOWS = PromptAttention("bidirectional_windows", Rule.of(item_runs, "audio"), windows_only=True)


@dataclass(frozen=True)
class BudgetSpec(PatchSpec):
    """Patches of an item that is resized to as many squares of patches as fit its aspect ratio, at most `rows`."""

    rows: int = 280

    def grid(self, size: tuple[int, int], frames: int = 1) -> ItemGeometry:
        """Return the grid of an item of `size` (height, width); InputError if it has no pixels."""
        if min(size) < 1:
            raise InputError(f"an image of {size[1]}x{size[0]} has no pixels")
        unit = self.patch * self.merge
        factor = math.sqrt(self.rows * unit**2 / (size[0] * size[1]))
        tall, wide = (math.floor(factor * side / unit) for side in size)
        if not tall:
            tall, wide = 1, min(size[1] // size[0], self.rows)
        elif not wide:
            tall, wide = min(size[0] // size[1], self.rows), 1
        return ItemGeometry(frames, tall * self.merge, wide * self.merge, self.merge)


_TRANSCRIPTION = (
    "Follow these specific instructions for formatting the answer:\n"
    "* Only output the transcription, with no newlines.\n"
    "* When transcribing numbers, write the digits, i.e. write 1.7 and not one point seven, and write 3 instead of three."
)
"""The second part of the prompt that the publisher recommends."""
_IMAGE_KWARGS = ("detail", "max_soft_tokens", "resample")
_ENCODERS = {"image": "vision_config", "video": "vision_config", "audio": "audio_config"}


class _Gemma4AudioInfo(AudioInfo):
    """Audio of up to 30 s, four frames per row."""

    placeholders = {"audio": ("audio_token_id", 258881)}
    mel_defaults = UsmMelSpec()

    def resolve_spec(self, modality: str) -> UsmMelSpec:
        return read_usm_mel_spec(self.files.audio, UsmMelSpec())

    def num_rows(self, frames: int) -> int:
        """Return the rows of `frames` frames without the last one, which would reach beyond the audio."""
        return -(-(frames - 1) // 4)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        features = usm_log_mel(audio_samples(item), self.specs["audio"])
        return audio_kwargs(features, len(features), dtype), self.geometry(item.header)


class Gemma4ProcessingInfo(WithAudioInfo, NativeResolutionInfo, SpeechMixin):
    """ProcessingInfo of Gemma 4. Start and end tokens are around the rows of an item, or of each frame of a video."""

    modalities: tuple[str, ...] = ("image", "video", "audio")
    plain_tokens = ("<|video|>",)
    placeholders = {
        "image": ("image_token_id", 258880),
        "video": ("video_token_id", 258884),
        **_Gemma4AudioInfo.placeholders,
    }
    valid_kwargs = {"image": _IMAGE_KWARGS, "video": (*_IMAGE_KWARGS, *TIME_KWARGS, "fps", "num_frames"), "audio": ()}
    audio_info: ClassVar[type[AudioInfo]] = _Gemma4AudioInfo
    language_codes = tuple(LANGUAGES)
    frame_sampling = FrameSampling(num_frames=32)
    timestamp_position = 0.0
    text_config_defaults = {"vocab_size": 262144, "hidden_size": 2304}

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        self.modalities = tuple(name for name in self.modalities if files.config.get(_ENCODERS[name]) is not None)
        return files

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        return {name: self.placeholders[name] for name in self.modalities}

    def resolve_token_ids(self) -> None:
        image = self.config_token_id("boi_token_id", 255999), self.config_token_id("eoi_token_id", 258882)
        audio = self.config_token_id("boa_token_id", 256000), self.config_token_id("eoa_token_index", 258883)
        if self.text_config.get("use_bidirectional_attention") == "vision":
            self.prompt_attention = BIDIRECTIONAL_WINDOWS
        self.edges = {"image": image, "video": image, "audio": audio}

    def resolve_spec(self, modality: str) -> Any:
        if modality == "audio":
            return super().resolve_spec(modality)
        json, options = self.preprocessor_json(modality), self.merged_kwargs[modality]
        patch, merge = json.get("patch_size", 16), json.get("pooling_kernel_size", 3)
        spec = BudgetSpec(patch=patch, merge=merge, temporal=1, mean=(0.0,) * 3, std=(1.0,) * 3)
        spec = apply_resample(read_pixel_spec({"do_normalize": False, **json}, spec, {}), options)
        rows = json.get("max_soft_tokens", 70 if modality == "video" else 280)
        rows = BUDGETS[0] if is_low_detail(options) else options.get("max_soft_tokens", rows)
        if rows not in BUDGETS:
            raise ConfigError(f"<<param>> is {rows!r}; known are {', '.join(map(str, BUDGETS))}", param="max_soft_tokens")
        self.check_config("vision_config", patch_size=spec.patch, pooling_kernel_size=spec.merge)
        return self.read_by_model(replace(spec, rows=rows))

    def read_by_model(self, spec: BudgetSpec) -> BudgetSpec:
        """Hook: return the spec of what the model reads. The published model turns pixels of 0..1 into -1..1."""
        mean = tuple(m + 0.5 * s for m, s in zip(spec.mean, spec.std, strict=True))
        return replace(spec, mean=mean, std=tuple(0.5 * s for s in spec.std))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        if header.modality == "audio":
            return super().geometry(header)
        spec: BudgetSpec = self.specs[header.modality]
        if header.frames is None:
            return spec.grid(header.size)
        grid = spec.grid(header.size, len(header.frames.indices))
        return replace(grid, times=self._times(header.frames.timestamps, 1))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows between a start and an end token; for a video those of each frame, after its time."""
        start, end = self.edges[modality]
        pieces: list[Piece] = []
        for number, seconds in enumerate(geometry.times):
            time = f"{' ' * (number > 0)}{int(seconds // 60):02d}:{int(seconds % 60):02d} "
            pieces += [(*self.encode(time), start), geometry.num_embeds // geometry.t, (end,)]
        return build_span(pieces or [(start,), geometry.num_embeds, (end,)], self.placeholder_ids[modality])

    def transcription_request(self, language: str | None, task: str, timestamps: bool, context: str) -> SpeechRequest:
        """Return the prompt that the publisher recommends."""
        name = "its original language" if language is None else LANGUAGES[language].title()
        spoken = name if language is None else f"{name} into {name} text"
        text = f"Transcribe the following speech segment in {spoken}.\n\n{_TRANSCRIPTION}"
        return SpeechRequest(f"<|turn>user\n{text}<|audio|><turn|>\n<|turn>model\n")

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer rows per image or frame and, if not even the fewest fit, for fewer frames."""
        fitting = [budget for budget in BUDGETS if budget <= rows // grid[0]]
        if modality == "audio" or rows < BUDGETS[0]:
            return None
        return (
            {"max_soft_tokens": fitting[-1]} if fitting else {"max_soft_tokens": BUDGETS[0], "num_frames": rows // BUDGETS[0]}
        )
