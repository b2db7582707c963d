"""What Kimi-K2.5 wants to be fed: pictures and timed pieces of videos in one stream, never enlarged. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..mm.errors import ConfigError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.geometry import PatchBudget, SamplingPolicy, fit_patches
from ..mm.media.policy import DecodeSpec
from ..mm.tiling import CropPlan, Resize, View, Window
from ..mm.types import FramePlan, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VisionChunk
from .base import FamilyInfo, build_span
from .files import ProcessorFiles
from .interface import Span
from .options import with_sampling
from .patches import LOW_DETAIL, PatchSpec, read_spec
from .pictures import RESAMPLE, patch_rows

CUT = PatchSpec(merge=2, temporal=4, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  # the published processors' own defaults
IMAGE_PATCHES, FRAME_PATCHES, SIDE_PATCHES = 16384, 4096, 512
DEFAULT_FPS = 2.0  # frames used per second of a video
LEAST_ROWS = 16  # of a chunk that is made smaller; below that frames are dropped
# The published JSON of the first checkpoints, all under one key, in the names of the later ones.
_OLD_NAMES = {
    "merge_kernel_size": "merge_size",
    "temporal_merge_kernel_size": "temporal_patch_size",
    "sample_fps": "fps",
    "max_num_frames_each_video": "max_frames",
}


@dataclass(frozen=True)
class ChunkSpec:
    """How a picture, or a frame, is cut: most patches in all and along a side."""

    cut: PatchSpec
    max_patches: int
    max_side: int

    @property
    def merge(self) -> int:
        return self.cut.merge

    @property
    def budget(self) -> PatchBudget:
        return PatchBudget(self.cut.patch, self.cut.merge, self.max_patches, self.max_side)


@dataclass(frozen=True)
class ChunkSpecs:
    """Of pictures and of frames."""

    image: ChunkSpec
    frame: ChunkSpec


class KimiK25ProcessingInfo(FamilyInfo):
    """ProcessingInfo of Kimi-K2.5. A picture's slot stands between its marks in the prompt, that of a video or piece alone.

    The encoder averages each patch over the frames of its chunk, so a chunk has as many rows as one frame.
    """

    modalities: tuple[str, ...] = ("vision_chunk",)
    slots = {"vision_chunk": ("image_token_id", "media_placeholder_token_id", 163605)}
    known = {"vision_chunk": ("detail", "fps", "max_duration", "max_patches", "max_pixels", "num_frames", "resample", "size")}
    published = {"vocab_size": 163840}
    rows = None

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        super().__init__(files, *options)
        self.encode("video")  # or it says that the tokenizer is missing
        self.picture, self.begin = self.slot_ids["vision_chunk"], self.token("vision_start_token_id", 163602)
        # config.json names no `content`: in the published vocabulary it follows `begin`.
        self.content, self.end = self.begin + 1, self.token("vision_end_token_id", 163604)
        self.video = files.config.get("video_token_id", 163840)
        # The token of a video's embeddings lies outside the published vocabulary; the picture's then takes its place, as
        # in the code that the first checkpoints came with.
        self.frame = self.video if 0 <= self.video < self.text["vocab_size"] else self.picture

    def read(self, modality: str) -> ChunkSpecs:
        image, frame = _read_json(self.files.image, "in_patch_limit"), self._clip()
        specs = ChunkSpecs(_read_chunk(image, IMAGE_PATCHES), _read_chunk(frame, FRAME_PATCHES))
        for layer in self.layers[modality]:
            specs = ChunkSpecs(_limited(specs.image, layer), _limited(specs.frame, layer))
        return specs

    def decoding(self) -> DecodeSpec:
        clip = self._clip()
        own = with_sampling(SamplingPolicy(fps=DEFAULT_FPS), {key: clip.get(key) for key in ("fps", "num_frames")})
        own = replace(own, max_frames=clip.get("max_frames") or own.max_frames)
        sampling = self.sampling("vision_chunk", own)
        return DecodeSpec(sampling, frames_per_chunk=self.specs["vision_chunk"].frame.cut.temporal)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Grid of a picture (no times) or of a chunk of frames, from the header alone; InputError for an empty one."""
        spec = self._spec(header.frames)
        tall, wide = (-(-side // spec.cut.patch) for side in _padded(fit_patches(*header.size, spec.budget), spec))
        times = () if header.frames is None else header.frames.timestamps
        count = len(times) or 1
        return ItemGeometry(count, tall, wide, spec.cut.merge, times=times, merge_t=count)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`pixel_values` `[patches, 3, patch, patch]`, row by row of each frame, and `grid_thw` int64 `[3]`."""
        if not isinstance(item, VisionChunk):
            raise TypeError(f"a {type(item).__name__} is no vision chunk")
        grid, spec = self.geometry(item.header), self._spec(item.plan)
        cut, small = spec.cut, Resize(*fit_patches(*item.header.size, spec.budget))
        filled = Window(0, 0, grid.h * cut.patch, grid.w * cut.patch)  # with black, on the right and below
        flat = patch_rows(item.frames, CropPlan((View((small, filled)),)), cut, cut.patch, dtype=dtype)
        pixels = flat.view(-1, 3, cut.patch, cut.patch)  # row by row, each of one frame
        shape = torch.tensor([grid.t, grid.h, grid.w])
        return {
            "pixel_values": FieldElem(pixels, FlatField()),
            "grid_thw": FieldElem(shape, BatchedField(keep_on_cpu=True)),
        }, grid

    def prompt_ids(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """A video's own token, as published templates write it, is its slot where it is no embedding of a chunk."""
        out: list[int] = []
        for token in ids:
            slot = token == self.video and out[-1:] not in ([self.content], [self.video])
            out.append(self.picture if slot else token)
        return out

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """A picture is its embeddings alone, its marks are in the prompt; a chunk brings its time and marks with it."""
        if not geometry.times:
            return build_span([geometry.num_embeds], self.picture)
        time = timestamp(geometry.times[0])
        before = (*self.encode(time), self.begin, *self.encode("video"), self.content)
        return build_span([before, geometry.num_embeds, (self.end,)], self.frame)

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Fewer patches a frame and, where less than LEAST_ROWS a chunk would be left, fewer frames."""
        chunks = -(-grid[0] // self.decode_spec.frames_per_chunk)
        kept = max(1, min(chunks, rows // LEAST_ROWS))
        specs = self.specs[modality]
        spec = specs.frame if grid[0] > 1 else specs.image
        patches = min(max(1, rows // kept) * spec.cut.merge**2, spec.max_patches)
        while patches > 1 and _most_rows(grid, patches, spec) * kept > rows:
            patches = patches * 15 // 16
        frames = {"num_frames": kept * self.decode_spec.frames_per_chunk, "fps": None} if kept < chunks else {}
        return {"max_patches": patches, **frames}

    def _clip(self) -> Mapping[str, Any]:
        return _read_json(self.files.video or self.files.image, "in_patch_limit_each_frame")

    def _spec(self, plan: FramePlan | None) -> ChunkSpec:
        specs: ChunkSpecs = self.specs["vision_chunk"]
        return specs.image if plan is None else specs.frame


def timestamp(seconds: float) -> str:
    """`"hh:mm:ss.mmm"`, cut to thousandths, hours of the day as in the published processor."""
    seconds = max(0.0, seconds)
    whole = int(seconds)
    return f"{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}.{int(seconds % 1 * 1000):03d}"


def _padded(size: tuple[int, int], spec: ChunkSpec) -> tuple[int, int]:
    factor = spec.cut.patch * spec.cut.merge
    return -(-size[0] // factor) * factor, -(-size[1] // factor) * factor


def _most_rows(grid: tuple[int, int, int], patches: int, spec: ChunkSpec) -> int:
    """Rows, with at most `patches` patches, of the largest picture that may have come to this grid, some of it filling.

    How many patches count is floored, so the largest are the fullest and those short of one more patch; what the limit
    of `spec` has made smaller before shrinks by the ratio of the two limits.
    """
    cut, budget = spec.cut, replace(spec.budget, max_patches=patches)
    missing = (0, 1, cut.patch * (cut.merge - 1) + 1, cut.patch * cut.merge - 1)
    most, ratio = 1, math.sqrt(patches / spec.max_patches)
    for size in ((grid[1] * cut.patch - less, grid[2] * cut.patch - more) for less in missing for more in missing):
        fitted = fit_patches(*size, budget)
        tall, wide = (min(max(new, math.ceil(old * ratio)), old) for new, old in zip(fitted, size, strict=True))
        tall, wide = _padded((tall, wide), spec)
        most = max(most, tall * wide // (cut.patch * cut.merge) ** 2)
    return most


def _read_json(preprocessor: Mapping[str, Any], limit: str) -> Mapping[str, Any]:
    """A preprocessor's JSON in the later names; `limit` is the old name of its `max_patches`."""
    old = preprocessor.get("media_proc_cfg")
    if old is None:
        return preprocessor
    if old.get("fixed_output_tokens") is not None or old.get("in_patch_limit_video") is not None:
        raise ConfigError("fixed_output_tokens and in_patch_limit_video of media_proc_cfg are not offered")
    side, most = old.get("patch_limit_on_one_side", SIDE_PATCHES), old.get(limit) or old.get("in_patch_limit")
    new = {_OLD_NAMES.get(key, key): value for key, value in old.items()}
    return {**new, "size": {"max_height": side, "max_width": side}, **({} if most is None else {"max_patches": most})}


def _read_chunk(preprocessor: Mapping[str, Any], max_patches: int) -> ChunkSpec:
    cut = read_spec({key: value for key, value in preprocessor.items() if key != "size"}, CUT)
    spec = ChunkSpec(cut, max_patches, SIDE_PATCHES)
    return _limited(spec, {key: preprocessor[key] for key in ("size", "max_patches") if preprocessor.get(key)})


def _limited(spec: ChunkSpec, options: Mapping[str, Any]) -> ChunkSpec:
    """The spec with other limits; ConfigError for one that is no positive whole number."""
    detail, side, area = options.get("detail", "auto"), _side(options.get("size"), spec.max_side), spec.cut.patch**2
    if detail not in ("auto", "high", "low"):
        raise ConfigError(f"detail is {detail!r}; the known ones are auto, high and low")
    resample = options.get("resample", spec.cut.resample)
    if resample not in RESAMPLE:
        raise ConfigError(f"resample is {resample!r}; the known ones are {' and '.join(RESAMPLE)}")
    most = min(spec.max_patches, LOW_DETAIL // area) if detail == "low" else spec.max_patches
    given = {key: options[key] for key in ("max_patches", "max_pixels") if key in options}
    for key, value in (*given.items(), ("size", side)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{key} is {value!r}; give a positive whole number")
    limits = [value if key == "max_patches" else max(1, value // area) for key, value in given.items()]
    return ChunkSpec(replace(spec.cut, resample=resample), min(limits) if limits else most, side)


def _side(size: object, default: int) -> Any:
    if size is None:
        return default
    if not isinstance(size, Mapping) or size.keys() != {"max_height", "max_width"} or len(set(size.values())) != 1:
        raise ConfigError(f"size holds max_height and max_width, the same number of patches, not {size}")
    return size["max_height"]
