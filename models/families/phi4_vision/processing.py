"""Input processing of Phi-4-reasoning-vision: whole images near their own size, as patches.

Source: the publisher's processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ....callers.errors import ConfigError
from ....mm.tiling.plan import CropPlan
from ....mm.tiling.whole import PatchLimit
from ....processors.bases.text_placeholders import TextPlaceholders
from ....processors.bases.tiles import TILE_KWARGS, TiledInfo, TileSpec, positive_int_or
from ....processors.images import IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, read_pixel_spec
from ....processors.options import is_low_detail
from .model import patch_size

_MOST_PATCHES = 1 << 16


@dataclass(frozen=True)
class OwnPatches:
    """Scale to as many patches of `patch` pixels as the image has, but at least `least` and at most `most`.

    The image's own patches are whole ones. Rule: `Siglip2ImageProcessorNoUpscale` of Phi-4-reasoning-vision.
    """

    patch: int
    least: int
    most: int

    def plan(self, height: int, width: int) -> CropPlan:
        whole_patches = max(1, (height // self.patch) * (width // self.patch))
        return PatchLimit(self.patch, min(max(whole_patches, self.least), self.most)).plan(height, width)


class Phi4VisionProcessingInfo(TextPlaceholders, TiledInfo):
    """ProcessingInfo of Phi-4-reasoning-vision.

    Prompts spell a placeholder as text. The published processor puts a number outside of the vocabulary there; here it is the
    last token, unless the tokenizer has one for the text.
    """

    modalities = ("image",)
    placeholder_texts = {"image": "<image>"}
    text_config_defaults = {"hidden_size": 5120, "vocab_size": 100352}
    valid_kwargs = {"image": (*TILE_KWARGS, "max_num_patches")}
    default_kwargs = {"resample": "pillow"}

    def placeholder_keys(self) -> Mapping[str, tuple[str | int, ...]]:
        return {"image": ("image_token_id", self.text_config["vocab_size"] - 1)}

    def resolve_spec(self, modality: str) -> TileSpec:
        config, vision = self.files.config, self.files.config.get("vision_config") or {}
        options = {**self.files.image, **self.merged_kwargs[modality]}
        patch = positive_int_or(options, "patch_size", positive_int_or(vision, "patch_size", patch_size(config)))
        least = positive_int_or(options, "min_num_patches", positive_int_or(config, "min_num_patches", 256))
        most = positive_int_or(config, "max_num_patches", 3600)
        most = positive_int_or(options, "max_num_patches", most, _MOST_PATCHES)
        most = min(most, 2 * least) if is_low_detail(options) else most
        if least > most:
            reason = "the second must not be smaller"
            raise ConfigError(f"min_num_patches is {least} and max_num_patches is {most}; {reason}", param="max_num_patches")
        tiling = OwnPatches(patch, least, most)
        spec = TileSpec(IMAGENET_STANDARD_MEAN, IMAGENET_STANDARD_STD, filter="bilinear", tiling=tiling, patch=patch)
        return read_pixel_spec(self.files.image, spec, self.merged_kwargs[modality])

    def shrink_kwargs(self, modality: str, grid: tuple[int, int, int], rows: int) -> Mapping[str, Any] | None:
        return {"max_num_patches": rows} if rows >= self.specs[modality].tiling.least else None
