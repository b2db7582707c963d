"""Input processing of Ovis.

Ovis 1.6 and 2 take the whole image, then the fewest tiles that cover it, with marks around and between them; Ovis2.5 takes
images and videos at native resolution. Source of the publisher's layouts: the code published with the checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ....mm.fields import BatchedField, FieldElem
from ....mm.geometry import FrameSampling
from ....mm.tiling.aspect import AspectTiles
from ....mm.tiling.plan import CropPad, CropPlan, Resize
from ....mm.tiling.slices import CoveringTiles, PaddedCoveringTiles
from ....mm.tiling.whole import FixedSize
from ....mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.base import check_one_video
from ....processors.bases.native import NativeResolutionInfo
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.interface import Span, TokenRun
from ....processors.options import is_low_detail
from ....processors.patches import PatchSpec
from ....processors.spans import build_span

_MAX_TILES = 64  # planning looks at every tile of every arrangement
_MARKS = (151666, 151667, 151668, 151669, 151670)  # tokens of start, end of the whole image, column, row, end
_PADS = {"gemma2": "<unused0>", "llama": "<|reserved_special_token_0|>"}  # tokens of rows, by the decoder's model_type
_PATCHES = PatchSpec(
    IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patch=16, temporal=1, min_pixels=448**2, max_pixels=1792**2, squeeze=True
)
_SMALL_WIDTH, _SMALL_MAX_PIXELS = 2048, 1344 * 1792  # of Ovis2.5-2B, whose code has another bound than that of 9B


def pad_token(config: Mapping[str, Any]) -> str:
    """Return the text of the token that stands for a row in the publisher's layouts."""
    return _PADS.get((config.get("llm_config") or {}).get("model_type", "qwen2"), "<|image_pad|>")


class Ovis2ProcessingInfo(TiledInfo):
    """ProcessingInfo of Ovis2. Marks are encoder rows, too.

    The tensors are those of TiledInfo and `tiles` int64 `[2]`: rows and columns of the tiles, (0, 0) if the image is not cut.
    """

    modalities = ("image",)
    placeholders = {"image": ("<image>",)}
    valid_kwargs = {"image": (*TILE_KWARGS, "crop_to_patches", "max_patches")}
    embeds_layout = None

    def resolve_token_ids(self) -> None:
        self.atom = self.config_token_id("image_token_id", 151665)
        self.marks = tuple(self.files.config.get("visual_indicator_token_ids") or _MARKS)

    def resolve_spec(self, modality: str) -> TileSpec:
        json = {**self.files.image, **self.merged_kwargs[modality]}
        vision = self.files.config.get("vision_config") or {}
        tile, side = height_width(json.get("size") or 384), positive_int_or(vision, "image_size", 224)
        if tile != (side, side):
            raise self.files.mismatch_error(f"image_size is {side} in vision_config of config.json", f"size {tile}")
        most = positive_int_or(json, "max_patches", 12, _MAX_TILES)
        cut = json.get("crop_to_patches") and most > 1 and not is_low_detail(json)
        least = min(positive_int_or(json, "min_patches", 1), most)
        nearest = None if json.get("use_covering_area_grid", True) else AspectTiles(tile, least, most)
        tiling = CoveringTiles(side, most, nearest=nearest) if cut else FixedSize(tile)
        patch, stride = positive_int_or(vision, "patch_size", 14), positive_int_or(vision, "hidden_stride", 1)
        return read_pixel_spec(
            self.files.image, TileSpec(tiling=tiling, patch=patch, merge=stride), self.merged_kwargs[modality]
        )

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        return replace(grid, extra=grid.t + (1 if grid.t > 1 else 2))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        kwargs, grid = super().process(item, dtype)
        return {**kwargs, "tiles": FieldElem(torch.tensor(grid.tiles), BatchedField(keep_on_cpu=True))}, grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the whole image and its tiles; a mark follows each. All tokens are rows."""
        (rows, columns), each = geometry.tiles, geometry.h * geometry.w // geometry.merge**2
        start, grid, column, row, end = (TokenRun((mark,), 1, True) for mark in self.marks)
        tile = TokenRun((self.atom,), each, True)
        runs = [start, tile, grid]
        for number in range(1, rows * columns + 1):
            runs += [tile, column if number % columns else row if number < rows * columns else end]
        runs += [] if rows else [end]
        return Span(geometry.num_embeds, geometry.num_embeds, lambda: runs)

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return {"max_patches": max(1, tiles - 1)}


class OvisProcessingInfo(TextPlaceholders, Ovis2ProcessingInfo):
    """ProcessingInfo of Ovis 1.6 and 2 in their publisher's layout. Tiles are padded; normalized pixels of padding are 0."""

    placeholder_texts = {"image": "<image>"}
    valid_kwargs = {"image": (*TILE_KWARGS, "max_partition")}
    default_kwargs = {"resample": "pillow"}

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        return replace(files, config={**files.config, "text_config": files.config.get("llm_config") or {}})

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        return {"image": (pad_token(self.files.config),)}

    def resolve_token_ids(self) -> None:
        self.atom = self.placeholder_ids["image"]
        self.marks = (self.atom,) * len(_MARKS)

    def resolve_spec(self, modality: str) -> TileSpec:
        options, words = self.merged_kwargs[modality], self.files.config.get("visual_tokenizer_config") or {}
        vision, self.stride = words.get("backbone_config") or {}, positive_int_or(words, "hidden_stride", 1)
        side, patch = positive_int_or(vision, "image_size", 224), positive_int_or(vision, "patch_size", 14)
        size = height_width(self.files.image.get("size") or side)
        if size != (side, side):
            raise self.files.mismatch_error(f"image_size is {side} in backbone_config of config.json", f"size {size}")
        most = positive_int_or(options, "max_partition", 9, _MAX_TILES)
        tiling = PaddedCoveringTiles(side, most, cut=most > 1 and not is_low_detail(options))
        merge = 1 if side // patch % self.stride else self.stride
        return read_pixel_spec(self.files.image, TileSpec(tiling=tiling, patch=patch, merge=merge), options)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid: of rows instead of patches, if the patches of a tile are padded to whole squares."""
        grid, merge = super().geometry(header), self.specs["image"].merge
        return grid if merge == self.stride else replace(grid, h=-(-grid.h // self.stride), w=-(-grid.w // self.stride))

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        kwargs, grid = super().process(item, dtype)
        patches = kwargs["pixel_values"].data
        assert isinstance(patches, torch.Tensor)
        _clear_padding(patches, self.plan(item.header), self.specs["image"])
        return kwargs, grid

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return {"max_partition": max(1, tiles - 1)}


class Ovis25ProcessingInfo(TextPlaceholders, NativeResolutionInfo):
    """ProcessingInfo of Ovis2.5. Every item has a mark before and after it; all its tokens are rows.

    Rows of both modalities have the same token. If the tokenizer has no token for `<video>`, the placeholder of videos is an id
    beyond the vocabulary.
    """

    placeholder_texts = {"image": "<image>", "video": "<video>"}
    placeholders = {"image": ("<|image_pad|>",), "video": ("video_token_id",)}
    default_kwargs = {"resample": "pillow"}
    embeds_layout = None
    patch_specs = {"image": _PATCHES, "video": _PATCHES}
    frame_sampling = FrameSampling(num_frames=8)

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Name the publisher's values like those of other processors. The preprocessor's JSON has the size of another model."""
        text, vision = files.config.get("llm_config") or {}, files.config.get("vit_config") or {}
        size = text.get("vocab_size") or 1
        video = None if files.token_to_id is None else files.token_to_id(self.placeholder_texts["video"])
        config = {**files.config, "text_config": {**text, "vocab_size": size + 1}, "video_token_id": video or size}
        names = {"patch_size": 16, "hidden_stride": 2, "temporal_patch_size": 1}
        patch, merge, temporal = (vision.get(name, default) for name, default in names.items())
        pixels = {key: value for key, value in files.image.items() if key != "size"}
        if text.get("hidden_size", _SMALL_WIDTH) <= _SMALL_WIDTH:
            pixels = {"max_pixels": _SMALL_MAX_PIXELS, **pixels}
        image = {**pixels, "patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal}
        return replace(files, config=config, image=image)

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        return {**self.placeholders, "image": (pad_token(self.files.config),)}

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace spelled placeholders. InputError for images beside a video, or for several videos."""
        check_one_video(items)
        return super().preprocess_prompt(ids, items)

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        check_one_video(items)
        return super().preprocess_chat(ids, items)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return replace(super().geometry(header), extra=2)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        return build_span([geometry.num_embeds], self.placeholder_ids["image"])


def _clear_padding(patches: torch.Tensor, plan: CropPlan, spec: TileSpec) -> None:
    """Set the patches' numbers outside the resized part of each view to 0."""
    unit = spec.patch * spec.merge
    count = plan.views[0].tile_size[0] // unit
    tiles = patches.view(-1, count, count, spec.merge, spec.merge, 3, spec.patch, spec.patch)
    for tile, view in zip(tiles, plan.views, strict=True):
        _, resized, window = view.steps
        assert isinstance(resized, Resize)
        assert isinstance(window, CropPad)
        outside = torch.ones(window.height, window.width, dtype=torch.bool)
        outside[-window.top : resized.height - window.top, -window.left : resized.width - window.left] = False
        used = outside[: count * unit, : count * unit].view(count, spec.merge, spec.patch, count, spec.merge, spec.patch)
        tile.masked_fill_(used.permute(0, 3, 1, 4, 2, 5).unsqueeze(4), 0.0)
