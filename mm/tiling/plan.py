"""The result of a tiling policy: a plan lists the views of an image, with the steps that make each view and its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Size = tuple[int, int]
"""`(height, width)` in pixels."""


@dataclass(frozen=True)
class Resize:
    """Resize the whole image."""

    height: int
    width: int


@dataclass(frozen=True)
class CropPad:
    """Cut the window of this size at (top, left), which may reach beyond the image; `fill` (RGB) pads what is outside."""

    top: int
    left: int
    height: int
    width: int
    fill: tuple[int, int, int] = (0, 0, 0)


Step = Resize | CropPad


@dataclass(frozen=True)
class TiledView:
    """A view of an image: apply `steps` in order, then cut the result into `rows` x `columns` equal tiles, row by row."""

    steps: tuple[Step, ...]
    rows: int = 1
    columns: int = 1

    @property
    def tile_size(self) -> Size:
        """Height and width of one tile."""
        return self.steps[-1].height // self.rows, self.steps[-1].width // self.columns


@dataclass(frozen=True)
class CropPlan:
    """The views of an image, in the order in which the encoder gets their tiles.

    `tiles`: rows and columns of tiles, (0, 0) if the image is not tiled.
    """

    views: tuple[TiledView, ...]
    tiles: tuple[int, int] = (0, 0)

    @property
    def num_tiles(self) -> int:
        """Number of images that the encoder gets."""
        return sum(view.rows * view.columns for view in self.views)


class TilingPolicy(Protocol):
    """Rule by which a model tiles images; the implementations are frozen dataclasses."""

    def plan(self, height: int, width: int) -> CropPlan:
        """Return the plan for an image of this size in pixels; InputError if it is empty."""
