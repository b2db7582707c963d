"""LightOnOCR (arXiv 2601.14251): Pixtral's tower on pages of any size, whole squares of its rows merged, a Qwen3 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...decoder_model import TEXT_PREFIXES
from ...interface import StepLimits
from ...layers.connectors import squares
from ...tower_model import TowerModel
from ...vision.vit import tower_bytes
from ..pixtral.model import MISTRAL3, mistral3_specs

_DEFAULTS = replace(MISTRAL3, decoder="qwen3")


class LightOnOcr(TowerModel):
    """Patches come row by row. After the tower, full squares of them are formed, and patches outside these are dropped."""

    prefixes = (
        ("model.vision_encoder.", "tower."),
        ("model.vision_projection.norm.", "merger.norm."),
        ("model.vision_projection.patch_merger.", "merger.patch_merger."),
        ("model.vision_projection.", "projector."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, tower, projector, merger = mistral3_specs(config, _DEFAULTS)
        super().__init__(text, replace(tower, merge=1), projector, dtype, device, merger=merger)
        self.side, self.merger_spec = tower.merge, merger

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        rows = self.project(squares(self.tower(tensors["pixel_values"], grids)[-1], grids, self.side))
        return list(rows.split([t * (h // self.side) * (w // self.side) for t, h, w in grids]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._max_patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return tower_bytes(self.tower.spec, self._max_patches(rows), self.merger_spec, self.dtype, limits)

    def _max_patches(self, rows: int) -> int:
        """Return the most patches for `rows` rows: images of one square each, plus almost one more beside and below it."""
        return rows * (2 * self.side - 1) ** 2
