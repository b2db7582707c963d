"""Input processing of Gemma 4 Unified: as Gemma 4, but a row is a whole square of patches, or a frame of samples."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.audio import AudioInfo, audio_kwargs, audio_samples
from ....processors.bases.tiles import positive_int_or
from ....processors.mel import MelSpec, read_mel_spec
from ..gemma4.processing import BudgetSpec, Gemma4ProcessingInfo


class _SamplesInfo(AudioInfo):
    """Audio of up to 30 s in frames of 40 ms, padded with silence; `input_features` are the samples of each frame."""

    placeholders = {"audio": Gemma4ProcessingInfo.placeholders["audio"]}

    def resolve_spec(self, modality: str) -> MelSpec:
        samples = positive_int_or(self.files.audio, "audio_samples_per_token", 640)
        self.check_config("audio_config", audio_embed_dim=samples)
        return read_mel_spec({**self.files.audio, "hop_length": samples}, MelSpec())

    def num_rows(self, frames: int) -> int:
        return frames

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        samples, hop = audio_samples(item), self.mel_spec.hop_length
        frames = F.pad(samples, (0, -len(samples) % hop)).view(-1, hop)
        return audio_kwargs(frames, len(frames), dtype), self.geometry(item.header)


class Gemma4UnifiedProcessingInfo(Gemma4ProcessingInfo):
    """ProcessingInfo of Gemma 4 Unified."""

    audio_info = _SamplesInfo
    text_config_defaults = {**Gemma4ProcessingInfo.text_config_defaults, "use_bidirectional_attention": "vision"}

    def read_by_model(self, spec: BudgetSpec) -> BudgetSpec:
        positions = positive_int_or(self.files.config.get("vision_config") or {}, "mm_posemb_size", 1120)
        if spec.rows > positions:  # a narrow image is one line of rows
            limit = f"the model has positions for {positions} rows in a line"
            raise ConfigError(f"<<param>> is {spec.rows}, but {limit}; give fewer", param="max_soft_tokens")
        return replace(spec, patch=spec.patch * spec.merge, merge=1)
