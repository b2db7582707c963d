"""Input processing of Molmo2: a small view of an image and overlapping crops of it; the frames of a video with their times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from ....callers.errors import ConfigError, InputError
from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.geometry import MAX_ITEM_ROWS, FrameSampling
from ....mm.media.policy import DecodeSpec
from ....mm.rules import PromptAttention, Rule
from ....mm.tiling.overlapped import OverlappedTiles
from ....mm.tiling.plan import TilingPolicy
from ....mm.tiling.whole import FixedSize
from ....mm.types import EmbeddingItem, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from ....processors.bases.base import check_one_video
from ....processors.bases.overlapped import group_patches, mark_groups, number_patches
from ....processors.bases.tiles import TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, patchify_crops, read_pixel_spec
from ....processors.interface import Span, TokenRun
from ....processors.options import TIME_KWARGS, is_low_detail
from .rules import media_span, order_keys

_POOLS = {"image": (2, 2), "video": (3, 3)}
_MAX_CROPS = 8
_VOCABULARY, _ADDED_TOKENS = 151936, 128


@dataclass(frozen=True)
class CropSpec(TileSpec):
    """`side`: patches along each side of a crop; `pool`: rows and columns of patches that are pooled to one encoder row."""

    side: int = 27
    pool: tuple[int, int] = (2, 2)


class Molmo2ProcessingInfo(TiledInfo):
    """ProcessingInfo of Molmo2. The tokens of all pictures see each other, start, end and column tokens included.

    These tokens have encoder rows, too, which add nothing to their embeddings. The tensors are `pixel_values`
    `[patches, 3 * patch^2]`, `token_pooling` int64 `[rows, patches of a group]` (see `models.layers.patch_pooling`) and `grid`:
    crops and rows.
    """

    rewrites_prompts = True
    element_format = "point_groups"
    modalities: tuple[str, ...] = ("image", "video")
    prompt_attention = PromptAttention("bidirectional_media", Rule.of(media_span), key_order=Rule.of(order_keys))
    placeholders = {"image": ("<|image|>",), "video": ("<|video|>",)}
    valid_kwargs = {"image": ("detail", "max_crops"), "video": (*TIME_KWARGS, "fps", "max_frames", "min_frames", "num_frames")}
    text_config_defaults = {"vocab_size": _VOCABULARY + _ADDED_TOKENS, "hidden_size": 4096}
    default_flags: ClassVar[Mapping[str, bool | None]] = {
        "image_use_col_tokens": True, "use_single_crop_col_tokens": None, "use_single_crop_start_token": True,
        "video_use_col_tokens": False, "use_frame_special_tokens": True,
    }  # fmt: skip

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        """Count the added tokens as part of the vocabulary."""
        text = files.config.get("text_config") or {}
        size = text.get("vocab_size", _VOCABULARY) + text.get("additional_vocab_size", _ADDED_TOKENS)
        return replace(files, config={**files.config, "text_config": {**text, "vocab_size": size}})

    def resolve_token_ids(self) -> None:
        self.flags: dict[str, Any] = {key: self.files.config.get(key, default) for key, default in self.default_flags.items()}
        if self.flags["use_single_crop_col_tokens"] is None:
            self.flags["use_single_crop_col_tokens"] = self.flags["image_use_col_tokens"]
        token = self.config_token_id
        start, end = token("image_start_token_id", "<im_start>"), token("image_end_token_id", "<im_end>")
        self.patch, self.column = token("image_patch_id", "<im_patch>"), token("image_col_id", "<im_col>")
        self.low = self.high = self.frame = start, end
        if self.flags["use_single_crop_start_token"]:
            self.low = token("low_res_image_start_token_id", "<low_res_im_start>"), end
        if self.flags["use_frame_special_tokens"]:
            self.frame = token("frame_start_token_id", "<frame_start>"), token("frame_end_token_id", "<frame_end>")
        self.bos: int | None = None
        named = self.files.read_json("tokenizer_config.json")
        text = named.get("bos_token") or named.get("eos_token")
        text = text.get("content") if isinstance(text, Mapping) else text
        if isinstance(text, str) and self.files.token_to_id is not None:
            self.bos = self.files.token_to_id(text)

    def resolve_spec(self, modality: str) -> CropSpec:
        json = self.files.image if modality == "image" else self.files.video
        options = {**json, **self.merged_kwargs[modality]}
        patch, (tall, wide) = positive_int_or(json, "patch_size", 14), height_width(json.get("size") or 378)
        pool = height_width(json.get("pooling_size") or _POOLS[modality], "pooling_size")
        margins = json.get("overlap_margins") or (4, 4)
        if tall != wide or tall % patch:
            raise ConfigError(f"size is {tall} x {wide}; it must be a square of whole patches of {patch} pixels")
        if pool != _POOLS[modality] or len(margins) != 2 or sum(margins) > 8:
            choice = f"known are {_POOLS[modality]} and two margins of at most 8 patches together"
            raise ConfigError(f"pooling_size {pool} with overlap_margins {margins} is not supported for a {modality}; {choice}")
        most = 1 if is_low_detail(options) else positive_int_or(options, "max_crops", _MAX_CROPS, _MAX_CROPS)
        crops = OverlappedTiles(patch, tall // patch, (margins[0], margins[1]), most)
        tiling: TilingPolicy = crops if modality == "image" else FixedSize((tall, wide))
        spec = CropSpec(
            IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, filter="bilinear", antialias=False, tiling=tiling, patch=patch,
            side=tall // patch, pool=pool,
        )  # fmt: skip
        return read_pixel_spec({**json, "do_resize": True}, spec, {})  # the published processor ignores do_resize

    def resolve_decode_spec(self) -> DecodeSpec:
        json = self.files.video
        sampling = FrameSampling(fps=json.get("max_fps") or 2.0, max_frames=positive_int_or(json, "num_frames", 64))
        if json.get("frame_sample_mode") == "uniform_last_frame":
            sampling = replace(sampling, fps=json.get("max_fps", 2.0), spread="last")
        return DecodeSpec(self.sampling_policy("video", sampling, {}))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        spec: CropSpec = self.specs[header.modality]
        lines, columns = (-(-spec.side // size) for size in spec.pool)
        if header.frames is not None:
            frames, times = len(header.frames.indices), header.frames.timestamps
            marks = 2 + lines * bool(self.flags["video_use_col_tokens"])
            grid = ItemGeometry(frames, lines, columns, times=times, extra=frames * marks)
        else:
            assert isinstance(spec.tiling, OverlappedTiles)
            tiles = self.plan(header).tiles
            tall, wide = (-(-side // size) for side, size in zip(spec.tiling.canvas(*tiles), spec.pool, strict=True))
            marks = 4 + lines * bool(self.flags["use_single_crop_col_tokens"]) + tall * bool(self.flags["image_use_col_tokens"])
            grid = ItemGeometry(1, tall, wide, extra=lines * columns + marks, tiles=tiles)
        if grid.num_embeds > MAX_ITEM_ROWS:
            raise InputError(f"it makes {grid.num_embeds:,} rows, the limit is {MAX_ITEM_ROWS:,}; use fewer frames")
        return grid

    def embeds_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        raise InputError("rows alone do not tell the grid of this model's items; give what LLM.encode_media returned")

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors that the class describes."""
        assert isinstance(item, ImageItem | VideoItem)
        header, grid = item.header, self.geometry(item.header)
        spec: CropSpec = self.specs[header.modality]
        frames = item.pixels[None] if isinstance(item, ImageItem) else item.frames
        patches = patchify_crops(frames, self.plan(header), spec, PatchLayout(spec.patch), dtype)
        pooling = self._pooling(spec, grid)
        shape = torch.tensor([len(patches) // spec.side**2, len(pooling)])
        kwargs = {
            "pixel_values": FieldElem(patches, FlatField()),
            "token_pooling": FieldElem(torch.from_numpy(pooling), FlatField()),
            "grid": FieldElem(shape, BatchedField(keep_on_cpu=True)),
        }
        return kwargs, grid

    def _pooling(self, spec: CropSpec, grid: ItemGeometry) -> np.ndarray:
        whole = np.arange(spec.side**2).reshape(spec.side, spec.side)
        groups = group_patches(whole, spec.pool)
        if not isinstance(spec.tiling, OverlappedTiles):
            frame = mark_groups(groups, bool(self.flags["video_use_col_tokens"]))
            first = np.arange(grid.t).repeat(len(frame))[:, None] * whole.size
            frames = np.tile(frame, (grid.t, 1))
            return np.where(frames >= 0, frames + first, -1)
        crops = number_patches(spec.tiling, *grid.tiles) + whole.size  # the crops follow the small view
        views = (
            mark_groups(groups, bool(self.flags["use_single_crop_col_tokens"])),
            mark_groups(group_patches(crops, spec.pool), bool(self.flags["image_use_col_tokens"])),
        )
        return np.concatenate(views)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return both views of an image, or before each frame its time in seconds. All tokens but the times are rows."""
        spec: CropSpec = self.specs[modality]
        lines, columns = (-(-spec.side // size) for size in spec.pool)
        if modality == "image":
            small = self._view(self.low, lines, columns, "use_single_crop_col_tokens")
            runs = [*small, *self._view(self.high, geometry.h, geometry.w, "image_use_col_tokens")]
        else:
            frame, runs = self._view(self.frame, lines, columns, "video_use_col_tokens"), list[TokenRun]()
            for number, time in enumerate(geometry.times):
                runs += [TokenRun(self.encode(f"{' ' if number else ''}{time:.1f} ")), *frame]
        return Span(sum(run.num_tokens for run in runs), geometry.num_embeds, lambda: runs)

    def _view(self, around: tuple[int, int], lines: int, columns: int, flag: str) -> list[TokenRun]:
        line = (self.patch,) * columns + (self.column,) * bool(self.flags[flag])
        return [TokenRun((around[0],), 1, True), TokenRun(line, lines, True), TokenRun((around[1],), 1, True)]

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Add the first token, if it is missing. InputError for images beside a video, or for several videos."""
        check_one_video(items)
        return ids if self.bos is None or list(ids[:1]) == [self.bos] else [self.bos, *ids]

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return self.preprocess_prompt(ids, items)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer frames, or for an image of one crop; None if that is too large."""
        spec: CropSpec = self.specs[modality]
        lines, columns = (-(-spec.side // size) for size in spec.pool)
        view = lines * (columns + 1) + 2  # at most
        if modality == "video":
            return {"num_frames": rows // view} if 0 < rows // view < grid[0] else None
        return {"max_crops": 1} if grid[1:] != (lines, columns) and rows >= 2 * view else None
