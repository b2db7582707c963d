"""Input processing of Idefics2: the four quarters of an image and the whole image, each at its own aspect ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError
from ....mm.tiling.longest import KeptQuarters, QuarterTiles
from ....mm.types import ItemGeometry
from ....processors.bases.base import end_of_word
from ....processors.bases.tiles import TILE_KWARGS, ResampledInfo, TileSpec, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.interface import Span
from ....processors.options import check_keeps_size, is_low_detail
from ....processors.spans import Piece, build_span

_MAX_SIDE = 4096  # pixels; the attention of a view takes memory for every patch
_SIZE = {"shortest_edge": 378, "longest_edge": 980}


class Idefics2ProcessingInfo(ResampledInfo):
    """ProcessingInfo of Idefics2. Every quarter and the whole image become as many rows as the resampler has latents."""

    rewrites_prompts = True
    plain_tokens = ("<fake_token_around_image>", "<image>", "<end_of_utterance>")
    modalities = ("image",)
    placeholders = {"image": ("image_token_id", 32001)}
    valid_kwargs = {"image": (*TILE_KWARGS, "do_image_splitting", "size")}

    def resolve_spec(self, modality: str) -> TileSpec:
        options = self.merged_kwargs[modality]
        json: dict[str, Any] = {**self.files.image, **options}
        vision = self.files.config.get("vision_config") or {}
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, filter="bilinear", patch=vision.get("patch_size", 32))
        spec = read_pixel_spec({**self.files.image, "do_resize": True}, spec, options)
        size, stored = _edges(json.get("size")), _edges(self.files.image.get("size"))
        sides = [
            positive_int_or(stored, name, _SIZE.get(name, 1), _MAX_SIDE) for name in (stored if "height" in stored else _SIZE)
        ]
        largest = max(positive_int_or(vision, "image_size", 224), *sides)  # for which memory is planned
        self.most_patches = (largest // spec.patch) ** 2
        longest = positive_int_or(size, "longest_edge", min(_SIZE["longest_edge"], largest), largest)
        shortest = positive_int_or(size, "shortest_edge", min(_SIZE["shortest_edge"], longest), largest)
        split = bool(json.get("do_image_splitting")) and not is_low_detail(json)
        if not json.get("do_resize", True):
            check_keeps_size(options, ("size",))
            return replace(spec, tiling=KeptQuarters(spec.patch, largest, split))
        tall, wide = (positive_int_or(size, name, 1, largest) for name in ("height", "width"))
        fixed = (tall, wide) if "height" in size else None
        return replace(spec, tiling=QuarterTiles(shortest, longest, split, fixed))

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
        encode, decode, edges = self.files.encode, self.files.decode, (self.placeholder_ids["image"], self.boundary)
        assert encode is not None, "the boundary token came from a tokenizer"
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


def _edges(size: Any) -> Mapping[str, Any]:
    """Return the sides that `size` names, or the default; ConfigError if it is in another form."""
    size = size or _SIZE
    if not isinstance(size, Mapping) or not (size.keys() <= _SIZE.keys() or size.keys() == {"height", "width"}):
        raise ConfigError(f"size is {size!r}; give shortest_edge and longest_edge, or height and width, in pixels")
    return size
