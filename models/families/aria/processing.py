"""Input processing of Aria: an image whose longer side has 490 or 980 pixels, or crops of that size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....callers.errors import ConfigError
from ....mm.fields import BatchedField, FieldElem
from ....mm.tiling.longest import LongEdge
from ....mm.types import ItemGeometry, MediaItem, MultiModalKwargsItem
from ....processors.bases.tiles import TILE_KWARGS, ResampledInfo, TileSpec, height_width, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.options import is_low_detail

_LINES = ((1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (1, 7), (1, 8), (2, 4), (2, 3), (2, 2), (2, 1), (3, 1), (3, 2))
_SIZES = [(490 * rows, 490 * columns) for rows, columns in (*_LINES, (4, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1))]
_QUERIES: Mapping[str, int] = {"1225": 128, "4900": 256}  # patches of a padded image -> its rows


class AriaProcessingInfo(ResampledInfo):
    """ProcessingInfo of Aria. The tensor `queries` int64 `[1]` has the rows of each crop."""

    modalities = ("image",)
    placeholders = {"image": ("image_token_id", "image_token_index", 9)}
    valid_kwargs = {"image": (*TILE_KWARGS, "max_image_size", "split_image")}
    end_tokens = ("<|im_end|>",)

    def resolve_spec(self, modality: str) -> TileSpec:
        options = self.merged_kwargs[modality]
        json: dict[str, Any] = {**self.files.image, **options}
        patch = positive_int_or(self.files.config.get("vision_config") or {}, "patch_size", 32)
        longest, shortest = positive_int_or(json, "max_image_size", 980), positive_int_or(json, "min_image_size", 336)
        split = bool(json.get("split_image")) and not is_low_detail(json)
        sizes = [height_width(size, "split_resolutions") for size in json.get("split_resolutions") or _SIZES] if split else []
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patch=patch)
        spec = read_pixel_spec({**self.files.image, "do_resize": True}, spec, options)  # the published processor ignores it
        return replace(spec, tiling=LongEdge(longest, shortest, patch, tuple(sizes)))

    @property
    def latents(self) -> int:
        spec: TileSpec = self.specs["image"]
        assert isinstance(spec.tiling, LongEdge)
        patches, queries = (spec.tiling.longest // spec.patch) ** 2, self.files.config.get("projector_patch_to_query_dict")
        rows = {int(key): int(count) for key, count in (queries or _QUERIES).items()}
        if patches not in rows:
            sizes = ", ".join(map(str, rows))
            raise ConfigError(f"max_image_size makes {patches} patches; projector_patch_to_query_dict has rows for {sizes}")
        return rows[patches]

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        kwargs, grid = super().process(item, dtype)
        return {**kwargs, "queries": FieldElem(torch.tensor([self.latents]), BatchedField(keep_on_cpu=True))}, grid

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return {"split_image": False}
