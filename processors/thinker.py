"""Families that take pictures, clips and sounds together. Knows no family and no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ..mm.embeddings import EmbeddingSpec
from ..mm.media.policy import DecodeSpec
from ..mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .files import ProcessorFiles
from .native import OPTIONS, NativeInfo
from .sounds import SoundInfo

_AREAS = ("size", "min_pixels", "max_pixels")


class ThinkerInfo(NativeInfo):
    """A NativeInfo whose sounds are made by another, and whose clips advance by `per_second` positions of time a second.

    The published processors read no area of a clip's frames from the JSON: `patches` says it, or the caller.
    """

    modalities = ("image", "video", "audio")
    known = {**OPTIONS, "audio": ()}
    sounds: ClassVar[type[SoundInfo]]
    per_second: ClassVar[int]

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        files = replace(files, config=files.config.get("thinker_config") or files.config)
        self.sound = self.sounds(files)
        super().__init__(files, *options)

    def read(self, modality: str) -> Any:
        return self.sound.window if modality == "audio" else super().read(modality)

    def json(self, modality: str) -> Mapping[str, Any]:
        json = super().json(modality)
        return json if modality == "image" else {key: value for key, value in json.items() if key not in _AREAS}

    def decoding(self) -> DecodeSpec:
        return replace(super().decoding(), rate=self.sound.window.rate)

    def time_step(self, fps: float) -> float:
        per_second = self.files.config.get("position_id_per_seconds", self.per_second)
        return float(per_second * self.specs["video"].temporal / fps)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return self.sound.geometry(header) if header.modality == "audio" else super().geometry(header)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return self.sound.rows_geometry(item) if item.modality == "audio" else super().rows_geometry(item)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """As a NativeInfo, and a SoundInfo."""
        return self.sound.process(item, dtype) if item.header.modality == "audio" else super().process(item, dtype)

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None if modality == "audio" else super().shrink_options(modality, grid, rows)

    def _row_spec(self, modality: str) -> EmbeddingSpec:
        spec = super()._row_spec(modality)
        return replace(spec, grid=None) if modality == "audio" else spec
