"""What Idefics3 and SmolVLM want to be fed: rows of tiles by the longest edge, written with tags. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from typing import Any

from ..mm.errors import ConfigError
from ..mm.geometry import SamplingPolicy
from ..mm.media.policy import DecodeSpec
from ..mm.tiling import EdgeTiles
from ..mm.types import ItemGeometry, MediaHeader
from .base import build_span, with_words
from .interface import Span
from .options import with_sampling
from .pictures import HALF, read_pixels, with_resample
from .tiles import DETAIL, TiledInfo, TileSpec, is_low, pair

Pieces = list[tuple[int, ...] | int]
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


class Idefics3ProcessingInfo(TiledInfo):
    """ProcessingInfo of Idefics3: each tile behind a tag of its row and column, the whole picture last."""

    modalities: tuple[str, ...] = ("image",)
    slots = {"image": ("image_token_id", 128257)}
    known = {"image": (*DETAIL, "do_image_splitting", "size")}

    def read(self, modality: str) -> TileSpec:
        json: dict[str, Any] = {**self.json(modality)}
        config, vision = self.files.config, self.files.config.get("vision_config") or {}
        spec = TileSpec(HALF, HALF, filter="lanczos", patch=vision.get("patch_size", 32), merge=config.get("scale_factor", 2))
        spec = read_pixels(json, spec)
        for layer in self.layers[modality]:
            spec, json = with_resample(spec, layer), json | layer
        tile = pair(json.get("max_image_size") or 364, "max_image_size")[0]
        if vision.get("image_size", 224) // spec.patch < tile // spec.patch:
            raise ConfigError(f"image_size {vision.get('image_size', 224)} in vision_config is below max_image_size {tile}")
        split = modality == "image" and json.get("do_image_splitting", True) and not is_low(json)
        return replace(spec, tiling=EdgeTiles(pair(json.get("size") or 4 * 364)[0], tile, split))

    def json(self, modality: str) -> Mapping[str, Any]:
        """The preprocessor's."""
        return self.files.image

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Lines of tiles, an empty line, the whole; a mark before each and at the end."""
        rows, columns = geometry.tiles
        each = geometry.num_embeds // (rows * columns + 1)
        around, pieces = self.mark("<fake_token_around_image>"), Pieces()
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [around, self.mark(f"<row_{row}_col_{column}>"), each]
            pieces.append(self.encode("\n" if row < rows else "\n\n"))
        return build_span([*pieces, *self.whole(each)], self.slot_ids["image"])

    def whole(self, rows: int) -> Pieces:
        """Of a picture seen as one."""
        around = self.mark("<fake_token_around_image>")
        return [around, self.mark("<global-img>"), rows, around]

    def mark(self, text: str) -> tuple[int, ...]:
        """The token that spells the text, where there is none the text itself."""
        token = self.files.special(text) if self.files.special is not None else None
        return self.encode(text) if token is None else (token,)

    def fewer(self, pieces: int) -> Mapping[str, Any] | None:
        """A square of tiles, and the whole."""
        side = isqrt(max(0, pieces - 1))
        if side < 2:
            return {"do_image_splitting": False}
        return {"size": {"longest_edge": side * self.specs["image"].tiling.tile}}


class SmolVLMProcessingInfo(Idefics3ProcessingInfo):
    """ProcessingInfo of SmolVLM: also clips, each frame seen as one, with its time in front."""

    modalities = ("image", "video")
    slots = {"image": ("image_token_id", 128257), "video": ("video_token_id", "<video>")}
    known = {**Idefics3ProcessingInfo.known, "video": ("fps", "max_duration", "num_frames", "resample")}

    def json(self, modality: str) -> Mapping[str, Any]:
        """Older checkpoints have what holds for clips under `video_sampling` of the pictures' file."""
        if modality == "image":
            return self.files.image
        own = self.files.video or self.files.image
        size = (own.get("video_sampling") or {}).get("video_size") or own.get("size")
        return {**own, "size": size}

    def decoding(self) -> DecodeSpec:
        json = self.json("video")
        json = {**json, **(json.get("video_sampling") or {})}
        own = SamplingPolicy(fps=1.0, max_frames=64, spread="ends", nearest=True, margin=1.0)
        own = replace(own, max_frames=json.get("max_frames") or json.get("num_frames") or own.max_frames)
        return DecodeSpec(self.sampling("video", with_sampling(own, {"fps": json.get("fps")})))

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """`times` of a clip: those of its frames, then its length."""
        grid, plan = super().geometry(header), header.frames
        if plan is None:
            return grid
        seconds = len(plan.indices) / plan.fps if plan.fps else max(plan.timestamps)
        return replace(grid, times=(*plan.timestamps, seconds))

    def prompt_ids(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """The first word before a clip and the empty line behind it, which are read together with the prompt's text."""
        return with_words(ids, self.slot_ids["video"], "You", "\n\n", self.files) if items.get("video") else ids

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Of a clip: how many frames of how long a clip, then each behind its minute and second."""
        if modality == "image":
            return super().span(modality, geometry)
        *times, length = geometry.times or [*map(float, range(geometry.t + 1))]  # ready-made rows have no times
        hours, rest = divmod(int(length + 1e-6), 3600)
        text = f" are provided the following series of {in_words(geometry.t)} frames from a "
        text += f"{hours}:{rest // 60:02d}:{rest % 60:02d} [H:MM:SS] video.\n"
        pieces = Pieces()
        for time in times:
            text += f"\nFrame from {int(time // 60):02d}:{int(time % 60):02d}:"
            pieces += [self.encode(text), *self.whole(geometry.num_embeds // geometry.t)]
            text = ""
        return build_span(pieces, self.slot_ids["image"])


def in_words(number: int) -> str:
    """A count of frames in English: 21 is "twenty-one", 105 "one hundred and five", 1200 "one thousand, two hundred"."""
    if number < 20:
        return _ONES.split()[number]
    if number < 100:
        return _TENS.split()[number // 10 - 2] + (f"-{in_words(number % 10)}" if number % 10 else "")
    unit, name = (100, "hundred") if number < 1000 else (1000, "thousand")
    head, rest = f"{in_words(number // unit)} {name}", number % unit
    joint = ", " if rest >= 100 else " and "
    return f"{head}{joint}{in_words(rest)}" if rest else head
