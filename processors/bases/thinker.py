"""Families that take pictures, clips and sounds together. Knows no family and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from ..mm.embeddings import EmbeddingSpec
from ..mm.errors import ConfigError
from ..mm.media.policy import DecodeSpec
from ..mm.positions import in_step
from ..mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .files import ProcessorFiles
from .interface import Span
from .native import OPTIONS, NativeInfo
from .sounds import SoundInfo

_AREAS = ("size", "min_pixels", "max_pixels")
_TOGETHER = ("use_audio_in_video", "load_audio_from_video")  # two names of the same


class ThinkerInfo(NativeInfo):
    """A NativeInfo whose sounds are made by another, and whose clips advance by `per_second` positions of time a second.

    The published processors read no area of a clip's frames from the JSON: `patches` says it, or the caller. With the option
    `use_audio_in_video` the sound of a clip lies among the clip's rows by time, the prompt's slot being that of the clip;
    `at_once`: positions of time whose rows of one kind lie side by side.
    """

    modalities = ("image", "video", "audio")
    known = {**OPTIONS, "video": (*OPTIONS["video"], *_TOGETHER), "audio": ()}
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

    @property
    def rate_of_time(self) -> float:
        """Positions a second."""
        return float(self.files.config.get("position_id_per_seconds", self.per_second))

    @property
    def at_once(self) -> int:
        return 1

    def decoding(self) -> DecodeSpec:
        given = [layer[name] for layer in self.layers["video"] for name in _TOGETHER if name in layer]
        if any(not isinstance(value, bool) for value in given):
            raise ConfigError(f"{_TOGETHER[0]} is {given[-1]!r}; give True or False")
        heard = self.sound.decoding()
        return replace(super().decoding(), rate=heard.rate, longest_sound=heard.longest_sound, sound=bool(given) and given[-1])

    def time_step(self, fps: float) -> float:
        return float(self.rate_of_time * self.specs["video"].temporal / fps)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return self.sound.geometry(header) if header.modality == "audio" else super().geometry(header)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return self.sound.rows_geometry(item) if item.modality == "audio" else super().rows_geometry(item)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """As a NativeInfo, and a SoundInfo."""
        return self.sound.process(item, dtype) if item.header.modality == "audio" else super().process(item, dtype)

    def spans(self, modality: str, geometries: Sequence[ItemGeometry]) -> Sequence[Span]:
        if modality != "video" or len(geometries) == 1:
            return super().spans(modality, geometries)
        clip, sound = geometries
        seen = in_step(clip, sound, self.at_once)
        rows = torch.where(seen, self.slot_ids["video"], self.slot_ids["audio"]).tolist()
        start, end = self.token("audio_start_token_id", 151647), self.token("audio_end_token_id", 151648)
        tokens, around = (start, *rows, end), (1, 1)
        first = Span(tokens, F.pad(seen, around))
        return first, Span(tokens, F.pad(~seen, around), modality="audio", shared=True)

    def options_key(self, modality: str) -> str:
        key = super().options_key(modality)
        return key + super().options_key("audio") if modality == "video" and self.decode_spec.sound else key

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return None if modality == "audio" else super().shrink_options(modality, grid, rows)

    def _row_spec(self, modality: str) -> EmbeddingSpec:
        spec = super()._row_spec(modality)
        return replace(spec, grid=None) if modality == "audio" else spec
