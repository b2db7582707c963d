"""A decoder with one tower and one projector behind it: pictures in pieces, or whole, become rows. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..mm.errors import ConfigError
from .activations import tower_bytes
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.connectors import Projector, ProjectorSpec
from .text.spec import DecoderSpec
from .vision.spec import TowerSpec
from .vision.vit import Tower

TOWER_PREFIXES = (
    ("model.vision_tower.vision_model.", "tower."),
    ("model.vision_tower.", "tower."),
    ("vision_tower.vision_model.", "tower."),
    ("vision_tower.", "tower."),
    ("model.multi_modal_projector.", "projector."),
    ("multi_modal_projector.", "projector."),
    *TEXT_PREFIXES,
)
"""Names of tower, projector, decoder and head, of transformers 5 and 4."""


class TowerModel(DecoderModel):
    """The tower's last state, squares of patches joined and projected, one row each.

    Takes `pixel_values` and `grid` as `processors.tiles` makes them, of every modality alike.
    """

    def __init__(
        self, text: DecoderSpec, tower: TowerSpec, projector: ProjectorSpec, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(text, dtype, device)
        self.tower, self.projector = Tower(tower, dtype, device), Projector(projector, dtype, device)
        self.ignored = (*self.ignored, *(f"tower.{name}" for name in tower.unbuilt))

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        rows = self.project(self.tower(tensors["pixel_values"], grids)[-1])
        return list(rows.split([t * h * w // self.tower.spec.merge**2 for t, h, w in grids]))

    def project(self, rows: Tensor) -> Tensor:
        """`[patches, width]` -> `[rows, hidden]`."""
        return self.projector(rows)  # type: ignore[no-any-return]

    def input_bytes(self, modality: str, rows: int) -> int:
        tower = self.tower.spec
        return rows * tower.merge**2 * tower.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        return tower_bytes(self.tower.spec, rows * self.tower.spec.merge**2, self.projector.spec, self.dtype, work)


def state_of(layer: object, depth: int) -> tuple[int, ...]:
    """TowerSpec.features for a `vision_feature_layer`, counted from the end where negative; the last one is the empty tuple.

    Raises:
        ConfigError: several layers, or one that the tower does not have.
    """
    if isinstance(layer, bool) or not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise ConfigError(f"vision_feature_layer is {layer!r}; one layer of {depth} is expected")
    number = layer if layer >= 0 else depth + 1 + layer
    return () if number == depth else (number,)
