"""What LLaVA 1.5, LLaVA-NeXT (Granite Vision with it) and LLaVA-OneVision want to be fed. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ..mm.anyres import FEW_SIZES, MANY_SIZES, POOL, WHOLE, Lines, lines
from ..mm.errors import ConfigError
from ..mm.fields import BatchedField, FieldElem
from ..mm.geometry import SamplingPolicy
from ..mm.media.policy import DecodeSpec
from ..mm.tiling import Centre, Fixed, Pinpoints
from ..mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from .pictures import CLIP_MEAN, CLIP_STD, read_pixels, with_resample
from .tiles import DETAIL, TiledInfo, TileSpec, is_low, pair

FRAMES = 32  # of a clip, where the caller says nothing
_CLIP = "clip_vision_model"


@dataclass(frozen=True)
class LlavaSpec(TileSpec):
    """`most`: tiles' worth of rows beyond which what is left of a picture is pooled, None: never.

    `rate`: a tile makes so many rows for so many patches, along each side. `class_row`: the tower's class token is one, too.
    """

    most: int | None = None
    rate: tuple[int, int] = (1, 1)
    class_row: bool = False

    @property
    def side(self) -> int:
        """Rows along a tile's side."""
        patches = self.tiling.plan(1, 1).views[0].piece[0] // self.patch
        return patches * self.rate[0] // self.rate[1]


class LlavaProcessingInfo(TiledInfo):
    """ProcessingInfo of LLaVA 1.5: one square from the middle of each picture."""

    modalities: tuple[str, ...] = ("image",)
    slots = {"image": ("image_token_id", "image_token_index", 32000)}
    known = {"image": DETAIL}
    vision: ClassVar[Mapping[str, Any]] = {"model_type": _CLIP, "image_size": 336, "patch_size": 14}
    strategy: ClassVar[str] = "default"

    def read(self, modality: str) -> LlavaSpec:
        json = self.files.image if modality == "image" else self.files.video or self.files.image
        vision = {**self.vision, **(self.files.config.get("vision_config") or {})}
        chosen, is_clip = self.files.config.get("vision_feature_select_strategy", self.strategy), vision["model_type"] == _CLIP
        if chosen == "default" and not is_clip:
            raise ConfigError(
                'vision_feature_select_strategy "default" drops a class token, which this tower has not; use "full"'
            )
        tiling = self.tiling(json, modality)
        tile = tiling.plan(1, 1).views[0].piece
        if tile != pair(vision["image_size"]):
            raise ConfigError(f"image_size in vision_config is {vision['image_size']}, but pictures are made {tile}")
        default = LlavaSpec(CLIP_MEAN, CLIP_STD, tiling=tiling, patch=pair(vision["patch_size"])[0])
        spec = read_pixels(json, replace(default, class_row=is_clip and chosen == "full"))
        for layer in self.layers[modality]:
            spec = with_resample(spec, layer)
        return spec

    def tiling(self, json: Mapping[str, Any], modality: str) -> Centre | Fixed | Pinpoints:
        """How pictures are cut."""
        size = json.get("size", {"shortest_edge": 224})
        crop = json.get("crop_size", 224) if json.get("do_center_crop", True) else None
        if json.get("do_pad"):
            raise ConfigError("do_pad in the preprocessor JSON is not supported: pictures are cropped, not padded, to a square")
        if crop is None or (isinstance(size, Mapping) and "height" in size):
            return Fixed(pair(size))
        return Centre(pair(size)[0], pair(crop))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return replace(super().geometry(header), extra=int(self.specs["image"].class_row))


class LlavaNextProcessingInfo(LlavaProcessingInfo):
    """ProcessingInfo of LLaVA-NeXT: the whole picture, then its tiles without their margins, a row at the end of each line.

    `lines` int64 `[6]`: tiles, patches kept of them, and the size they are pooled to, along height and width.
    """

    pinpoints: ClassVar[tuple[tuple[int, int], ...]] = FEW_SIZES

    def tiling(self, json: Mapping[str, Any], modality: str) -> Centre | Fixed | Pinpoints:
        base = pair(json.get("size") or self.vision["image_size"])
        crop = json.get("crop_size") if json.get("do_center_crop", True) else None
        if pair(crop or base) != base:
            raise ConfigError(f"size {base} and crop_size {crop} in the preprocessor JSON differ; tiles have one size")
        if modality == "video" or any(is_low(layer) for layer in self.layers[modality]):
            return Fixed(base)
        sizes = json.get("image_grid_pinpoints") or self.files.config.get("image_grid_pinpoints") or self.pinpoints
        return Pinpoints(base, base, tuple(pair(size, "image_grid_pinpoints") for size in sizes))

    def read(self, modality: str) -> LlavaSpec:
        spec = super().read(modality)
        if spec.class_row:
            raise ConfigError('vision_feature_select_strategy "full" keeps a class token, for which tiles have no place')
        return spec

    def lines(self, header: MediaHeader) -> Lines:
        """What is kept of a picture's tiles."""
        spec = self.specs["image"]
        return lines(*header.size, spec.tiling, spec.side, spec.most) if isinstance(spec.tiling, Pinpoints) else WHOLE

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        rows = self.specs["image"].side ** 2 + self.lines(header).rows
        return replace(grid, extra=rows - grid.num_embeds)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        kwargs, grid = super().process(item, dtype)
        if item.header.modality != "image":
            return kwargs, grid
        one = self.lines(item.header)
        made = torch.tensor((*one.tiles, *one.kept, *one.size))
        return {**kwargs, "lines": FieldElem(made, BatchedField(keep_on_cpu=True))}, grid

    def fewer(self, pieces: int) -> Mapping[str, Any] | None:
        return {"detail": "low"}


class LlavaOnevisionProcessingInfo(LlavaNextProcessingInfo):
    """ProcessingInfo of LLaVA-OneVision: many tiles are pooled; of clips each frame is pooled, and one row ends them all."""

    modalities = ("image", "video")
    slots = {
        "image": ("image_token_id", "image_token_index", 151646),
        "video": ("video_token_id", "video_token_index", 151647),
    }
    known = {"image": DETAIL, "video": ("fps", "max_duration", "num_frames", "resample")}
    vision = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    strategy = "full"
    pinpoints = MANY_SIZES

    def read(self, modality: str) -> LlavaSpec:
        name = str(self.files.config.get("vision_aspect_ratio", "anyres_max_9"))
        most = name.removeprefix("anyres_max_")
        if not most.isdecimal():
            raise ConfigError(f"vision_aspect_ratio is {name!r}; known is anyres_max_ with a number behind it")
        return replace(super().read(modality), most=int(most))

    def decoding(self) -> DecodeSpec:
        policy = self.sampling("video", SamplingPolicy(spread="ends"))
        asked = policy.fps is not None or policy.num_frames is not None
        return DecodeSpec(policy if asked else replace(policy, max_frames=FRAMES))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        if header.modality == "image":
            return super().geometry(header)
        grid = TiledInfo.geometry(self, header)
        return replace(grid, extra=grid.t * self.pooled + 1 - grid.num_embeds)

    @property
    def pooled(self) -> int:
        """Rows of a frame."""
        rows: int = math.ceil(self.specs["video"].side / POOL) ** 2
        return rows

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        if modality == "image":
            return super().shrink_options(modality, grid, rows)
        frames = (rows - 1) // self.pooled
        return {"num_frames": frames} if frames > 0 and grid[0] > 1 else None
