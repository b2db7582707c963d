"""Base of families that cut images into tiles of one size, and feed each tile as patches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from ...callers.errors import ConfigError, InputError
from ...kernels.pixels.layout import PatchLayout
from ...mm.embeddings import ROWS
from ...mm.fields import BatchedField, FieldElem, FlatField
from ...mm.geometry import MAX_ITEM_ROWS
from ...mm.tiling.aspect import AspectTiles
from ...mm.tiling.canvas import AnyResTiles
from ...mm.tiling.longest import KeptQuarters
from ...mm.tiling.plan import CropPlan, TilingPolicy
from ...mm.tiling.sizes import whole_multiples
from ...mm.tiling.slices import CoveringTiles
from ...mm.tiling.whole import CenterCrop, FixedSize, KeptSize, PaddedSquare, Successive
from ...mm.types import EmbeddingItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from ..images import PixelSpec, patchify_crops
from .base import BaseProcessingInfo

_ONE_TILE = FixedSize((224, 224))
_RESIZED_ANYWAY = (AnyResTiles, AspectTiles, CoveringTiles)  # policies of families that ignore do_resize
TILE_KWARGS = ("detail", "resample")  # options that every such family takes


@dataclass(frozen=True)
class TileSpec(PixelSpec):
    """Parameters for cutting images into tiles, and tiles into patches of `patch` pixels a side; merge x merge make a row.

    `keeps_size`: images are not resized, so they must have the size of a tile, or become such a square by padding.
    """

    tiling: TilingPolicy = _ONE_TILE
    patch: int = 14
    merge: int = 1
    keeps_size: bool = False

    def unresized(self) -> Self:
        """Return the spec for images that keep their size. Policies that choose a grid of tiles resize them anyway."""
        if isinstance(self.tiling, CenterCrop):
            return replace(self, tiling=replace(self.tiling, shortest=None))
        if isinstance(self.tiling, FixedSize | PaddedSquare) and self.tiling is not _ONE_TILE:
            return replace(self, keeps_size=True)
        if isinstance(self.tiling, Successive) and isinstance(self.tiling.policies[0], PaddedSquare):
            return replace(self, tiling=Successive((replace(self.tiling.policies[0], size=None), *self.tiling.policies[1:])))
        return self if isinstance(self.tiling, _RESIZED_ANYWAY) else super().unresized()

    def __post_init__(self) -> None:
        if isinstance(self.tiling, KeptQuarters | KeptSize):
            return
        if any(side < self.patch * self.merge for side in self.tiling.plan(2, 2).views[0].tile_size):
            raise ConfigError(
                f"a tile of this model is smaller than {self.merge} x {self.merge} patches of {self.patch} pixels"
            )


def height_width(value: Any, name: str = "size") -> tuple[int, int]:
    """Read `(height, width)` from 448, [448, 448] or {"height": 448, "width": 448}; otherwise ConfigError."""
    if isinstance(value, Mapping):
        edge = value.get("shortest_edge", value.get("longest_edge"))
        value = (value.get("height", edge), value.get("width", edge))
    sides = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
        raise ConfigError(f"{name} is {value!r}; give a height and a width in pixels")
    return sides[0], sides[1]


def positive_int_or(options: Mapping[str, Any], name: str, default: int, limit: int = 1 << 48) -> int:
    """Return `options[name]`, or the default; ConfigError unless it is a positive integer of at most `limit`."""
    value = default if options.get(name) is None else options[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; give a positive integer")
    if value > limit:
        raise ConfigError(f"{name} is {value:,}, the limit is {limit:,}; give less")
    return value


class TiledInfo(BaseProcessingInfo):
    """Base of tiling families: each tile of an image, and each frame of a video, is a temporal step. `specs` are TileSpecs.

    The tensors are `pixel_values` `[patches, 3 * patch^2]`, tile by tile and within a tile row by row of merged patches, and
    `grid` (tiles, h, w) in patches.
    """

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid, from the header alone; InputError for more than MAX_ITEM_ROWS rows."""
        spec, plan = self.specs[header.modality], self.plan(header)
        tall, wide = (side // (spec.patch * spec.merge) * spec.merge for side in plan.views[0].tile_size)
        frames = 1 if header.frames is None else len(header.frames.indices)
        times = () if header.frames is None else header.frames.timestamps
        grid = ItemGeometry(frames * plan.num_tiles, tall, wide, spec.merge, times=times, tiles=plan.tiles)
        if grid.num_embeds > MAX_ITEM_ROWS:
            raise InputError(f"it makes {grid.num_embeds:,} rows, the limit is {MAX_ITEM_ROWS:,}; use fewer frames or pixels")
        return grid

    def kept_size(self, modality: str, size: tuple[int, int]) -> tuple[int, int]:
        spec = self.specs[modality]
        if isinstance(spec.tiling, KeptSize):
            return whole_multiples(size, spec.tiling.patch * spec.tiling.merge)
        tile: tuple[int, int] = spec.tiling.plan(*size).views[0].tile_size if spec.keeps_size else size
        return tile if tile[0] <= size[0] and tile[1] <= size[1] else size

    def plan(self, header: MediaHeader) -> CropPlan:
        """Return the crop plan of the image, or of each frame of the video."""
        spec = self.specs[header.modality]
        plan: CropPlan = spec.tiling.plan(*header.size)
        tall, wide = plan.views[0].tile_size
        is_padded = isinstance(spec.tiling, PaddedSquare)
        if spec.keeps_size and ((max(header.size),) * 2 if is_padded else header.size) != (tall, wide):
            size, needed = f"{header.size[1]}x{header.size[0]}", f"a longer side of {tall}" if is_padded else f"{wide}x{tall}"
            raise InputError(
                f"this model does not resize images (do_resize=false); give {needed} pixels, not {size}", code="unsupported"
            )
        return plan

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors that the class describes."""
        if not isinstance(item, ImageItem | VideoItem):
            raise TypeError(f"a {type(item).__name__} is neither an image nor a video")
        header = item.header
        grid, spec = self.geometry(header), self.specs[header.modality]
        frames = item.pixels[None] if isinstance(item, ImageItem) else item.frames
        patches = patchify_crops(frames, self.plan(header), spec, PatchLayout(spec.patch, spec.merge), dtype)
        shape = torch.tensor([grid.t, grid.h, grid.w])
        kwargs = {"pixel_values": FieldElem(patches, FlatField()), "grid": FieldElem(shape, BatchedField(keep_on_cpu=True))}
        return kwargs, grid

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer frames, or for fewer tiles (`max_tiles_kwargs`); None if a single one is too large."""
        per_tile = grid[1] * grid[2] // self.specs[modality].merge ** 2
        tiles = rows // per_tile
        if tiles < 1 or grid[0] == 1:
            return None
        return {"num_frames": tiles} if modality == "video" else self.max_tiles_kwargs(tiles)

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        """Return options that cut an image into at most this many tiles; None if there are none."""
        return None


class ResampledInfo(TiledInfo):
    """Base of families with views of different sizes, each of which a resampler turns into `latents` rows.

    The tensors are `pixel_values` `[patches, 3 * patch^2]`, row by row, and `grids` int64 `[views, 3]`: (1, h, w) of each.
    """

    @property
    @abstractmethod
    def latents(self) -> int:
        """Rows of each view."""

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        plan = self.plan(header)
        return ItemGeometry(plan.num_tiles, 1, self.latents, tiles=plan.tiles)

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        rows = len(item.tensors[ROWS])
        images, left = divmod(rows, self.latents)
        if left or not images:
            raise InputError(f"{rows} rows are not a multiple of the {self.latents} rows of one image")
        return ItemGeometry(images, 1, self.latents)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        assert isinstance(item, ImageItem)
        spec, plan = self.specs["image"], self.plan(item.header)
        views = [
            patchify_crops(item.pixels[None], CropPlan((tile,)), spec, PatchLayout(spec.patch), dtype) for tile in plan.views
        ]
        grids = torch.tensor([[1, *(side // spec.patch for side in view.tile_size)] for view in plan.views])
        kwargs = {
            "pixel_values": FieldElem(torch.cat(views), FlatField()),
            "grids": FieldElem(grids, BatchedField(keep_on_cpu=True)),
        }
        return kwargs, self.geometry(item.header)
