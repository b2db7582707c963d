"""Input processing of Step3 and Step3-VL-10B: square windows of an image, each at one size, then the whole image at another.

Source: the publisher's processing code as vLLM has it (step3_vl.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.tiling.longest import WindowTiles
from ....mm.tiling.plan import CropPlan
from ....mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.base import BaseProcessingInfo
from ....processors.bases.tiles import height_width, positive_int_or
from ....processors.images import PixelSpec, crops, read_pixel_spec
from ....processors.interface import Span
from ....processors.spans import Piece, build_span

_TILING = WindowTiles(728, 504, 3024)  # the published sizes
_FILTERS = ("lanczos", "bilinear", "bicubic")  # of torch, with antialiasing
_DOWN = 4  # patches along a side of a view per encoder row


@dataclass(frozen=True)
class WindowSpec(PixelSpec):
    """Parameters for cutting images by `tiling`; windows and whole images are resized to its sizes, and cut into patches."""

    tiling: WindowTiles = _TILING
    patch: int = 14

    def rows(self, side: int) -> int:
        """Return the encoder rows of a view of `side` pixels."""
        return int((-(-side // (self.patch * _DOWN))) ** 2)


class Step3VLProcessingInfo(BaseProcessingInfo):
    """ProcessingInfo of both models. The sizes are those of config.json, or of preprocessor_config.json if it has any.

    `enable_patch` of the vision config, or the option, switches the windows off.
    """

    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "<im_patch>")}
    valid_kwargs = {"image": ("enable_patch", "resample")}
    text_config_defaults = {"vocab_size": 128815, "hidden_size": 7168}
    embeds_layout = None

    def resolve_token_ids(self) -> None:
        names = ("<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
        self.window_start, self.window_end, self.newline, self.start, self.end = map(self.special_token_id, names)

    def resolve_spec(self, modality: str) -> WindowSpec:
        json, vision, options = self.files.image, self.files.config.get("vision_config") or {}, self.merged_kwargs[modality]
        tall, wide = height_width(json.get("size") or vision.get("image_size", _TILING.side))
        window, longest = (
            positive_int_or(json, "patch_size", _TILING.window),
            positive_int_or(json, "max_image_size", _TILING.longest),
        )
        patch = positive_int_or(vision, "patch_size", 14)
        if tall != wide or tall % (2 * patch) or window % (2 * patch):
            patches = f"an even number of patches of {patch} pixels"
            raise ConfigError(f"views of {tall}x{wide} and {window} pixels are not squares with {patches} along a side")
        cut = options.get("enable_patch", vision.get("enable_patch", True))
        tiling = WindowTiles(tall, window, longest, bool(cut))
        spec = WindowSpec(filter="bilinear", resample="pillow", tiling=tiling, patch=patch)
        spec = read_pixel_spec(json, spec, options)
        if spec.filter not in _FILTERS:
            reason = f"resample in the preprocessor JSON is {json['resample']}, which this model does not compute"
            raise ConfigError(f"{reason}; give 1, 2 or 3")
        return spec

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        spec, plan = self.specs["image"], self._plan(header)
        rows, columns = plan.tiles
        count = rows * columns * spec.rows(spec.tiling.window) + spec.rows(spec.tiling.side)
        return ItemGeometry(1, 1, count, tiles=plan.tiles)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the windows line by line, with a token between two lines, then the whole image."""
        spec, (lines, columns) = self.specs["image"], geometry.tiles
        window: list[Piece] = [(self.window_start,), spec.rows(spec.tiling.window), (self.window_end,)]
        pieces: list[Piece] = []
        for line in range(lines):
            pieces += [(self.newline,)] if line else []
            pieces += window * columns
        pieces += [(self.start,), spec.rows(spec.tiling.side), (self.end,)]
        return build_span(pieces, self.placeholder_ids["image"])

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `pixel_values` `[patches, 3 * patch^2]`, view by view and row by row, and `grids` int64 `[views, 3]`."""
        assert isinstance(item, ImageItem)
        spec, plan, tiling = self.specs["image"], self._plan(item.header), self.specs["image"].tiling
        sides = [tiling.window] * (plan.num_tiles - 1) + [tiling.side]
        counts = [(side // spec.patch) ** 2 for side in sides]
        patches = torch.empty(sum(counts), 3 * spec.patch**2, dtype=dtype)
        for view, side, rows in zip(crops(item.pixels[None], plan, spec), sides, patches.split(counts), strict=True):
            rows.copy_(_patches(view, side, spec))
        grids = torch.tensor([(1, side // spec.patch, side // spec.patch) for side in sides])
        return {
            "pixel_values": FieldElem(patches, FlatField()),
            "grids": FieldElem(grids, BatchedField(keep_on_cpu=True)),
        }, self.geometry(item.header)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        spec = self.specs["image"]
        return {"enable_patch": False} if rows >= spec.rows(spec.tiling.side) else None

    def _plan(self, header: MediaHeader) -> CropPlan:
        plan: CropPlan = self.specs["image"].tiling.plan(*header.size)
        return plan


def _patches(view: Tensor, side: int, spec: WindowSpec) -> Tensor:
    """Normalize uint8 `[1, 3, h, w]`, resize it in floating point as published, and cut it into flat patches."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (spec.mean, spec.std))
    planes = []
    for c in range(3):  # a long image is padded to a square, which takes 110 MB as floats of three channels
        x = (view[:, c : c + 1].float() * spec.rescale).sub_(mean[:, c : c + 1]).div_(std[:, c : c + 1])
        planes.append(x if x.shape[2:] == (side, side) else F.interpolate(x, (side, side), mode=spec.filter, antialias=True))
    cut = torch.cat(planes, 1)[0].unflatten(2, (-1, spec.patch)).unflatten(1, (-1, spec.patch))
    patches: Tensor = cut.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1)
    return patches
