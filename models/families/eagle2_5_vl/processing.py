"""Input processing of Eagle2.5-VL: images as tiles that preserve their area, each after its number as text; videos as frames.

Source: the publisher's processor (processing_eagle2_5_vl.py).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ....callers.errors import ConfigError, InputError
from ....mm.geometry import FrameSampling
from ....mm.media.policy import DecodeSpec
from ....mm.tiling.plan import TilingPolicy
from ....mm.tiling.whole import FixedSize
from ....mm.types import ItemGeometry, MediaHeader
from ....processors.bases.base import insert_text_around, replace_matches
from ....processors.bases.tiles import TILE_KWARGS, height_width
from ....processors.files import ProcessorFiles
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
from ....processors.interface import Span
from ....processors.options import TIME_KWARGS
from ....processors.spans import Piece, build_span
from ..nemotron_vl.processing import LlamaNemotronVLProcessingInfo

_MAX_SPELLED = 256  # numbers of items in the texts that chat templates write
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
_FRAMES = 2  # the number of frames is a multiple of this


class EagleVLProcessingInfo(LlamaNemotronVLProcessingInfo):
    """ProcessingInfo of Eagle2.5-VL. Prompts spell an image as `<image-1>`; the model reads `<image 1>` before its tiles.

    For `<video-1>` it reads which video this is, its sampled frames per second, and each frame, which is one tile, after the
    frame's number and seconds. Rows of both modalities have the same token; the placeholder of videos is an id beyond the
    vocabulary.
    """

    rewrites_prompts = True
    modalities = ("image", "video")
    placeholders = {"image": ("image_token_index", "<IMG_CONTEXT>"), "video": ("video_token_id",)}
    tile_limits = ("min_dynamic_tiles", "max_dynamic_tiles")
    valid_kwargs: Mapping[str, Any] = {
        "image": (*TILE_KWARGS, *tile_limits),
        "video": (*TIME_KWARGS, "fps", "num_frames", "resample"),
    }
    default_kwargs: Mapping[str, Any] = {}

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        config, image = files.config, {"size": 448, "use_thumbnail": True, **files.image}
        if image.get("pad_during_tiling"):
            raise ConfigError("pad_during_tiling in the preprocessor JSON is not supported; it must be false")
        image = {"image_mean": IMAGENET_STANDARD_MEAN, "image_std": IMAGENET_STANDARD_STD, **image}
        merged = config.get("downsample_ratio", 0.5) if config.get("use_pixel_shuffle", True) else 1
        sizes = {"force_image_size": height_width(image["size"]), "downsample_ratio": merged}
        vision = {"image_size": 224, "patch_size": 16, **(config.get("vision_config") or {})}
        text = config.get("text_config") or {}
        size = text.get("vocab_size") or 1 << 20
        sections = {"vision_config": vision, "text_config": {**text, "vocab_size": size + 1}}
        return replace(files, image=image, config={**config, **sizes, **sections, "video_token_id": size})

    def resolve_decode_spec(self) -> DecodeSpec:
        default = FrameSampling(fps=2.0, min_frames=4, max_frames=256, multiple=_FRAMES, spread="nearest")
        return DecodeSpec(self.sampling_policy("video", default, self.files.video))

    def _image_tiling(self, tile: tuple[int, int], patch: int, merge: int) -> TilingPolicy:
        self.check_config("vision_config", image_size=tile[0])
        return super()._image_tiling(tile, patch, merge)

    def _video_tiling(self, tile: tuple[int, int], patch: int, merge: int) -> TilingPolicy:
        return FixedSize(tile)

    def geometry(self, header: MediaHeader) -> ItemGeometry:
        """Return the grid. The `times` of a video are the seconds of its frames, then its used frames per second."""
        grid, frames = super().geometry(header), header.frames
        return grid if frames is None else replace(grid, times=(*frames.timestamps, frames.fps))

    def span(self, modality: str, geometry: ItemGeometry) -> Span:
        """Return the rows between `<img>` and `</img>`; for a video, of each frame, after text. Embeddings have no times."""
        if modality == "image":
            return super().span(modality, geometry)
        if not geometry.times:
            return build_span([self.encode(": Frame 1: "), *self._around(geometry.num_embeds)], self.placeholder_ids["image"])
        *times, fps = geometry.times
        pieces: list[Piece] = []
        for number, seconds in enumerate(times, 1):
            start = f" sampled with {fps:.2f} fps: " if number == 1 else ""
            pieces += [self.encode(f"{start}Frame {number} sample at {seconds:.2f}s: ")]
            pieces += self._around(geometry.num_embeds // geometry.t)
        return build_span(pieces, self.placeholder_ids["image"])

    @property
    def text_placeholders(self) -> Mapping[str, int]:
        numbers = range(_MAX_SPELLED, 0, -1)
        return {f"<{name}-{number}>": token for name, token in self.placeholder_ids.items() for number in numbers}

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace `<image-1>` and `<video-1>` with the tokens of items; InputError unless the numbers ascend from 1."""
        names = {token: name for name, token in self.placeholder_ids.items() if items.get(name)}
        spelled, counts = list[re.Match[str]](), Counter[str]()
        if not names:
            return ids

        def mark(match: re.Match[str]) -> int:
            spelled.append(match)
            return -len(spelled)  # stands for the item until its number is checked

        pattern = re.compile(f"<({'|'.join(names.values())})-([0-9]+)>")
        out = list(replace_matches(ids, pattern, mark, tuple(names), self.files))
        for index, token in enumerate(out):
            if token >= 0 and token not in names:
                continue
            name = spelled[-token - 1][1] if token < 0 else names[token]
            counts[name] += 1
            if token < 0 and spelled[-token - 1][2] != str(counts[name]):
                written, right = spelled[-token - 1][0][:27], f"<{name}-{counts[name]}>"
                raise InputError(f"the prompt has {written} in place of {name} {counts[name]}; write {right}")
            out[index] = self.placeholder_ids[name]
        return self.preprocess_chat(out, items)

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Insert the number of each item, tokenized together with the text before it."""
        names = {token: name for name, token in self.placeholder_ids.items()}
        out, start, counts = list[int](), 0, Counter[str]()
        if any(ids.count(token) != items.get(name, 0) for token, name in names.items()):  # the prompt contains rows of items
            return ids
        for end, token in enumerate(ids, 1):
            if token in names:
                counts[names[token]] += 1
                title = _title(names[token], counts[names[token]])
                out += insert_text_around(ids[start:end], token, title, "", self.files)
                start = end
        return [*out, *ids[start:]]


def _title(modality: str, number: int) -> str:
    """Return the text before an item. InputError for videos after the tenth."""
    if modality == "image":
        return f"<image {number}>"
    if number > len(_ORDINALS):
        raise InputError(f"{number} videos are given; this model takes at most {len(_ORDINALS)} per prompt", code="unsupported")
    return f"The {_ORDINALS[number - 1]} video"
