"""Input processing of LLaVA 1.5, Tarsier, LLaVA-NeXT (and with it Granite Vision), LLaVA-OneVision and MinerU 2.0."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ....callers.errors import ConfigError
from ....mm.fields import BatchedField, FieldElem
from ....mm.geometry import FrameSampling
from ....mm.media.policy import DecodeSpec
from ....mm.tiling.canvas import AnyResTiles
from ....mm.tiling.plan import Size, TilingPolicy
from ....mm.tiling.whole import CenterCrop, FixedSize, PaddedSquare, Successive
from ....mm.types import ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width
from ....processors.files import ProcessorFiles
from ....processors.images import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
    read_pixel_spec,
)
from ....processors.interface import Span
from ....processors.options import TIME_KWARGS, is_low_detail
from ....processors.spans import Piece, build_span
from .config import (
    PINPOINTS_336,
    PINPOINTS_384,
    PINPOINTS_MINIMAX,
    POOL_STRIDE,
    UNTILED,
    AnyResLayout,
    anyres_layout,
    stretched_tiles,
)

DEFAULT_FRAMES = 32  # frames of a video, if the caller does not say
PLACEHOLDERS: Mapping[str, tuple[str | int, ...]] = {"image": ("image_token_id", "image_token_index", 32000)}
ENCODERS = {
    "clip_vision_model": {"image_size": 224, "patch_size": 32},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16},
}
"""Values that a vision_config may leave out, by its model_type."""
MINERU_TEMPLATE = """\
{%- if not messages or messages[0].role != 'system' -%}{{ '<|im_start|>system\\nA conversation between a user and an LLM-based \
AI assistant. The assistant gives helpful and honest answers.<|im_end|>' }}{%- endif -%}
{%- for m in messages -%}
  {{- '<|im_start|>' ~ m.role ~ '\\n' -}}
  {%- if m.content is string -%}{{ m.content }}{%- else -%}
    {%- for part in m.content -%}
      {%- if part.type == 'image' -%}{{ '<image>\\n' }}
      {%- elif part.type == 'text' -%}{{ part.text }}
      {%- else -%}{{ raise_exception('this model takes text and images') }}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""
CLIP_TOWER = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP_TOWER = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
ONEVISION_KWARGS = (*TILE_KWARGS, "image_aspect_ratio")


@dataclass(frozen=True)
class LlavaSpec(TileSpec):
    """`max_tiles`: images with more rows than this many tiles are pooled to about that number; None: no pooling.

    `downsample_rate`: (r, p): along each side of a tile, p patches become r rows. `more_rows`: rows beside those of the
    patches: 1 for the class token, -1 if the first patch is dropped in place of one.
    """

    max_tiles: int | None = None
    downsample_rate: tuple[int, int] = (1, 1)
    more_rows: int = 0

    @property
    def side(self) -> int:
        """Rows along a side of a tile."""
        patches = self.tiling.plan(1, 1).views[0].tile_size[0] // self.patch
        rows, per_patches = self.downsample_rate
        return patches * rows // per_patches


class LlavaProcessingInfo(TiledInfo):
    """ProcessingInfo of LLaVA 1.5: the centre square of each image."""

    modalities = ("image",)
    placeholders = PLACEHOLDERS
    valid_kwargs = {"image": TILE_KWARGS}

    def resolve_spec(self, modality: str) -> LlavaSpec:
        return resolve_llava_spec(self, modality, self._tiling, CLIP_TOWER, "default")

    def _tiling(self, modality: str) -> CenterCrop | FixedSize | PaddedSquare | Successive:
        json = self.preprocessor_json(modality)
        size = json.get("size", {"shortest_edge": 224})
        crop = json.get("crop_size", 224) if json.get("do_center_crop", True) else None
        if json.get("do_pad") and not str(json.get("image_processor_type")).startswith("CLIP"):  # which ignores it
            return self._padded(json, height_width(size), crop and height_width(crop))
        if crop is None or (isinstance(size, Mapping) and "height" in size):
            return FixedSize(height_width(size))
        return CenterCrop(height_width(size)[0], height_width(crop))

    def _padded(self, json: Mapping[str, Any], size: Size, crop: Size | None) -> PaddedSquare | Successive:
        """Return the policy of images that are padded to squares in the mean color before they are resized and cropped."""
        pixels = read_pixel_spec({**json, "do_normalize": True, "do_resize": True}, TileSpec(), {})
        red, green, blue = (int(mean * 255) for mean in pixels.mean)
        square = PaddedSquare(size, (red, green, blue))
        return square if crop is None else Successive((square, CenterCrop(None, crop)))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        return replace(super().geometry(header), extra=self.specs["image"].more_rows)


class TarsierProcessingInfo(LlavaProcessingInfo):
    """ProcessingInfo of Tarsier: a token follows each line of rows, and another one the image."""

    def resolve_spec(self, modality: str) -> LlavaSpec:
        spec = super().resolve_spec(modality)
        if spec.more_rows:
            raise ConfigError(
                "vision_feature_select_strategy gives another number of rows than of patches, so they make no lines"
            )
        return spec

    def resolve_token_ids(self) -> None:
        self.ends = tuple((self.config_token_id(*key),) for key in (("image_newline_idx", 32002), ("image_new_idx", 32003)))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        line, image = self.ends
        pieces: list[Piece] = [geometry.w, line]
        return build_span([*pieces * geometry.h, image], self.placeholder_ids[modality])


class LlavaNextProcessingInfo(TiledInfo):
    """ProcessingInfo of LLaVA-NeXT: the whole image, then its tiles without their padding and with a row after each line.

    Large images are pooled if `default_aspect_ratio` is set. In families that take the option `image_aspect_ratio`, each of
    several images of a prompt is padded to one square tile instead of cut into tiles, as LLaVA-OneVision was trained
    (arXiv 2408.03326) and as transformers does with the images of one conversation; the option overrides this.
    The tensor `layout` int64 `[6]` has the pairs of height and width of AnyResLayout: tiles, kept patches, pooled size.
    """

    modalities: tuple[str, ...] = ("image",)
    placeholders = PLACEHOLDERS
    valid_kwargs = {"image": TILE_KWARGS}
    vision_defaults: ClassVar[Mapping[str, Any]] = CLIP_TOWER
    default_feature_strategy: ClassVar[str] = "default"
    default_pinpoints: ClassVar[tuple[tuple[int, int], ...]] = PINPOINTS_336
    default_aspect_ratio: ClassVar[str | None] = None

    def resolve_spec(self, modality: str) -> LlavaSpec:
        spec = resolve_llava_spec(self, modality, self._tiling, self.vision_defaults, self.default_feature_strategy)
        if spec.more_rows:
            strategy = "default" if spec.more_rows > 0 else "full"
            raise ConfigError(
                f"with vision_feature_select_strategy a tile has another number of rows than of patches, so they make no lines "
                f'(transformers refuses it, too); use "{strategy}"'
            )
        return replace(spec, max_tiles=self._max_tiles())

    def _max_tiles(self) -> int | None:
        if self.default_aspect_ratio is None:
            return None
        name = str(self.files.config.get("vision_aspect_ratio", self.default_aspect_ratio))
        most = name.removeprefix("anyres_max_")
        if not most.isdecimal():
            raise ConfigError(f"vision_aspect_ratio is {name!r}; give anyres_max_ followed by a number")
        return int(most)

    def prompt_kwargs(self, items: Mapping[str, int]) -> Mapping[str, Any]:
        chosen = self.merged_kwargs["image"].keys() & {"detail", "image_aspect_ratio"}
        pads = "image_aspect_ratio" in self.valid_kwargs["image"] and items.get("image", 0) > 1 and not chosen
        return {"image_aspect_ratio": "pad"} if pads else {}

    def _tiling(self, modality: str) -> FixedSize | PaddedSquare | AnyResTiles:
        json = self.preprocessor_json(modality)
        base = height_width(json.get("size") or self.vision_defaults["image_size"])
        crop = json.get("crop_size") if json.get("do_center_crop", True) else None
        if height_width(crop or base) != base:
            raise ConfigError(f"size {base} and crop_size {crop} in the preprocessor JSON differ; tiles have one size")
        if self.merged_kwargs[modality].get("image_aspect_ratio") == "pad":
            mean = json.get("image_mean") or OPENAI_CLIP_MEAN
            return PaddedSquare(base, (int(255 * mean[0]), int(255 * mean[1]), int(255 * mean[2])))
        if modality == "video" or is_low_detail(self.merged_kwargs[modality]):
            return FixedSize(base)
        sizes = json.get("image_grid_pinpoints") or self.files.config.get("image_grid_pinpoints") or self.default_pinpoints
        return AnyResTiles(base, base, tuple(height_width(size, "image_grid_pinpoints") for size in sizes))

    def layout(self, header: MediaHeader) -> AnyResLayout:
        """Return the layout of the rows of an image's tiles."""
        spec = self.specs["image"]
        if not isinstance(spec.tiling, AnyResTiles):
            return UNTILED
        return anyres_layout(*header.size, spec.tiling, spec.side, spec.max_tiles)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        grid = super().geometry(header)
        rows = self.specs["image"].side ** 2 + self.layout(header).rows
        return replace(grid, extra=rows - grid.num_embeds)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        kwargs, grid = super().process(item, dtype)
        if item.header.modality != "image":
            return kwargs, grid
        layout = self.layout(item.header)
        numbers = torch.tensor((*layout.tiles, *layout.kept, *layout.size))
        return {**kwargs, "layout": FieldElem(numbers, BatchedField(keep_on_cpu=True))}, grid

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return {"detail": "low"}


class MiniMaxVLProcessingInfo(LlavaNextProcessingInfo):
    """ProcessingInfo of MiniMax-VL-01: images inside their tiles are rounded down."""

    placeholders = {"image": ("image_token_id", "image_token_index", 200025)}
    default_pinpoints = PINPOINTS_MINIMAX

    def _tiling(self, modality: str) -> FixedSize | PaddedSquare | AnyResTiles:
        tiling = super()._tiling(modality)
        return replace(tiling, floor=True) if isinstance(tiling, AnyResTiles) else tiling


class LlavaOnevisionProcessingInfo(LlavaNextProcessingInfo):
    """ProcessingInfo of LLaVA-OneVision: pools large images and every video frame, and ends a video with one more row."""

    modalities = ("image", "video")
    placeholders = {
        "image": ("image_token_id", "image_token_index", 151646),
        "video": ("video_token_id", "video_token_index", 151647),
    }
    valid_kwargs = {
        "image": ONEVISION_KWARGS,
        "video": (*TIME_KWARGS, "fps", "num_frames", "resample"),
    }
    vision_defaults = SIGLIP_TOWER
    default_feature_strategy = "full"
    default_pinpoints = PINPOINTS_384
    default_aspect_ratio = "anyres_max_9"

    def resolve_decode_spec(self) -> DecodeSpec:
        policy = self.sampling_policy("video", FrameSampling(spread="ends"), {})
        is_set = policy.fps is not None or policy.num_frames is not None
        return DecodeSpec(policy if is_set else replace(policy, max_frames=DEFAULT_FRAMES))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        if header.modality == "image":
            return super().geometry(header)
        grid = TiledInfo.geometry(self, header)
        return replace(grid, extra=grid.t * self.rows_per_frame + 1 - grid.num_embeds)

    @property
    def rows_per_frame(self) -> int:
        """Rows of a frame after pooling."""
        rows: int = math.ceil(self.specs["video"].side / POOL_STRIDE) ** 2
        return rows

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        if modality == "image":
            return super().shrink_kwargs(modality, grid, rows)
        frames = (rows - 1) // self.rows_per_frame
        return {"num_frames": frames} if frames > 0 and grid[0] > 1 else None


class Mineru2ProcessingInfo(LlavaNextProcessingInfo):
    """ProcessingInfo of MinerU 2.0: images fill the tiles, several of a prompt too. No preprocessor file is needed."""

    placeholders = {"image": ("image_token_id", "image_token_index", 151646)}
    default_kwargs = {"resample": "pillow"}
    vision_defaults = SIGLIP_TOWER
    default_feature_strategy = "full"
    element_format = "md_tokens"
    chat_template = MINERU_TEMPLATE
    end_tokens = ("<|im_end|>",)

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        defaults = {"image_mean": list(IMAGENET_STANDARD_MEAN), "image_std": list(IMAGENET_STANDARD_STD)}
        return replace(files, image={**defaults, **files.image})

    def resolve_spec(self, modality: str) -> LlavaSpec:
        return replace(super().resolve_spec(modality), max_tiles=stretched_tiles(self.files.config, 1)[1])

    def _tiling(self, modality: str) -> FixedSize | AnyResTiles:
        vision = self.files.config.get("vision_config") or self.vision_defaults
        side = height_width(vision.get("image_size", 384))[0]
        return (
            FixedSize((side, side))
            if is_low_detail(self.merged_kwargs[modality])
            else stretched_tiles(self.files.config, side)[0]
        )


def resolve_llava_spec(
    info: TiledInfo, modality: str, tiling_of: Callable[[str], TilingPolicy], vision_defaults: Mapping[str, Any], strategy: str
) -> LlavaSpec:
    """Return the spec of a LLaVA family; ConfigError if tower and preprocessor contradict each other.

    Args:
        tiling_of: returns the tiling policy of a modality.
        vision_defaults: vision_config, if config.json has none.
        strategy: default of `vision_feature_select_strategy`.
    """
    vision = info.files.config.get("vision_config") or vision_defaults
    model_type = vision.get("model_type", vision_defaults["model_type"])
    vision = {"model_type": model_type, **ENCODERS.get(model_type, vision_defaults), **vision}
    strategy = info.files.config.get("vision_feature_select_strategy", strategy)
    is_clip = vision["model_type"] == CLIP_TOWER["model_type"]
    more = (is_clip and strategy == "full") or -(strategy == "default" and not is_clip)
    tiling = tiling_of(modality)
    tile = tiling.plan(1, 1).views[0].tile_size
    if tile != height_width(vision["image_size"]):
        raise ConfigError(f"image_size in vision_config is {vision['image_size']}, but images are resized to {tile}")
    patch = height_width(vision["patch_size"])[0]
    default = LlavaSpec(OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, tiling=tiling, patch=patch, more_rows=int(more))
    return read_pixel_spec(info.preprocessor_json(modality), default, info.merged_kwargs[modality])
