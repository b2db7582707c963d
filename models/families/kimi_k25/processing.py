"""Input processing of Kimi-K2.5, images and timed chunks of videos in one stream, and of Kimi-VL: nothing is enlarged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....callers.errors import ConfigError, InputError
from ....kernels.pixels.layout import PatchLayout
from ....mm.fields import BatchedField, FieldElem, FlatField
from ....mm.geometry import FrameSampling, PatchBudget, fit_patches
from ....mm.media.policy import DecodeSpec
from ....mm.tiling.plan import CropPad, CropPlan, Resize, TiledView
from ....mm.tiling.sizes import whole_multiples
from ....mm.types import FramePlan, ImageItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VisionChunk
from ....processors.bases.base import BaseProcessingInfo
from ....processors.bases.tiles import height_width, positive_int_or
from ....processors.images import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD, apply_resample, patchify_crops
from ....processors.interface import Span
from ....processors.options import TIME_KWARGS, check_keeps_size, is_low_detail
from ....processors.patches import LOW_DETAIL, PatchSpec, read_patch_spec
from ....processors.spans import build_span

PATCHES = PatchSpec(merge=2, temporal=4, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), can_keep_size=True)  # published defaults
CLIP_PATCHES = PatchSpec(merge=2, mean=OPENAI_CLIP_MEAN, std=OPENAI_CLIP_STD)  # Kimi-VL's default
KIMI_VL_SIDE = 510  # patches along a side; the published processor refuses 512
IMAGE_PATCHES, FRAME_PATCHES, SIDE_PATCHES = 16384, 4096, 512  # limits: of an image, of a frame, along a side
DEFAULT_FPS = 2.0  # frames used per second of a video
MIN_ROWS = 16  # of a shrunk chunk; below that, frames are dropped
_LIMITS = ("max_patches", "max_pixels", "size", "detail")
_KIMI_VL_KEYS = ("patch_size", "merge_size", "image_mean", "image_std")  # all that its published processor reads of pixels
# Keys of the first checkpoints' JSON -> keys of the later ones'.
_OLD_NAMES = {
    "merge_kernel_size": "merge_size",
    "temporal_merge_kernel_size": "temporal_patch_size",
    "sample_fps": "fps",
    "max_num_frames_each_video": "max_frames",
}


@dataclass(frozen=True)
class ChunkSpec:
    """Parameters for cutting an image or a frame into patches, with limits on all patches and on those along a side.

    `pads`: sides are padded to whole rows on the right and below, otherwise cropped to whole patches on both ends.
    """

    patches: PatchSpec
    max_patches: int
    max_side: int
    pads: bool = True

    @property
    def merge(self) -> int:
        return self.patches.merge

    @property
    def budget(self) -> PatchBudget:
        return PatchBudget(self.patches.patch, self.patches.merge, self.max_patches, self.max_side)


@dataclass(frozen=True)
class ChunkSpecs:
    """The specs of images and of frames."""

    image: ChunkSpec
    frame: ChunkSpec


class KimiK25ProcessingInfo(BaseProcessingInfo):
    """ProcessingInfo of Kimi-K2.5. The prompt has start and end tokens around images, but not around videos and chunks.

    The encoder averages each patch over the frames of a chunk, so a chunk has as many rows as one frame.
    """

    rewrites_prompts = True
    modalities: tuple[str, ...] = ("vision_chunk",)
    placeholders = {"vision_chunk": ("image_token_id", "media_placeholder_token_id", 163605)}
    valid_kwargs = {
        "vision_chunk": (*TIME_KWARGS, "detail", "fps", "max_patches", "max_pixels", "num_frames", "resample", "size")
    }
    text_config_defaults = {"vocab_size": 163840}
    embeds_layout = None

    def resolve_token_ids(self) -> None:
        self.encode("video")  # raises if the tokenizer is missing
        self.image, self.begin = self.placeholder_ids["vision_chunk"], self.config_token_id("vision_start_token_id", 163602)
        # config.json does not name `content`: in the published vocabulary it follows `begin`.
        self.content, self.end = self.begin + 1, self.config_token_id("vision_end_token_id", 163604)
        self.video = self.files.config.get("video_token_id", 163840)
        # The token of video rows is outside the published vocabulary; the image token then takes its place, as in the code
        # of the first checkpoints.
        self.frame = self.video if 0 <= self.video < self.text_config["vocab_size"] else self.image

    def resolve_spec(self, modality: str) -> ChunkSpecs:
        image, frame = _read_json(self.files.image, "in_patch_limit"), self._video_json()
        specs = ChunkSpecs(_read_chunk(image, IMAGE_PATCHES), _read_chunk(frame, FRAME_PATCHES))
        for kwargs in self.processor_kwargs[modality]:
            if specs.image.patches.keeps_size or specs.frame.patches.keeps_size:
                check_keeps_size(kwargs, _LIMITS)
            specs = ChunkSpecs(_limited(specs.image, kwargs), _limited(specs.frame, kwargs))
        return specs

    def resolve_decode_spec(self) -> DecodeSpec:
        json = self._video_json()
        default = FrameSampling(fps=DEFAULT_FPS)
        default = replace(default, max_frames=json.get("max_frames") or default.max_frames)
        sampling = self.sampling_policy("vision_chunk", default, json)
        return DecodeSpec(sampling, frames_per_chunk=self.specs["vision_chunk"].frame.patches.temporal)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid of an image (without times) or of a chunk, from the header alone; InputError if it is empty."""
        spec = self._spec(header.frames)
        _, window = _steps(header, spec)
        tall, wide = window.height // spec.patches.patch, window.width // spec.patches.patch
        times = () if header.frames is None else header.frames.timestamps
        count = len(times) or 1
        return ItemGeometry(count, tall, wide, spec.patches.merge, times=times, merge_t=count)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return `pixel_values` `[patches, 3, patch, patch]`, row by row of each frame, and `grid_thw` int64 `[3]`."""
        if not isinstance(item, VisionChunk | ImageItem):
            raise TypeError(f"a {type(item).__name__} is neither a VisionChunk nor an image")
        frames = item.pixels[None] if isinstance(item, ImageItem) else item.frames
        grid, spec = self.geometry(item.header), self._spec(item.header.frames)
        patches, plan = spec.patches, CropPlan((TiledView(_steps(item.header, spec)),))
        flat = patchify_crops(frames, plan, patches, PatchLayout(patches.patch), dtype)
        pixels = flat.view(-1, 3, patches.patch, patches.patch)
        shape = torch.tensor([grid.t, grid.h, grid.w])
        return {
            "pixel_values": FieldElem(pixels, FlatField()),
            "grid_thw": FieldElem(shape, BatchedField(keep_on_cpu=True)),
        }, grid

    def kept_size(self, modality: str, size: tuple[int, int]) -> tuple[int, int]:
        spec = self.specs[modality].image
        side = spec.patches.patch * spec.patches.merge
        return whole_multiples(size, side) if spec.patches.keeps_size or not spec.pads else size

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace the video token of published templates with the placeholder, unless it is part of an expanded chunk."""
        out: list[int] = []
        for token in ids:
            is_placeholder = token == self.video and out[-1:] not in ([self.content], [self.video])
            out.append(self.image if is_placeholder else token)
        return out

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows of an image; for a chunk, also its timestamp, and the tokens before and after its rows."""
        if not geometry.times:
            return build_span([geometry.num_embeds], self.image)
        time = timestamp(geometry.times[0])
        before = (*self.encode(time), self.begin, *self.encode("video"), self.content)
        return build_span([before, geometry.num_embeds, (self.end,)], self.frame)

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Return options for fewer patches per frame and, if a chunk would have less than MIN_ROWS rows, fewer frames."""
        chunks = -(-grid[0] // self.decode_spec.frames_per_chunk)
        kept = max(1, min(chunks, rows // MIN_ROWS))
        specs = self.specs[modality]
        spec = specs.frame if grid[0] > 1 else specs.image
        if spec.patches.keeps_size:
            kept = rows * spec.patches.merge**2 // (grid[1] * grid[2])
            return {"num_frames": kept * self.decode_spec.frames_per_chunk, "fps": None} if 0 < kept < chunks else None
        patches = min(max(1, rows // kept) * spec.patches.merge**2, spec.max_patches)
        while patches > 1 and _most_rows(grid, patches, spec) * kept > rows:
            patches = patches * 15 // 16
        frames = {"num_frames": kept * self.decode_spec.frames_per_chunk, "fps": None} if kept < chunks else {}
        return {"max_patches": patches, **frames}

    def _video_json(self) -> Mapping[str, Any]:
        return _read_json(self.files.video or self.files.image, "in_patch_limit_each_frame")

    def _spec(self, plan: FramePlan | None) -> ChunkSpec:
        (specs,) = self.specs.values()
        assert isinstance(specs, ChunkSpecs)
        return specs.image if plan is None else specs.frame


class KimiVLProcessingInfo(KimiK25ProcessingInfo):
    """ProcessingInfo of Kimi-VL: images only, which Pillow resizes; the prompt has the tokens around them."""

    modalities = ("image",)
    placeholders = {"image": ("media_placeholder_token_id", 163605)}
    valid_kwargs = {"image": ("detail", "max_patches", "max_pixels", "resample", "size")}
    default_kwargs = {"resample": "pillow"}

    def resolve_token_ids(self) -> None:
        self.image = self.placeholder_ids["image"]

    def resolve_spec(self, modality: str) -> ChunkSpecs:
        json = {_OLD_NAMES.get(key, key): value for key, value in self.files.image.items()}
        json["merge_size"], wide = height_width(json.get("merge_size", 2), "merge_kernel_size")
        if wide != json["merge_size"]:
            raise ConfigError(f"merge_kernel_size {json['merge_size']}x{wide} is not supported; both sides must be equal")
        patches = read_patch_spec({key: json[key] for key in _KIMI_VL_KEYS if key in json}, CLIP_PATCHES)
        spec = ChunkSpec(
            patches, positive_int_or(json, "in_token_limit", 4096), KIMI_VL_SIDE, bool(json.get("pad_input", False))
        )
        for kwargs in self.processor_kwargs[modality]:
            spec = _limited(spec, kwargs)
        return ChunkSpecs(spec, spec)

    def resolve_decode_spec(self) -> DecodeSpec:
        return DecodeSpec()

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        return ids


def timestamp(seconds: float) -> str:
    """Return `"hh:mm:ss.mmm"`, truncated to milliseconds and modulo 24 hours, as in the published processor."""
    seconds = max(0.0, seconds)
    whole = int(seconds)
    return f"{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"


def _steps(header: MediaHeader, spec: ChunkSpec) -> tuple[Resize, CropPad]:
    """Return how an image or a frame is resized and then padded or cropped.

    Raises:
        InputError: a model that does not resize, or crops instead of padding, gets sides without whole rows.
    """
    patches, fitted = spec.patches, fit_patches(*header.size, spec.budget)
    side, (tall, wide) = patches.patch * patches.merge, fitted
    if patches.keeps_size and (fitted != header.size or tall % side or wide % side):
        needed = f"sides that are multiples of {side} pixels, and at most {spec.max_patches:,} patches of {patches.patch}"
        raise InputError(
            f"this model does not resize images (do_resize=false); give {needed}, not {header.width}x{header.height}"
        )
    if spec.pads:
        return Resize.to(fitted), CropPad.window(_padded(fitted, spec))  # black on the right and below
    cropped = tall // patches.patch * patches.patch, wide // patches.patch * patches.patch
    if not all(cropped) or cropped[0] % side or cropped[1] % side:
        count = f"{cropped[1] // patches.patch} x {cropped[0] // patches.patch} whole patches of {patches.patch} pixels"
        raise InputError(
            f"its {wide}x{tall} pixels have {count}, but a row of this model takes {patches.merge} x {patches.merge} "
            f"(pad_input=false in the preprocessor JSON); crop it to multiples of {side} pixels"
        )
    top, left = (round((whole - part) / 2) for whole, part in zip(fitted, cropped, strict=True))
    return Resize.to(fitted), CropPad.window(cropped, top, left)


def _padded(size: tuple[int, int], spec: ChunkSpec) -> tuple[int, int]:
    factor = spec.patches.patch * spec.patches.merge
    return -(-size[0] // factor) * factor, -(-size[1] // factor) * factor


def _most_rows(grid: tuple[int, int, int], patches: int, spec: ChunkSpec) -> int:
    """Return the most rows that an image with this (padded) grid may have after it is limited to `patches` patches.

    Numbers of patches are rounded down, so the extreme images fill the grid or are one pixel short of one more patch. An image
    that the limit of `spec` already shrank shrinks further by the ratio of the two limits.
    """
    side, merge, budget = spec.patches.patch, spec.patches.merge, replace(spec.budget, max_patches=patches)
    missing = (0, 1, side * (merge - 1) + 1, side * merge - 1)
    most, ratio = 1, math.sqrt(patches / spec.max_patches)
    for size in ((grid[1] * side - less, grid[2] * side - more) for less in missing for more in missing):
        fitted = fit_patches(*size, budget)
        tall, wide = (min(max(new, math.ceil(old * ratio)), old) for new, old in zip(fitted, size, strict=True))
        tall, wide = _padded((tall, wide), spec)
        most = max(most, tall * wide // (side * merge) ** 2)
    return most


def _read_json(preprocessor: Mapping[str, Any], limit: str) -> Mapping[str, Any]:
    """Return a preprocessor's JSON with the later keys; `limit` is the old key of `max_patches`."""
    old = preprocessor.get("media_proc_cfg")
    if old is None:
        return preprocessor
    if old.get("fixed_output_tokens") is not None or old.get("in_patch_limit_video") is not None:
        raise ConfigError("fixed_output_tokens and in_patch_limit_video of media_proc_cfg are not supported; remove them")
    side, most = old.get("patch_limit_on_one_side", SIDE_PATCHES), old.get(limit) or old.get("in_patch_limit")
    new = {_OLD_NAMES.get(key, key): value for key, value in old.items()}
    return {**new, "size": {"max_height": side, "max_width": side}, **({} if most is None else {"max_patches": most})}


def _read_chunk(preprocessor: Mapping[str, Any], max_patches: int) -> ChunkSpec:
    patches = read_patch_spec({key: value for key, value in preprocessor.items() if key != "size"}, PATCHES)
    spec = ChunkSpec(patches, max_patches, SIDE_PATCHES)
    return _limited(spec, {key: preprocessor[key] for key in ("size", "max_patches") if preprocessor.get(key)})


def _limited(spec: ChunkSpec, options: Mapping[str, Any]) -> ChunkSpec:
    """Return the spec with the limits of `options`; ConfigError unless they are positive integers."""
    area = spec.patches.patch**2
    most = min(spec.max_patches, LOW_DETAIL // area) if is_low_detail(options) else spec.max_patches
    bounds = {key: positive_int_or(options, key, 1) for key in ("max_patches", "max_pixels") if key in options}
    limits = [value if key == "max_patches" else max(1, value // area) for key, value in bounds.items()]
    side = positive_int_or({"size": _side(options.get("size"))}, "size", spec.max_side)
    return ChunkSpec(apply_resample(spec.patches, options), min(limits, default=most), side, spec.pads)


def _side(size: object) -> Any:
    """Return the limit along a side in patches, or None."""
    if size is None:
        return None
    if not isinstance(size, Mapping) or size.keys() != {"max_height", "max_width"} or len(set(size.values())) != 1:
        raise ConfigError(f"size must hold max_height and max_width, the same number of patches, not {size}")
    return size["max_height"]
