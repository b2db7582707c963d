"""Input processing of Idefics2: the four quarters of an image and the whole image, each at its own aspect ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...mm.errors import ConfigError
from ...mm.tiling.longest import QuarterTiles
from ...mm.types import ItemGeometry
from ..bases.base import end_of_word
from ..bases.tiles import TILE_KWARGS, ResampledInfo, TileSpec, positive_int_or
from ..images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ..interface import Span
from ..options import is_low_detail
from ..spans import Piece, build_span

_SIZE = {"shortest_edge": 378, "longest_edge": 980}


class Idefics2ProcessingInfo(ResampledInfo):
    """ProcessingInfo of Idefics2. Every quarter and the whole image become as many rows as the resampler has latents."""

    modalities = ("image",)
    placeholders = {"image": ("image_token_id", 32001)}
    valid_kwargs = {"image": (*TILE_KWARGS, "do_image_splitting", "size")}

    def resolve_spec(self, modality: str) -> TileSpec:
        options = self.merged_kwargs[modality]
        json: dict[str, Any] = {**self.files.image, **options}
        vision = self.files.config.get("vision_config") or {}
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, filter="bilinear", patch=vision.get("patch_size", 32))
        spec = read_pixel_spec(self.files.image, spec, options)
        size = json.get("size") or _SIZE
        if not isinstance(size, Mapping) or not size.keys() <= _SIZE.keys():
            raise ConfigError(f"size is {size!r}; give shortest_edge and longest_edge in pixels")
        most = positive_int_or(vision, "image_size", 224)
        longest = positive_int_or(size, "longest_edge", _SIZE["longest_edge"], most)
        shortest = positive_int_or(size, "shortest_edge", min(_SIZE["shortest_edge"], longest), longest)
        split = bool(json.get("do_image_splitting")) and not is_low_detail(json)
        return replace(spec, tiling=QuarterTiles(shortest, longest, split))

    @property
    def latents(self) -> int:
        return positive_int_or(self.files.config.get("perceiver_config") or {}, "resampler_n_latents", 64)

    @property
    def boundary(self) -> int:
        """The token before, between and after images. Adjacent images share one."""
        return self.special_token_id("<fake_token_around_image>")

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Insert a space between an image and text after it that starts with neither a space nor "<"."""
        if not items.get("image"):
            return ids
        encode, decode, edges = self.encode, self.files.decode, (self.placeholder_ids["image"], self.boundary)
        assert decode is not None, "files with an encoder have a decoder"
        out, position = list[int](), 0
        while position < len(ids):
            out.append(ids[position])
            position += 1
            if out[-1] in edges:
                end = end_of_word(ids, position, decode)
                text = decode(ids[position:end])
                if text and not text[0].isspace() and text[0] != "<":
                    out += encode(f" {text}")
                    position = end
        return out

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        edge = (self.boundary,)
        pieces: list[Piece] = [self.latents]
        for _ in range(1, geometry.t):
            pieces += [edge, self.latents]
        span = build_span(pieces, self.placeholder_ids["image"])
        return replace(span, before=edge, after=edge, merges={edge * 2: self.boundary})

    def max_tiles_kwargs(self, tiles: int) -> Mapping[str, Any] | None:
        return {"do_image_splitting": False}
