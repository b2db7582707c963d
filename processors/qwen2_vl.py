"""What Qwen2-VL and Qwen2.5-VL want to be fed: pictures and clips at their own size, as flat patches. Knows no model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from torch import tensor

from ..mm.errors import ConfigError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.geometry import SamplingPolicy, patch_grid
from ..mm.types import ImageItem, ItemGeometry, MediaItem, MultiModalKwargsItem
from .interface import Span
from .options import for_modality
from .patches import PatchSpec, patchify, read_spec, with_size

OPTIONS = ("fps", "max_pixels", "min_pixels", "num_frames", "size")
IMAGE = PatchSpec()  # the published processors' own defaults
VIDEO = PatchSpec(min_pixels=128 * 28 * 28, max_pixels=28 * 28 * 768)
DEFAULT_FPS = 2.0  # frames used per second of a file, where the checkpoint does not say (qwen-vl-utils)
UNKNOWN_FPS = 24.0  # of bare frames


class Qwen2VLProcessingInfo:
    """ProcessingInfo of Qwen2-VL. One slot token becomes as many as the item has embeddings."""

    modalities: tuple[str, ...] = ("image", "video")
    prefill = "causal"

    def __init__(
        self,
        config: Mapping[str, Any],
        preprocessor: Mapping[str, Any],
        video_preprocessor: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        clip = video_preprocessor or preprocessor  # checkpoints older than the second file use one for both
        chosen = {name: for_modality(options, name, OPTIONS) for name in self.modalities}
        self.specs = {
            "image": with_size(read_spec(preprocessor, IMAGE), chosen["image"]),
            "video": with_size(read_spec(clip, VIDEO), chosen["video"]),
        }
        self.slot_ids: Mapping[str, int] = _slot_ids(config)
        self._sampling = _sampling(clip, chosen["video"], self.specs["video"].temporal)
        self.vision: Mapping[str, Any] = config.get("vision_config", {})
        self._check_tower()

    def sampling(self) -> Mapping[str, Any]:
        """Arguments of SamplingPolicy."""
        return asdict(self._sampling)

    def time_step(self, fps: float) -> float:
        """Positions per temporal grid step of a clip of which `fps` frames per second are used."""
        return 1.0

    def geometry(self, modality: str, size: tuple[int, int], frames: int = 1, fps: float = 0.0) -> ItemGeometry:
        """Grid from the header alone; InputError for sides that differ by more than 200:1."""
        spec = self.specs[modality]
        time_step = self.time_step(fps or UNKNOWN_FPS) if modality == "video" else 1.0
        return patch_grid(size, spec.policy(frames), spec.merge, frames, spec.temporal, time_step)

    def process(self, item: MediaItem) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`pixel_values` float32 `[patches, 3 * temporal * patch^2]` and its grid, `_videos` for clips."""
        if isinstance(item, ImageItem):
            grid, frames, names = self.geometry("image", item.size), item.pixels[None], ("pixel_values", "image_grid_thw")
            spec = self.specs["image"]
        else:
            frames, names = item.frames, ("pixel_values_videos", "video_grid_thw")
            grid, spec = self.geometry("video", item.size, len(frames), item.fps), self.specs["video"]
        patches = FieldElem(patchify(frames, grid, spec), FlatField())
        shape = FieldElem(tensor([grid.t, grid.h, grid.w]), BatchedField(keep_on_cpu=True))
        return {names[0]: patches, names[1]: shape}, grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Only embeddings: the slot's token, once per embedding."""
        return Span((self.slot_ids[modality],) * geometry.num_embeds)

    def options_key(self, modality: str) -> str:
        """The resolved patch spec and, for clips, nothing of the sampling: that is in the item's own hash."""
        return json.dumps(asdict(self.specs[modality]), sort_keys=True)

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


def _sampling(clip: Mapping[str, Any], options: Mapping[str, Any], multiple: int) -> SamplingPolicy:
    """The caller's fps or num_frames, else the checkpoint's, else 2 frames per second."""
    policy = SamplingPolicy(min_frames=clip.get("min_frames", 4), max_frames=clip.get("max_frames", 768), multiple=multiple)
    sources: tuple[Mapping[str, Any], ...] = (options, clip, {"fps": DEFAULT_FPS})
    for source in sources:
        fps, num_frames = source.get("fps"), source.get("num_frames")
        if fps is not None and num_frames is not None:
            raise ConfigError("fps and num_frames exclude each other; give one of them")
        if fps is not None and not (isinstance(fps, int | float) and fps > 0):
            raise ConfigError(f"fps is {fps!r}; give a positive number")
        if num_frames is not None and not (isinstance(num_frames, int) and (num_frames > 0 or num_frames == -1)):
            raise ConfigError(f"num_frames is {num_frames!r}; give a positive integer, or -1 for all frames")
        if fps is not None or num_frames is not None:
            return replace(policy, fps=fps, num_frames=num_frames)
    return policy
