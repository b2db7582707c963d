"""What Granite Vision 4 wants to be fed: as LLaVA-NeXT, with fewer rows than patches. Knows no model."""

from __future__ import annotations

from dataclasses import replace

from ..mm.errors import ConfigError
from .llava import LlavaNextProcessingInfo, LlavaSpec

OFFSETS = 4  # rows taken from the corners of 2 x 2 patches, each for a level of its own


class Granite4VisionProcessingInfo(LlavaNextProcessingInfo):
    """ProcessingInfo of Granite Vision 4."""

    vision = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 32}

    def read(self, modality: str) -> LlavaSpec:
        given = str(self.files.config.get("downsample_rate"))
        made, _, seen = given.partition("/")
        if not (made.isdecimal() and seen.isdecimal()) or not 0 < int(made) <= int(seen):
            raise ConfigError(f'downsample_rate in config.json is {given!r}; known are rates such as "4/8"')
        return replace(super().read(modality), rate=(int(made), int(seen)))

    @property
    def row_width(self) -> int:
        levels = {layer for _, layer in self.files.config.get("deepstack_layer_map") or ()}
        levels |= set(self.files.config.get("spatial_target_layers") or (12, 15, 18, 21))
        return super().row_width * (1 + len(levels - {0}))
