"""Input processing of Nemotron-Nano-VL: images as tiles or at their own resolution, videos with a text before each frame."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch

from ....callers.errors import ConfigError
from ....mm.fields import FieldElem, FlatField
from ....mm.geometry import FrameSampling, pixel_shuffle_side, retained_rows, video_pruning_rate
from ....mm.media.policy import DecodeSpec
from ....mm.tiling.aspect import AspectTiles, ClosestTiles
from ....mm.tiling.plan import TilingPolicy
from ....mm.tiling.whole import FixedSize, PatchRange, PatchTarget
from ....mm.types import FramePlan, ItemGeometry, MediaHeader, MediaItem, MultiModalKwargsItem, VideoItem
from ....processors.bases.base import replace_text
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width, positive_int_or
from ....processors.files import ProcessorFiles
from ....processors.images import read_pixel_spec
from ....processors.interface import Span
from ....processors.options import MAX_TILES, TIME_KWARGS, is_low_detail
from ....processors.spans import Piece, build_span

_VIDEO = "<video>"
_FRAME_TEXT = 48  # tokens around the rows of a frame, at most


class LlamaNemotronVLProcessingInfo(TiledInfo):
    """ProcessingInfo of Llama-Nemotron-Nano-VL (v1): tiles that Pillow resizes, and a thumbnail."""

    modalities: tuple[str, ...] = ("image",)
    placeholders = {"image": ("img_context_token_id", "<image>")}
    valid_kwargs: Mapping[str, Any] = {"image": (*TILE_KWARGS, "max_num_tiles")}
    default_kwargs: Mapping[str, Any] = {"resample": "pillow"}
    tiles: ClassVar[type[AspectTiles]] = ClosestTiles
    tile_limits: ClassVar[tuple[str, str]] = ("min_num_tiles", "max_num_tiles")  # keys of the preprocessor's JSON
    unrounded: ClassVar[bool] = False  # see PixelSpec

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        config, image = files.config, dict(files.image)
        for key, name in (("image_mean", "norm_mean"), ("image_std", "norm_std")):
            image[key] = image.get(key) or image.get(name) or config.get(name)
        image["do_normalize"] = True  # the published encoder may do it itself
        image["use_thumbnail"] = image.get("use_thumbnail", config.get("use_thumbnail", True))
        text = config.get("llm_config") or config.get("text_config") or {}
        return replace(files, image=image, config={**config, "text_config": text})

    def resolve_spec(self, modality: str) -> TileSpec:
        config = self.files.config
        vision = config.get("vision_config") or {}
        patch = positive_int_or(config, "patch_size", vision.get("patch_size", 16))
        merge = pixel_shuffle_side(config)
        tile = height_width(config.get("force_image_size") or vision.get("image_size") or 512, "force_image_size")
        tiling = self._video_tiling(tile, patch, merge) if modality == "video" else self._image_tiling(tile, patch, merge)
        spec = TileSpec(tiling=tiling, patch=patch, merge=merge, unrounded=self.unrounded)
        return read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality])

    def _image_tiling(self, tile: tuple[int, int], patch: int, merge: int) -> TilingPolicy:
        options = {**self.files.image, **self.merged_kwargs["image"]}
        least, most = (positive_int_or(options, key, n, MAX_TILES) for key, n in zip(self.tile_limits, (1, 12), strict=True))
        return FixedSize(tile) if is_low_detail(options) else self.tiles(tile, least, most, bool(options["use_thumbnail"]))

    def _video_tiling(self, tile: tuple[int, int], patch: int, merge: int) -> TilingPolicy:
        raise AssertionError("this model takes no videos")

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        return build_span([*self._around(geometry.num_embeds)], self.placeholder_ids["image"])

    def _around(self, rows: int) -> Sequence[Piece]:
        return (self.special_token_id("<img>"),), rows, (self.special_token_id("</img>"),)

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        """Return options for at most this many tiles, of which the thumbnail is one."""
        return {self.tile_limits[1]: max(1, tiles - 1)}


class NemotronVideoInfo(TiledInfo):
    """Videos, and images whose size `vision_config.args` bounds. Among bases, it is before LlamaNemotronVLProcessingInfo."""

    modalities: tuple[str, ...] = ("image", "video")
    prunes_videos = True
    valid_kwargs: Mapping[str, Any] = {
        "image": (*TILE_KWARGS, "max_num_tiles", "max_num_patches"),
        "video": (*TIME_KWARGS, "fps", "num_frames", "resample"),
    }
    default_kwargs: Mapping[str, Any] = {}
    tiles: ClassVar[type[AspectTiles]] = AspectTiles
    joined_frames = 1
    adds_special_tokens = False
    text_placeholders: Mapping[str, int] = {}

    def resolve_token_ids(self) -> None:
        """Find the token that stands for a video. Its id may be outside the vocabulary, because the model never gets it."""
        self.joined_frames = positive_int_or(self.files.config.get("vision_config") or {}, "video_temporal_patch_size", 1)
        self.pruning_rate = video_pruning_rate(self.files.config)
        token_of_tokenizer = self.files.token_to_id(_VIDEO) if self.files.token_to_id else None
        token = (
            self.files.config.get("video_context_token_id", token_of_tokenizer)
            if token_of_tokenizer is None
            else token_of_tokenizer
        )
        if isinstance(token, bool) or not isinstance(token, int):
            raise ConfigError(f"the tokenizer lacks {_VIDEO}, and video_context_token_id in config.json is {token!r}")
        self.placeholder_ids = {**self.placeholder_ids, "video": token}
        self.text_placeholders = {} if token_of_tokenizer is not None else {_VIDEO: token}

    def resolve_decode_spec(self) -> DecodeSpec:
        default = FrameSampling(fps=2.0, max_frames=128, spread="ends")  # as in the model card
        return DecodeSpec(self.sampling_policy("video", default, self.files.video))

    def _image_tiling(self, tile: tuple[int, int], patch: int, merge: int) -> TilingPolicy:
        args, options = (self.files.config.get("vision_config") or {}).get("args") or {}, self.merged_kwargs["image"]
        if "min_num_patches" not in args:
            if "max_num_patches" in options:
                raise ConfigError("max_num_patches is an option of models with dynamic resolution; give max_num_tiles")
            cut: TilingPolicy = super()._image_tiling(tile, patch, merge)  # type: ignore[misc]  # of the base that follows
            return cut
        if "max_num_tiles" in options:
            raise ConfigError("max_num_tiles is an option of models without dynamic resolution; give max_num_patches")
        least = positive_int_or(args, "min_num_patches", 1)
        most = (positive_int_or(self.files.config, "max_sequence_length", 16384) - 4) * merge**2
        most = min(most, *(positive_int_or(values, "max_num_patches", most) for values in (args, options)))
        return PatchRange(patch, merge, least, 2 * least if is_low_detail(options) else most)

    def _video_tiling(self, tile: tuple[int, int], patch: int, merge: int) -> TilingPolicy:
        vision = self.files.config.get("vision_config") or {}
        if vision.get("video_target_num_patches") and vision.get("video_target_img_size"):
            raise ConfigError("vision_config has video_target_num_patches and video_target_img_size; remove one of them")
        if vision.get("video_target_num_patches"):
            patches = positive_int_or(vision, "video_target_num_patches", 1)
        elif vision.get("video_target_img_size"):
            patches = math.ceil(positive_int_or(vision, "video_target_img_size", 512) / patch) ** 2
        else:
            return FixedSize(tile)
        if vision.get("video_maintain_aspect_ratio"):
            return PatchTarget(patch, merge, patches)
        side = max(1, math.isqrt(patches) // merge) * merge * patch
        return FixedSize((side, side))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid, with the times of all frames; joined frames are one step of it.

        If rows of a video are pruned, the text around its frames counts as rows, too.
        """
        grid = super().geometry(header)
        if header.frames is None:
            return grid
        grid = replace(grid, t=-(-grid.t // self.joined_frames), times=_times(header.frames))
        if not self.pruning_rate:
            return grid
        text = sum(len(part) + 1 for part in self._frame_texts(grid.times))
        rows = retained_rows(grid.num_embeds // grid.t, grid.t, self.pruning_rate)
        return replace(grid, extra=text + rows - grid.num_embeds)

    def process(self, item: MediaItem, dtype: torch.dtype) -> tuple[MultiModalKwargsItem, ItemGeometry]:
        """Return the tensors of the base. The patches of joined frames follow each other in `pixel_values`.

        Videos with pruned rows have `text_ids` and `text_lengths`: see `prune_video`.
        """
        kwargs, grid = super().process(item, dtype)
        if isinstance(item, VideoItem) and self.joined_frames > 1:
            patches = _joined(torch.as_tensor(kwargs["pixel_values"].data), len(item.frames), self.joined_frames)
            kwargs = {**kwargs, "pixel_values": FieldElem(patches, FlatField())}
        if not isinstance(item, VideoItem) or not self.pruning_rate:
            return kwargs, grid
        end, texts = self.special_token_id("</img>"), self._frame_texts(grid.times)
        return {
            **kwargs,
            "text_ids": FieldElem(torch.tensor([token for text in texts for token in (*text, end)]), FlatField()),
            "text_lengths": FieldElem(torch.tensor([len(text) for text in texts]), FlatField(keep_on_cpu=True)),
        }, grid

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace `<video>` with the token that stands for it, if it is not a token itself."""
        if not (items.get("video") and self.text_placeholders):
            return ids
        return replace_text(ids, _VIDEO, self.placeholder_ids["video"], self.files)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return `<img>`, the rows and `</img>`; for a video, the same for each frame after its number and time."""
        if modality == "image":
            return super().span(modality, geometry)  # type: ignore[safe-super]
        if self.pruning_rate:
            return build_span([geometry.num_embeds], self.placeholder_ids["image"])
        pieces: list[Piece] = []
        for start in self._frame_texts(geometry.times):
            pieces += [start, geometry.num_embeds // geometry.t, (self.special_token_id("</img>"),)]
        return build_span(pieces, self.placeholder_ids["image"])

    def _frame_texts(self, times: Sequence[float]) -> list[tuple[int, ...]]:
        """Return the tokens before the rows of each frame, or of each group of joined frames."""
        steps = [f"rame {i + 1} sampled at {time:.2f} seconds" for i, time in enumerate(times)]
        groups = (steps[first : first + self.joined_frames] for first in range(0, len(steps), self.joined_frames))
        texts = (f"{chr(10) * (i > 0)}F{' and f'.join(group)}: " for i, group in enumerate(groups))
        return [(*self.encode(text), self.special_token_id("<img>")) for text in texts]

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        tiling = self.specs[modality].tiling
        if modality == "video" and self.pruning_rate:  # the rows include text
            rows = rows * grid[1] * grid[2] // (grid[1] * grid[2] + _FRAME_TEXT * self.specs[modality].merge ** 2)
        if not isinstance(tiling, PatchRange):
            kwargs = super().shrink_kwargs(modality, grid, rows)
            return {"num_frames": self.joined_frames * kwargs["num_frames"]} if kwargs and modality == "video" else kwargs
        most = rows * tiling.multiple**2
        return {"max_num_patches": most} if most >= 2 * tiling.min_patches else None


class NemotronVLProcessingInfo(NemotronVideoInfo, LlamaNemotronVLProcessingInfo):
    """ProcessingInfo of Nemotron-Nano-VL v2. Images have tiles, or a size of their own if `vision_config.args` bounds it."""


def _joined(patches: torch.Tensor, frames: int, joined: int) -> torch.Tensor:
    """Join the patches of adjacent frames: `[frames * n, dim]` to `[groups * n, joined * dim]`. The last frame is repeated."""
    planes = patches.view(frames, -1, patches.shape[1])
    planes = torch.cat((planes, planes[-1:].expand(-frames % joined, -1, -1)))
    groups = planes.view(-1, joined, *planes.shape[1:])  # [groups, joined, n, dim]
    return groups.transpose(1, 2).reshape(-1, joined * patches.shape[1])


def _times(frames: FramePlan) -> tuple[float, ...]:
    """Return the seconds of each frame as the model's text states them: its number times whole milliseconds per frame."""
    last, seconds = frames.indices[-1], frames.timestamps[-1]
    step = math.floor(1000 * seconds / last + 1e-6) if last else 0
    return tuple(index * step / 1000 for index in frames.indices)
