"""Input processing of Granite Vision 4: LLaVA-NeXT with fewer rows than patches."""

from __future__ import annotations

from dataclasses import replace

from ....callers.errors import ConfigError
from ..llava.processing import LlavaNextProcessingInfo, LlavaSpec


class Granite4VisionProcessingInfo(LlavaNextProcessingInfo):
    """ProcessingInfo of Granite Vision 4."""

    vision_defaults = {"model_type": "clip_vision_model", "image_size": 224, "patch_size": 32}

    def resolve_spec(self, modality: str) -> LlavaSpec:
        rate = str(self.files.config.get("downsample_rate"))
        rows, _, patches = rate.partition("/")
        if not (rows.isdecimal() and patches.isdecimal()) or not 0 < int(rows) <= int(patches):
            raise ConfigError(f'downsample_rate in config.json is {rate!r}; give a rate such as "4/8"')
        return replace(super().resolve_spec(modality), downsample_rate=(int(rows), int(patches)))

    @property
    def embed_width(self) -> int:
        levels = {layer for _, layer in self.files.config.get("deepstack_layer_map") or ()}
        levels |= set(self.files.config.get("spatial_target_layers") or (12, 15, 18, 21))
        return super().embed_width * (1 + len(levels - {0}))
