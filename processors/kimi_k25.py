"""What Kimi-K2.5 wants to be fed: pictures and timed pieces of videos in one stream, never enlarged. Knows no model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from ..mm.errors import ConfigError, InputError
from ..mm.fields import BatchedField, FieldElem, FlatField
from ..mm.geometry import PatchBudget, SamplingPolicy, fit_patches
from ..mm.media.policy import DecodeSpec
from ..mm.parse import MultiModalDataParser
from ..mm.types import EmbeddingItem, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VisionChunk
from .files import ProcessorFiles
from .interface import Span
from .options import for_modality, with_sampling
from .patches import LOW_DETAIL, PatchSpec, patchify, read_spec
from .pictures import RESAMPLE, resized

OPTIONS = {"vision_chunk": ("detail", "fps", "max_duration", "max_patches", "max_pixels", "num_frames", "resample", "size")}
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
    def budget(self) -> PatchBudget:
        return PatchBudget(self.cut.patch, self.cut.merge, self.max_patches, self.max_side)


class KimiK25ProcessingInfo:
    """ProcessingInfo of Kimi-K2.5. A picture's slot stands between its marks in the prompt, that of a video or piece alone.

    The encoder averages each patch over the frames of its chunk, so a chunk has as many rows as one frame.
    """

    modalities: tuple[str, ...] = ("vision_chunk",)
    prefill = "causal"

    def __init__(self, files: ProcessorFiles, *options: Mapping[str, Any]) -> None:
        if files.encode is None:
            raise ConfigError("Kimi-K2.5 writes times as text, which takes the tokenizer of the checkpoint")
        self._files, self._options, self._encode = files, options, files.encode
        image, clip = (
            _read_json(files.image, "in_patch_limit"),
            _read_json(files.video or files.image, "in_patch_limit_each_frame"),
        )
        self.image, self.frame = _read_chunk(image, IMAGE_PATCHES), _read_chunk(clip, FRAME_PATCHES)
        sampling = with_sampling(SamplingPolicy(fps=DEFAULT_FPS), {key: clip.get(key) for key in ("fps", "num_frames")})
        sampling = replace(sampling, max_frames=clip.get("max_frames") or sampling.max_frames)
        for layer in options:
            chosen = for_modality(layer, "vision_chunk", OPTIONS)
            self.image, self.frame = _limited(self.image, chosen), _limited(self.frame, chosen)
            sampling = with_sampling(sampling, chosen)
        self.decode_spec = DecodeSpec(sampling, frames_per_chunk=self.frame.cut.temporal)
        self.marks = _Marks.read(files.config)
        self.slot_ids: Mapping[str, int] = {"vision_chunk": self.marks.picture}

    def parser(self) -> MultiModalDataParser:
        """Pictures, videos and pieces of videos in the order of their slots."""
        return MultiModalDataParser(self.modalities)

    def tuned(self, options: Mapping[str, Any]) -> Self:
        return type(self)(self._files, *self._options, options)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Grid of a picture (no times) or of a chunk of frames, from the header alone; InputError for an empty one."""
        spec = self.image if header.frames is None else self.frame
        tall, wide = (-(-side // spec.cut.patch) for side in _padded(fit_patches(*header.size, spec.budget), spec))
        times = () if header.frames is None else header.frames.timestamps
        count = len(times) or 1
        return ItemGeometry(count, tall, wide, spec.cut.merge, times=times, merge_t=count)

    def rows_geometry(self, item: EmbeddingItem) -> ItemGeometry:
        raise InputError("Kimi-K2.5 takes no ready-made rows; give the picture or video")

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """`pixel_values` `[patches, 3, patch, patch]`, row by row of each frame, and `grid_thw` int64 `[3]`."""
        if not isinstance(item, VisionChunk):
            raise TypeError(f"a {type(item).__name__} is no vision chunk")
        grid, spec = self.geometry(item.header), self.image if item.plan is None else self.frame
        single = replace(spec.cut, merge=1, temporal=1)  # patches lie row by row, each of one frame
        flat = patchify(_fitted(item.frames, grid, spec), replace(grid, merge=1, merge_t=1), single, dtype)
        pixels = flat.view(-1, 3, single.patch, single.patch)
        shape = torch.tensor([grid.t, grid.h, grid.w])
        return {
            "pixel_values": FieldElem(pixels, FlatField()),
            "grid_thw": FieldElem(shape, BatchedField(keep_on_cpu=True)),
        }, grid

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """A picture is its embeddings alone, its marks are in the prompt; a chunk brings its time and marks with it."""
        rows, marks = geometry.num_embeds, self.marks
        if not geometry.times:
            return Span((marks.picture,) * rows)
        before = (*self._encode(timestamp(geometry.times[0])), marks.begin, *self._encode("video"), marks.content)
        mask = torch.zeros(len(before) + rows + 1, dtype=torch.bool)
        mask[len(before) : -1] = True
        return Span((*before, *(marks.frame,) * rows, marks.end), mask)

    def shrink_options(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        """Fewer patches a frame and, where less than LEAST_ROWS a chunk would be left, fewer frames."""
        chunks = -(-grid[0] // self.decode_spec.frames_per_chunk)
        kept = max(1, min(chunks, rows // LEAST_ROWS))
        spec = self.frame if grid[0] > 1 else self.image
        patches = min(max(1, rows // kept) * spec.cut.merge**2, spec.max_patches)
        while patches > 1 and _most_rows(grid, patches, spec) * kept > rows:
            patches = patches * 15 // 16
        frames = {"num_frames": kept * self.decode_spec.frames_per_chunk, "fps": None} if kept < chunks else {}
        return {"max_patches": patches, **frames}

    def options_key(self, modality: str) -> str:
        """The resolved specs, and which frames of a video are used."""
        return json.dumps([asdict(self.image), asdict(self.frame), asdict(self.decode_spec.sampling)], sort_keys=True)


@dataclass(frozen=True)
class _Marks:
    """Token ids: what stands around a picture or frame, and in the place of each of its embeddings."""

    begin: int
    content: int
    end: int
    picture: int
    frame: int

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """From config.json, which names all marks but `content`: in the published vocabulary it follows `begin`.

        The token of a video's embeddings lies outside the published vocabulary; the picture's then takes its place, as
        in the code that the first checkpoints came with.
        """
        begin = config.get("vision_start_token_id", 163602)
        picture = config.get("image_token_id", config.get("media_placeholder_token_id", 163605))
        frame = config.get("video_token_id", 163840)
        vocabulary = (config.get("text_config") or config).get("vocab_size", 163840)
        ids = (begin, begin + 1, config.get("vision_end_token_id", 163604), picture)
        if not all(isinstance(token, int) and 0 <= token < vocabulary for token in ids):
            raise ConfigError(f"the marks of vision in config.json, {ids}, are not all in the vocabulary of {vocabulary}")
        return cls(*ids, frame if 0 <= frame < vocabulary else picture)


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


def _fitted(frames: Tensor, grid: ItemGeometry, spec: ChunkSpec) -> Tensor:
    """uint8 `[n, h, w, 3]` shrunk to its budget and filled up with black on the right and below, to the grid."""
    target = fit_patches(int(frames.shape[1]), int(frames.shape[2]), spec.budget)
    small = resized(frames.permute(0, 3, 1, 2), target, spec.cut).permute(0, 2, 3, 1)
    return F.pad(small, (0, 0, 0, grid.w * spec.cut.patch - target[1], 0, grid.h * spec.cut.patch - target[0]))


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
