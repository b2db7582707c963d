"""The result of a tiling policy: a plan lists the views of an image, with the steps that make each view and its tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

from ...callers.errors import InputError

MAX_RESIZED_PIXELS = 64 << 20
"""Pixels of a resized view with sides that differ by more than 200:1: some policies enlarge them before they crop."""
_SLIVER = 200
Size = tuple[int, int]
"""`(height, width)` in pixels."""


@dataclass(frozen=True)
class Resize:
    """Resize the whole image."""

    height: int
    width: int

    @classmethod
    def to(cls, size: Size) -> Self:
        return cls(height=size[0], width=size[1])


@dataclass(frozen=True)
class CropPad:
    """Cut the window of this size at (top, left), which may reach beyond the image; `fill` (RGB) pads what is outside."""

    top: int
    left: int
    height: int
    width: int
    fill: tuple[int, int, int] = (0, 0, 0)

    @classmethod
    def window(cls, size: Size, top: int = 0, left: int = 0, fill: tuple[int, int, int] = (0, 0, 0)) -> Self:
        return cls(top, left, height=size[0], width=size[1], fill=fill)


Step = Resize | CropPad


@dataclass(frozen=True)
class TiledView:
    """A view of an image: apply `steps` in order, then cut the result into `rows` x `columns` equal tiles, row by row."""

    steps: tuple[Step, ...]
    rows: int = 1
    columns: int = 1

    def __post_init__(self) -> None:
        for step in self.steps:
            is_sliver = max(step.height, step.width) > _SLIVER * min(step.height, step.width)
            if isinstance(step, Resize) and is_sliver and step.height * step.width > MAX_RESIZED_PIXELS:
                raise InputError(
                    f"this model resizes it to {step.width}x{step.height}, which is over the limit of {MAX_RESIZED_PIXELS:,} "
                    "pixels; crop it first"
                )

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
