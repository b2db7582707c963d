"""Input processing of Phi-3-vision and Phi-3.5-vision: images padded to tiles along their longer side, and as a whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....callers.errors import ConfigError
from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.tiling.longest import LongSideTiles
from ....mm.tiling.plan import CropPad, CropPlan, TiledView
from ....mm.types import ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.base import BaseProcessingInfo, replace_matches
from ....processors.bases.tiles import TILE_KWARGS, TileSpec, positive_int_or
from ....processors.images import crops, patchify_crops, patchify_overview, read_pixel_spec
from ....processors.options import is_low_detail

_NUMBERED = re.compile(r"<\|image_\d+\|>")


class Phi3VProcessingInfo(BaseProcessingInfo):
    """ProcessingInfo of Phi-3-vision. Prompts spell images as plain text with numbers.

    The tensors are `pixel_values` `[patches, 3 * patch^2]`: those of the whole image, then those of each tile, and `layout`
    int64 `[2]`: rows and columns of tiles.
    """

    rewrites_prompts = True
    modalities = ("image",)
    placeholders = {"image": ("image_token_id", 32044)}
    valid_kwargs = {"image": (*TILE_KWARGS, "num_crops")}
    default_kwargs = {"resample": "pillow"}
    text_config_defaults = {"vocab_size": 32064, "hidden_size": 3072}

    def resolve_spec(self, modality: str) -> TileSpec:
        json = {key: value for key, value in self.files.image.items() if key != "resample"}  # tiles are always bilinear
        options = self.merged_kwargs[modality]
        vision = self.files.config.get("vision_config") or {}
        side, patch = positive_int_or(vision, "image_size", 336), positive_int_or(vision, "patch_size", 14)
        if side % (2 * patch):
            raise ConfigError(f"image_size of vision_config is {side}; it must be a multiple of 2 * patch_size, {2 * patch}")
        most = 1 if is_low_detail(options) else positive_int_or({**json, **options}, "num_crops", 16)
        spec = TileSpec(filter="bilinear", patch=patch, tiling=LongSideTiles(side, most))
        return read_pixel_spec(json, spec, options)

    @property
    def text_placeholders(self) -> Mapping[str, int]:
        return {"<|image_1|>": self.placeholder_ids["image"]}

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace the images' texts with tokens, in the order of the prompt; as published, their numbers have no effect."""
        if not items:
            return ids
        token = self.placeholder_ids["image"]
        return self.preprocess_chat(replace_matches(ids, _NUMBERED, lambda match: token, (token,), self.files), items)

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Start the text after each image with the token that the prompt starts with, since it is tokenized by itself."""
        first, image = tuple(ids[:1]), self.placeholder_ids["image"]
        if not items or first != (self.text_config.get("bos_token_id", 1),):
            return ids
        return [token for token_id in ids for token in ((token_id, *first) if token_id == image else (token_id,))]

    @property
    def side(self) -> int:
        """Rows along a side of a tile."""
        spec: TileSpec = self.specs["image"]
        return spec.tiling.plan(1, 1).views[0].tile_size[0] // (2 * spec.patch)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        side, (rows, columns) = self.side, self.specs["image"].tiling.plan(*header.size).tiles
        count = rows * side * (columns * side + 1) + 1 + side * (side + 1)
        return ItemGeometry(count, 1, 1, tiles=(rows, columns), linear=True)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors that the class describes. As published, an upright image is resized lying on its side."""
        assert isinstance(item, ImageItem)
        spec, grid, (height, width) = self.specs["image"], self.geometry(item.header), item.header.size
        upright, pixels = width < height, item.pixels
        plan = spec.tiling.plan(min(height, width), max(height, width))
        view = TiledView(plan.views[0].steps)
        padded = next(crops((pixels.transpose(0, 1) if upright else pixels)[None], CropPlan((view,)), spec))
        padded = padded.transpose(2, 3) if upright else padded
        whole = patchify_overview(padded, 2 * self.side * spec.patch, spec, spec.patch, dtype)
        rows, columns = grid.tiles
        cut = TiledView((CropPad(0, 0, padded.shape[2], padded.shape[3]),), rows, columns)
        tiles = patchify_crops(padded.permute(0, 2, 3, 1), CropPlan((cut,)), spec, PatchLayout(spec.patch), dtype)
        kwargs = {
            "pixel_values": FieldElem(torch.cat((whole, tiles)), FlatField()),
            "layout": FieldElem(torch.tensor(grid.tiles), BatchedField(keep_on_cpu=True)),
        }
        return kwargs, grid

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return an option for so few tiles that they fit, if they are in one column, which has the most ends of lines."""
        per_tile = self.side * (self.side + 1)
        tiles = (rows - 1 - per_tile) // per_tile
        return {"num_crops": tiles} if tiles >= 1 else None
