"""What Qwen2-VL and Qwen2.5-VL want to be fed: pictures and clips at their own size, as flat patches. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Self

import torch

from ..mm.embeddings import EmbeddingSpec
from ..mm.errors import ConfigError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.geometry import SamplingPolicy, patch_grid
from ..mm.media.policy import DecodeSpec
from ..mm.parse import MultiModalDataParser
from ..mm.types import EmbeddingItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from .files import ProcessorFiles
from .interface import Span
from .options import for_modality, with_sampling
from .patches import PatchSpec, patchify, read_spec, with_size

PIXELS = ("detail", "max_pixels", "min_pixels", "resample", "size")
OPTIONS = {"image": PIXELS, "video": (*PIXELS, "fps", "max_duration", "num_frames")}
IMAGE = PatchSpec()  # the published processors' own defaults
VIDEO = PatchSpec(min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768)
DEFAULT_FPS = 2.0  # frames used per second of a file, where the checkpoint does not say (qwen-vl-utils)
UNKNOWN_FPS = 24.0  # of bare frames


class Qwen2VLProcessingInfo:
    """ProcessingInfo of Qwen2-VL. One slot token becomes as many as the item has embeddings."""

    modalities: tuple[str, ...] = ("image", "video")
    prefill = "causal"

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        self._files, self._options = files, options
        clip = files.video or files.image  # checkpoints older than the second file use one for both
        image, video = read_spec(files.image, IMAGE), read_spec(clip, VIDEO)
        sampling = _sampling(clip, video.temporal)
        for layer in options:
            image = with_size(image, for_modality(layer, "image", OPTIONS))
            chosen = for_modality(layer, "video", OPTIONS)
            video, sampling = with_size(video, chosen), with_sampling(sampling, chosen)
        self.specs = {"image": image, "video": video}
        self.decode_spec = DecodeSpec(sampling)
        self.slot_ids: Mapping[str, int] = _slot_ids(files.config)
        self.vision: Mapping[str, Any] = files.config.get("vision_config", {})
        self._check_tower()

    def parser(self) -> MultiModalDataParser:
        """Pictures and clips in any form, and rows with their grids, as wide as the decoder."""
        width = (self._files.config.get("text_config") or self._files.config).get("hidden_size", 0)
        specs = {name: EmbeddingSpec(width, f"{name}_embeds", f"{name}_grid_thw", self._merge(name)) for name in self.specs}
        return MultiModalDataParser(self.modalities, embeddings=specs)

    def tuned(self, options: Mapping[str, Any]) -> Self:
        return type(self)(self._files, *self._options, options)

    def time_step(self, fps: float) -> float:
        """Positions per temporal grid step of a clip of which `fps` frames per second are used."""
        return 1.0

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Grid from the header alone; InputError for sides that differ by more than 200:1."""
        spec = self.specs[header.modality]
        if header.frames is None:
            return patch_grid(header.size, spec.policy(), spec.merge)
        frames = len(header.frames.indices)
        time_step = self.time_step(header.frames.fps or UNKNOWN_FPS)
        return patch_grid(header.size, spec.policy(frames), spec.merge, frames, spec.temporal, time_step)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        t, h, w = item.tensors["grid"].tolist()
        fps = self.decode_spec.sampling.fps or UNKNOWN_FPS
        return ItemGeometry(t, h, w, self._merge(item.modality), self.time_step(fps) if item.modality == "video" else 1.0)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`pixel_values` `[patches, 3 * temporal * patch^2]` and its grid, `_videos` for clips."""
        if isinstance(item, ImageItem):
            modality, frames, names = "image", item.pixels[None], ("pixel_values", "image_grid_thw")
        elif isinstance(item, VideoItem):
            modality, frames, names = "video", item.frames, ("pixel_values_videos", "video_grid_thw")
        else:
            raise TypeError(f"a {type(item).__name__} is neither picture nor clip")
        grid = self.geometry(item.header)
        patches = FieldElem(patchify(frames, grid, self.specs[modality], dtype), FlatField())
        shape = FieldElem(torch.tensor([grid.t, grid.h, grid.w]), BatchedField(keep_on_cpu=True))
        return {names[0]: patches, names[1]: shape}, grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Only embeddings: the slot's token, once per embedding."""
        return Span((self.slot_ids[modality],) * geometry.num_embeds)

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Fewer pixels a frame and, where less than 16 rows a temporal patch would be left, fewer frames."""
        spec, steps = self.specs[modality], max(1, min(grid[0], rows // 16))
        area = max(1, rows // steps) * (spec.patch * spec.merge) ** 2
        frames = {"num_frames": steps * spec.temporal} if steps < grid[0] else {}
        return {"min_pixels": 1, "max_pixels": area, **frames}

    def options_key(self, modality: str) -> str:
        """The resolved patch spec and, for clips, which frames are used."""
        sampling = asdict(self.decode_spec.sampling) if modality == "video" else None
        return json.dumps([asdict(self.specs[modality]), sampling], sort_keys=True)

    def _merge(self, modality: str) -> int:
        return self.specs[modality].merge

    def _check_tower(self) -> None:
        for name, spec in self.specs.items():
            for key, have in (
                ("patch_size", spec.patch),
                ("spatial_merge_size", spec.merge),
                ("temporal_patch_size", spec.temporal),
            ):
                if self.vision.get(key, have) != have:
                    said = f"{key} is {self.vision[key]} in config.json"
                    raise ConfigError(f"{said}, but the {name} preprocessor JSON says {have}, or is missing and means it")


class Qwen25VLProcessingInfo(Qwen2VLProcessingInfo):
    """ProcessingInfo of Qwen2.5-VL: a clip's temporal positions follow its seconds."""

    def time_step(self, fps: float) -> float:
        """`tokens_per_second` times the seconds that one temporal patch covers."""
        per_second: float = self.vision.get("tokens_per_second", 4)
        return per_second * self.specs["video"].temporal / fps


def _slot_ids(config: Mapping[str, Any]) -> dict[str, int]:
    """ConfigError for a media token that the vocabulary does not have."""
    ids = {"image": config.get("image_token_id", 151655), "video": config.get("video_token_id", 151656)}
    vocabulary = (config.get("text_config") or config).get("vocab_size")
    for name, token in ids.items():
        if vocabulary is not None and not 0 <= token < vocabulary:
            raise ConfigError(f"{name}_token_id {token} in config.json is outside the vocabulary of {vocabulary}")
    return ids


def _sampling(clip: Mapping[str, Any], multiple: int) -> SamplingPolicy:
    """The checkpoint's own fps or num_frames, else 2 frames per second."""
    least, most = clip.get("min_frames", 4), clip.get("max_frames", 768)
    policy = SamplingPolicy(fps=DEFAULT_FPS, min_frames=least, max_frames=most, multiple=multiple)
    return with_sampling(policy, {key: clip.get(key) for key in ("fps", "num_frames")})
