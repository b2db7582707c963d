"""Input processing of Idefics3 and SmolVLM: rows of tiles by the longest edge, each after a tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

from ....callers.errors import ConfigError
from ....mm.geometry import FrameSampling
from ....mm.media.policy import DecodeSpec
from ....mm.tiling.longest import EdgeTiles
from ....mm.types import ItemGeometry, MediaHeader
from ....processors.bases.base import insert_text_around
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, height_width
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.interface import Span
from ....processors.options import TIME_KWARGS, check_keeps_size, is_low_detail
from ....processors.spans import Piece, build_span

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


class Idefics3ProcessingInfo(TiledInfo):
    """ProcessingInfo of Idefics3: each tile after a tag of its row and column, then the whole image."""

    plain_tokens: Sequence[str] = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")

    element_format = "doctags"  # as SmolDocling and Granite-Docling write
    ocr_prompts = ("docling",)
    modalities: tuple[str, ...] = ("image",)
    placeholders = {"image": ("image_token_id", 128257)}
    valid_kwargs = {"image": (*TILE_KWARGS, "do_image_splitting", "size")}

    def resolve_spec(self, modality: str) -> TileSpec:
        json = {**self.preprocessor_json(modality), **self.merged_kwargs[modality]}
        config, vision = self.files.config, self.files.config.get("vision_config") or {}
        spec = TileSpec(
            IMAGENET_STANDARD_MEAN,
            IMAGENET_STANDARD_STD,
            filter="lanczos",
            patch=vision.get("patch_size", 32),
            merge=config.get("scale_factor", 2),
        )
        spec = read_pixel_spec({**self.preprocessor_json(modality), "do_resize": True}, spec, self.merged_kwargs[modality])
        tile = height_width(json.get("max_image_size") or 364, "max_image_size")[0]
        split = modality == "image" and json.get("do_image_splitting", True) and not is_low_detail(json)
        if not json.get("do_resize", True):
            check_keeps_size(self.merged_kwargs[modality], ("size",))
        longest, first = self._first_size(json)
        return replace(spec, tiling=EdgeTiles(longest, tile, split, first=first))

    def _first_size(self, json: Mapping[str, Any]) -> tuple[int | None, tuple[int, int] | None]:
        """Return the longer side of an image before it is cut, and its height and width if they are fixed."""
        size = json.get("size") or 4 * 364
        if not json.get("do_resize", True):
            return None, None
        is_fixed = isinstance(size, Mapping) and "longest_edge" not in size and "height" in size
        sides = height_width(size)
        if is_fixed and max(sides) > EdgeTiles.limit:
            raise ConfigError(f"size is {size}, the limit is {EdgeTiles.limit} pixels a side; give less")
        return (None, sides) if is_fixed else (sides[0], None)

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return rows of tiles, an empty line and the whole image. A boundary token is before each of them and at the end."""
        rows, columns = geometry.tiles
        each = geometry.num_embeds // (rows * columns + 1)
        around, pieces = self.token_or_text("<fake_token_around_image>"), list[Piece]()
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [around, self.token_or_text(f"<row_{row}_col_{column}>"), each]
            pieces.append(self.encode("\n" if row < rows else "\n\n"))
        return build_span([*pieces, *self.global_image(each)], self.placeholder_ids["image"])

    def global_image(self, rows: int) -> list[Piece]:
        """Return the pieces of the whole image or of a video frame."""
        around = self.token_or_text("<fake_token_around_image>")
        return [around, self.token_or_text("<global-img>"), rows, around]

    def token_or_text(self, text: str) -> tuple[int, ...]:
        """Return the special token of this text or, if there is none, the tokens of the text."""
        token = self.files.token_to_id(text) if self.files.token_to_id is not None else None
        return self.encode(text) if token is None else (token,)

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        """Return options for a square of tiles and the whole image."""
        side, tiling = isqrt(max(0, tiles - 1)), self.specs["image"].tiling
        if side < 2 or tiling.longest is tiling.first is None:
            return {"do_image_splitting": False}
        return {"size": {"longest_edge": side * tiling.tile}}


class SmolVLMProcessingInfo(Idefics3ProcessingInfo):
    """ProcessingInfo of SmolVLM: also videos, each frame as one tile after its timestamp."""

    inserted = {"video": ("You", "\n\n")}
    modalities = ("image", "video")
    plain_tokens = ()
    placeholders = {"image": ("image_token_id", 128257), "video": ("video_token_id", "<video>")}
    valid_kwargs = {**Idefics3ProcessingInfo.valid_kwargs, "video": (*TIME_KWARGS, "fps", "num_frames", "resample")}

    def preprocessor_json(self, modality: str) -> Mapping[str, Any]:
        """Return the JSON. Older checkpoints keep the size of video frames in `video_sampling` of the image processor's."""
        json = super().preprocessor_json(modality)
        if modality == "image":
            return json
        size = (json.get("video_sampling") or {}).get("video_size") or json.get("size")
        return {**json, "size": size}

    def resolve_decode_spec(self) -> DecodeSpec:
        json = self.preprocessor_json("video")
        json = {**json, **(json.get("video_sampling") or {})}
        most = json.get("max_frames") or json.get("num_frames") or 64
        sampling = FrameSampling(fps=1.0, max_frames=most, spread="ends", nearest=True, margin=1.0)
        return DecodeSpec(self.sampling_policy("video", sampling, {"fps": json.get("fps")}))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid. The `times` of a video are those of its frames, then its duration."""
        grid, plan = super().geometry(header), header.frames
        if plan is None:
            return grid
        seconds = len(plan.indices) / plan.fps if plan.fps else max(plan.timestamps)
        return replace(grid, times=(*plan.timestamps, seconds))

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Insert the first word before a video and the empty line after it: both are tokenized with the prompt's text."""
        return insert_text_around(ids, self.placeholder_ids["video"], "You", "\n\n", self.files) if items.get("video") else ids

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return, for a video, the number of frames and the duration, then each frame after its minute and second."""
        if modality == "image":
            return super().span(modality, geometry)
        *times, length = geometry.times or [*map(float, range(geometry.t + 1))]  # precomputed embeddings have no times
        hours, rest = divmod(int(length + 1e-6), 3600)
        text = f" are provided the following series of {number_words(geometry.t)} frames from a "
        text += f"{hours}:{rest // 60:02d}:{rest % 60:02d} [H:MM:SS] video.\n"
        pieces = list[Piece]()
        for time in times:
            text += f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:"
            pieces += [self.encode(text), *self.global_image(geometry.num_embeds // geometry.t)]
            text = ""
        return build_span(pieces, self.placeholder_ids["image"])


def number_words(number: int) -> str:
    """Write a number in English: 21 is "twenty-one", 105 "one hundred and five", 1200 "one thousand, two hundred"."""
    if number < 20:
        return _ONES.split()[number]
    if number < 100:
        return _TENS.split()[number // 10 - 2] + (f"-{number_words(number % 10)}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    head, rest = f"{number_words(number // unit)} {name}", number % unit
    joint = ", " if rest >= 100 else " and "
    return f"{head}{joint}{number_words(rest)}" if rest else head
