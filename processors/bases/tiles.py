"""Families whose pictures are seen in pieces of one size each: cut by a plan, fed as patches. Knows no family and no model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..mm.errors import ConfigError, InputError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.geometry import MOST_ROWS
from ..mm.tiling import CropPlan, Fixed, Tiling
from ..mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from .base import FamilyInfo
from .pictures import PixelSpec, patch_rows

_WHOLE = Fixed((224, 224))
MOST_PIECES = 4096  # of a picture: their arrangements are tried one by one
DETAIL = ("detail", "resample")  # options that every such family takes


@dataclass(frozen=True)
class TileSpec(PixelSpec):
    """How pictures of one modality are cut, into patches of `patch` pixels a side, of which merge x merge become one row."""

    tiling: Tiling = _WHOLE
    patch: int = 14
    merge: int = 1

    def __post_init__(self) -> None:
        if any(side < self.patch * self.merge for side in self.tiling.plan(1, 1).views[0].piece):
            raise ConfigError(f"a tile of this model holds no {self.merge} x {self.merge} patches of {self.patch} pixels")


def pair(value: Any, name: str = "size") -> tuple[int, int]:
    """`(height, width)` of 448, [448, 448] or {"height": 448, "width": 448}; ConfigError for anything else."""
    if isinstance(value, Mapping):
        edge = value.get("shortest_edge", value.get("longest_edge"))
        value = (value.get("height", edge), value.get("width", edge))
    sides = tuple(value) if isinstance(value, list | tuple) else (value, value)
    if len(sides) != 2 or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in sides):
        raise ConfigError(f"{name} is {value!r}; give a height and a width in pixels")
    return sides[0], sides[1]


def number_of(options: Mapping[str, Any], name: str, default: int, most: int = 1 << 48) -> int:
    """A positive whole number among options, at most `most`; ConfigError for anything else."""
    value = default if options.get(name) is None else options[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; give a positive whole number")
    if value > most:
        raise ConfigError(f"{name} is {value:,}, the limit is {most:,}; give less")
    return value


def is_low(options: Mapping[str, Any]) -> bool:
    """Whether `detail` asks for a picture in one piece; ConfigError for one that nobody knows."""
    detail = options.get("detail", "auto")
    if detail not in ("auto", "high", "low"):
        raise ConfigError(f"detail is {detail!r}; the known ones are auto, high and low")
    return bool(detail == "low")


class TiledInfo(FamilyInfo):
    """`specs` are TileSpecs; a piece of a picture, and a frame of a clip, is a step of the grid.

    The tensors are `pixel_values` `[patches, 3 * patch^2]`, piece by piece, in squares of patches that become one row, and
    `grid` (pieces, h, w) in patches.
    """

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """From the header alone; InputError for more rows than any context holds."""
        spec, plan = self.specs[header.modality], self.plan(header)
        tall, wide = (side // (spec.patch * spec.merge) * spec.merge for side in plan.views[0].piece)
        frames = 1 if header.frames is None else len(header.frames.indices)
        times = () if header.frames is None else header.frames.timestamps
        grid = ItemGeometry(frames * plan.pieces, tall, wide, spec.merge, times=times, tiles=plan.tiles)
        if grid.num_embeds > MOST_ROWS:
            raise InputError(f"it makes {grid.num_embeds:,} rows, the limit is {MOST_ROWS:,}; use fewer frames or pixels")
        return grid

    def plan(self, header: MediaHeader) -> CropPlan:
        """How each picture of the item is cut."""
        plan: CropPlan = self.specs[header.modality].tiling.plan(*header.size)
        return plan

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """As said above."""
        if not isinstance(item, ImageItem | VideoItem):
            raise TypeError(f"a {type(item).__name__} is neither picture nor clip")
        header = item.header
        grid, spec = self.geometry(header), self.specs[header.modality]
        frames = item.pixels[None] if isinstance(item, ImageItem) else item.frames
        patches = patch_rows(frames, self.plan(header), spec, spec.patch, spec.merge, dtype)
        shape = torch.tensor([grid.t, grid.h, grid.w])
        kwargs = {"pixel_values": FieldElem(patches, FlatField()), "grid": FieldElem(shape, BatchedField(keep_on_cpu=True))}
        return kwargs, grid

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Fewer frames, or fewer pieces as `fewer` says; None where one is too many."""
        per_piece = grid[1] * grid[2] // self.specs[modality].merge ** 2
        pieces = rows // per_piece
        if pieces < 1 or grid[0] == 1:
            return None
        return {"num_frames": pieces} if modality == "video" else self.fewer(pieces)

    def fewer(self, pieces: int) -> Mapping[str, Any] | None:
        """Options that make a picture take at most so many pieces; None: it cannot take fewer."""
        return None
