"""Input processing of LFM2-VL: small images at their own size; large ones as tiles after tags, then the whole image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....callers.errors import InputError
from ....kernels.pixels.layout import PatchLayout
from ....mm.embeddings import ROWS
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.geometry import MAX_ITEM_ROWS
from ....mm.tiling.aspect import AspectTiles, LargeImageTiles
from ....mm.tiling.plan import CropPlan
from ....mm.types import EmbeddingItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patchify_crops, read_pixel_spec
from ....processors.interface import Span
from ....processors.options import MAX_TILES, is_low_detail
from ....processors.spans import Piece, build_span


class Lfm2VLProcessingInfo(TiledInfo):
    """ProcessingInfo of LFM2-VL.

    The tensors are `pixel_values` `[patches, 3 * patch^2]`, tile by tile and within a tile square by square, and `grids` int64
    `[2, 3]`: (tiles, h, w) in patches of all tiles, and (1, h, w) of the whole image; zeros where there are none.
    """

    adds_special_tokens = False
    modalities = ("image",)
    placeholders = {"image": ("image_token_id", 396)}
    valid_kwargs = {"image": (*TILE_KWARGS, "do_image_splitting")}

    def resolve_spec(self, modality: str) -> TileSpec:
        json: dict[str, Any] = {**self.files.image, **self.merged_kwargs[modality]}
        patch, merge = positive_int_or(json, "encoder_patch_size", 16), positive_int_or(json, "downsample_factor", 2)
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, filter="bilinear", patch=patch, merge=merge)
        spec = read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality])
        tile, tiles = positive_int_or(json, "tile_size", 512), None
        least, most = positive_int_or(json, "min_tiles", 2), positive_int_or(json, "max_tiles", 10, MAX_TILES)
        if json.get("do_image_splitting", True) and most > 1 and not is_low_detail(json):
            tiles = AspectTiles((tile, tile), least, most, json.get("use_thumbnail", True))
        area = (patch * merge) ** 2
        least, most = positive_int_or(json, "min_image_tokens", 64), positive_int_or(json, "max_image_tokens", 256)
        tolerance = float(json.get("max_pixels_tolerance", 2.0))
        return replace(spec, tiling=LargeImageTiles(patch, merge, least * area, most * area, tolerance, tiles))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        plan = self.plan(header)
        rows = sum(t * h * w for t, h, w in self._grids(plan)) // self.specs["image"].merge ** 2
        if rows > MAX_ITEM_ROWS:
            raise InputError(f"it makes {rows:,} rows, the limit is {MAX_ITEM_ROWS:,}; use fewer pixels")
        return ItemGeometry(1, 1, rows, tiles=plan.tiles)

    def _grids(self, plan: CropPlan) -> list[tuple[int, int, int]]:
        """Return the grids of the tiles and of the whole image."""
        patch = self.specs["image"].patch
        grids = [(view.rows * view.columns, view.tile_size[0] // patch, view.tile_size[1] // patch) for view in plan.views]
        return [*[(0, 0, 0)] * (plan.tiles == (0, 0)), *grids, (0, 0, 0)][:2]

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        return ItemGeometry(1, 1, len(item.tensors[ROWS]))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        assert isinstance(item, ImageItem)
        spec, plan = self.specs["image"], self.plan(item.header)
        views = [
            patchify_crops(item.pixels[None], CropPlan((view,)), spec, PatchLayout(spec.patch, spec.merge), dtype)
            for view in plan.views
        ]
        kwargs = {
            "pixel_values": FieldElem(torch.cat(views), FlatField()),
            "grids": FieldElem(torch.tensor(self._grids(plan)), BatchedField(keep_on_cpu=True)),
        }
        return kwargs, self.geometry(item.header)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows of each tile after a tag of its row and column, and those of the whole image, between two tokens."""
        spec, (rows, columns) = self.specs["image"], geometry.tiles
        tiles, pieces, has_tags = spec.tiling.tiles, list[Piece](), self.files.config.get("use_image_special_tokens", True)
        each = (tiles.tile[0] // spec.patch // spec.merge) ** 2 if rows else 0
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [(self.special_token_id(f"<|img_row_{row}_col_{column}|>"),), each]
        whole = geometry.num_embeds - rows * columns * each
        if rows and whole:
            pieces.append((self.special_token_id("<|img_thumbnail|>"),))
        pieces += [whole] * (whole > 0)
        pieces = [(self.special_token_id("<|image_start|>"),), *pieces, (self.special_token_id("<|image_end|>"),)]
        pieces = pieces if has_tags else [piece for piece in pieces if isinstance(piece, int)]
        return build_span(pieces, self.placeholder_ids["image"])

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return {"do_image_splitting": False} if self.specs[modality].tiling.tiles is not None else None
