"""LFM2-VL: SigLIP 2's tower on tiles and whole images of any size, squares of patches merged, an LFM2 decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import replace_parts, stack_of
from ...tower_model import TOWER_PREFIXES, TowerModel
from ...vision.encoders import encoder_spec
from ...vision.spec import TableSpec

_ENCODER = "siglip_vision_model"
_PATCH_WEIGHT = "embeddings.patch_embedding.weight"


class Lfm2VL(TowerModel):
    """Each item is one whole image, or tiles of one size and then the whole image."""

    prefixes = TOWER_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        stack = stack_of(config, "lfm2")
        self.renames = stack.renames
        text, factor = decoder_spec(config, stack), positive_int({"downsample_factor": 2, **config}, "downsample_factor")
        vision = {"patch_size": 16, "num_patches": 256, **(config.get("vision_config") or {}), "model_type": _ENCODER}
        side = isqrt(positive_int(vision, "num_patches"))
        self.patch = positive_int(vision, "patch_size")
        table = TableSpec(side, "bilinear", antialias=True)
        vision["image_size"] = side * self.patch
        tower = encoder_spec(vision, _ENCODER, table=table, merge=factor, post_norm=True)
        projector = ProjectorSpec(
            tower.width,
            text.hidden_size,
            ("linear_1", "linear_2"),
            group=factor**2,
            inner=positive_int({"projector_hidden_size": 2560, **config}, "projector_hidden_size"),
            act=config.get("projector_hidden_act", "gelu"),
            bias=config.get("projector_bias", True),
            norm="layer_norm" if config.get("projector_use_layernorm", True) else None,
            joined_norm=True,
        )
        super().__init__(text, tower, projector, dtype, device)
        self.ignored = (*self.ignored, "tower.head.")

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Rename the decoder's tensors, and reorder the weight of the patches, whose channels come last."""
        for name, tensor in weights:
            if "language_model." in name:
                name = replace_parts(name, self.renames)
            if name.endswith(_PATCH_WEIGHT) and tensor.ndim == 2:
                tensor = tensor.unflatten(1, (self.patch, self.patch, -1)).permute(0, 3, 1, 2).flatten(1)
            yield name, tensor

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `tensors["grids"]` int64 `[items, 2, 3]` has the grids of each item's tiles and of its whole image."""
        items = [[(t, h, w) for t, h, w in grids if t] for grids in tensors["grids"].tolist()]
        rows = self.project(self.tower(tensors["pixel_values"], [grid for item in items for grid in item])[-1])
        return list(rows.split([sum(t * h * w for t, h, w in item) // self.tower.spec.merge**2 for item in items]))
