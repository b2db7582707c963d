"""LightOnOCR: Pixtral's tower over grids of any size, whole squares of it joined, a Qwen3 decoder (arXiv 2601.14251)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .activations import tower_bytes
from .decoder_model import TEXT_PREFIXES
from .interface import Work
from .layers.connectors import squares
from .pixtral import Mistral3
from .vision.spec import TowerSpec


class LightOnOcr(Mistral3):
    """Patches come row by row; those that fill no square end with the tower."""

    prefixes: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.vision_encoder.", "tower."),
        ("model.vision_projection.norm.", "merger.norm."),
        ("model.vision_projection.patch_merger.", "merger.patch_merger."),
        ("model.vision_projection.", "projector."),
        *TEXT_PREFIXES,
    )
    patch, decoder = 16, "qwen3"

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.side = self.merge_of(config)

    def tower_spec(self, config: Mapping[str, Any]) -> TowerSpec:
        return replace(super().tower_spec(config), merge=1)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        rows = self.project(squares(self.tower(tensors["pixel_values"], grids)[-1], grids, self.side))
        return list(rows.split([t * (h // self.side) * (w // self.side) for t, h, w in grids]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        return tower_bytes(self.tower.spec, self._patches(rows), self.merger.spec, self.dtype, work)

    def _patches(self, rows: int) -> int:
        """At most: those of pictures of one square each that all but fill another one beside and below it."""
        return rows * (2 * self.side - 1) ** 2
