"""Audio beside images: a family's ProcessingInfo delegates it to an AudioInfo of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch

from ...mm.embeddings import EmbeddingSpec
from ...mm.media.policy import DecodeSpec
from ...mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .audio import AudioInfo
from .base import BaseProcessingInfo


class WithAudioInfo(BaseProcessingInfo):
    """Base of families that take audio beside images; among the bases of a family it is before the one for its images.

    A family that defines one of these methods itself calls `super()` for audio.

    `audio_info`: the class of `audio`.
    """

    audio_info: ClassVar[type[AudioInfo]]

    @cached_property
    def audio(self) -> AudioInfo:
        return self.audio_info(self.files)

    # The base that follows defines these three, which mypy does not know.
    def resolve_spec(self, modality: str) -> Any:
        return self.audio.mel_spec if modality == "audio" else super().resolve_spec(modality)  # type: ignore[safe-super]

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return self.audio.geometry(header) if header.modality == "audio" else super().geometry(header)  # type: ignore[safe-super]

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors of the AudioInfo, or those of the base for images."""
        is_audio = item.header.modality == "audio"
        return self.audio.process(item, dtype) if is_audio else super().process(item, dtype)  # type: ignore[safe-super]

    def resolve_decode_spec(self) -> DecodeSpec:
        spec = super().resolve_decode_spec()
        if "audio" not in self.modalities:
            return spec
        return replace(spec, rate=self.audio.decode_spec.rate, max_audio_samples=self.audio.decode_spec.max_audio_samples)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return self.audio.embeds_geometry(item) if item.modality == "audio" else super().embeds_geometry(item)

    def _embedding_spec(self, modality: str) -> EmbeddingSpec:
        spec = super()._embedding_spec(modality)
        return replace(spec, grid=None) if modality == "audio" else spec
