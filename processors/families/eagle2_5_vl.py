"""Input processing of Eagle2.5-VL: images as tiles that preserve their area, each image after its number as text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...mm.errors import ConfigError, InputError
from ...mm.tiling.plan import TilingPolicy
from ..bases.base import insert_text_around, replace_matches
from ..bases.tiles import TILE_KWARGS, height_width
from ..files import ProcessorFiles
from ..images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD
from .nemotron_vl import LlamaNemotronVLProcessingInfo

_SPELLED = re.compile(r"<image-(\d+)>")
_MARK = -1  # stands for a spelled image until its number is checked
_MAX_SPELLED = 256  # numbers of images in the texts that chat templates write


class EagleVLProcessingInfo(LlamaNemotronVLProcessingInfo):
    """ProcessingInfo of Eagle2.5-VL. Prompts spell an image as `<image-1>`; the model reads `<image 1>` before its tiles."""

    placeholders = {"image": ("image_token_index", "<IMG_CONTEXT>")}
    tile_limits = ("min_dynamic_tiles", "max_dynamic_tiles")
    valid_kwargs: Mapping[str, Any] = {"image": (*TILE_KWARGS, *tile_limits)}
    default_kwargs: Mapping[str, Any] = {}

    def prepare_files(self, files: ProcessorFiles) -> ProcessorFiles:
        config, image = files.config, {"size": 448, "use_thumbnail": True, **files.image}
        if image.get("pad_during_tiling"):
            raise ConfigError("pad_during_tiling in the preprocessor JSON is not supported; it must be false")
        image = {"image_mean": IMAGENET_STANDARD_MEAN, "image_std": IMAGENET_STANDARD_STD, **image}
        merged = config.get("downsample_ratio", 0.5) if config.get("use_pixel_shuffle", True) else 1
        sizes = {"force_image_size": height_width(image["size"]), "downsample_ratio": merged}
        vision = {"image_size": 224, "patch_size": 16, **(config.get("vision_config") or {})}
        return replace(files, image=image, config={**config, **sizes, "vision_config": vision})

    def _image_tiling(self, tile: tuple[int, int], patch: int, merge: int) -> TilingPolicy:
        self.check_config("vision_config", image_size=tile[0])
        return super()._image_tiling(tile, patch, merge)

    @property
    def text_placeholders(self) -> Mapping[str, int]:  # type: ignore[override]
        return {f"<image-{number}>": self.placeholder_ids["image"] for number in range(_MAX_SPELLED, 0, -1)}

    def preprocess_prompt(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Replace `<image-1>` with the token of an image; InputError unless the numbers ascend from 1."""
        placeholder, spelled, number = self.placeholder_ids["image"], list[str](), 0
        if not items.get("image"):
            return ids

        def mark(match: re.Match[str]) -> int:
            spelled.append(match[1])
            return _MARK

        out = list(replace_matches(ids, _SPELLED, mark, (placeholder,), self.files))
        numbers = iter(spelled)
        for index, token in enumerate(out):
            number += token in (placeholder, _MARK)
            if token == _MARK and (found := next(numbers)) != str(number):
                raise InputError(f"the prompt has <image-{found[:20]}> in place of image {number}; write <image-{number}>")
            out[index] = placeholder if token == _MARK else token
        return self.preprocess_chat(out, items)

    def preprocess_chat(self, ids: Sequence[int], items: Mapping[str, int]) -> Sequence[int]:
        """Insert the number of each image, tokenized together with the text before it."""
        placeholder, out, start, number = self.placeholder_ids["image"], list[int](), 0, 0
        if ids.count(placeholder) != items.get("image", 0):  # the prompt contains the rows of its images
            return ids
        for end, token in enumerate(ids, 1):
            if token == placeholder:
                number += 1
                out += insert_text_around(ids[start:end], placeholder, f"<image {number}>", "", self.files)
                start = end
        return [*out, *ids[start:]]
