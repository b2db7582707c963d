"""The base of models with one vision tower and one projector, whose images come whole or in tiles of one size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..callers.errors import ConfigError
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import StepLimits
from .layers.connectors import Projector, ProjectorSpec
from .text.decoder import Decoder
from .text.spec import DecoderSpec
from .vision.spec import TowerSpec
from .vision.vit import VisionTower, tower_bytes

TOWER_PREFIXES = (
    ("model.vision_tower.vision_model.", "tower."),
    ("model.vision_tower.", "tower."),
    ("vision_tower.vision_model.", "tower."),
    ("vision_tower.", "tower."),
    ("model.multi_modal_projector.", "projector."),
    ("multi_modal_projector.", "projector."),
    *TEXT_PREFIXES,
)
"""Name prefixes of tower, projector, decoder and head in checkpoints of transformers 5 and 4."""


class TowerModel(DecoderModel):
    """A model that joins the rows of its tower's state in squares of patches and projects them.

    Reads `pixel_values` and `grid` as `processors.bases.tiles` creates them, for every modality.

    `merger`: an optional projector that merges the squares; `projector` then projects each merged row. `states`: numbers of
    the tower's states that are concatenated, in this order; empty: its last state alone.
    """

    def __init__(
        self,
        text: DecoderSpec,
        tower: TowerSpec,
        projector: ProjectorSpec,
        dtype: torch.dtype,
        device: torch.device,
        *,
        merger: ProjectorSpec | None = None,
        decoder: Decoder | None = None,
        states: Sequence[int] = (),
    ) -> None:
        super().__init__(text, dtype, device, decoder)
        self.tower, self.projector = VisionTower(tower, dtype, device), Projector(projector, dtype, device)
        self.state_order = [tower.states.index(state) for state in states] or [-1]
        self.merger = None if merger is None else Projector(merger, dtype, device)
        self.ignored = (*self.ignored, *(f"tower.{name}" for name in tower.unbuilt))

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        states = self.tower(tensors["pixel_values"], grids)
        used = [states[i] for i in self.state_order]
        rows = self.project(used[0] if len(used) == 1 else torch.cat(used, 1))
        return list(rows.split([t * h * w // self.tower.spec.merge**2 for t, h, w in grids]))

    def project(self, rows: Tensor) -> Tensor:
        """Project `[patches, width]` in squares to `[rows, hidden]`."""
        return self.projector(rows if self.merger is None else self.merger(rows))

    def tower_spec(self, modality: str) -> TowerSpec:
        """Hook: return the tower's spec with the `patch_dim` of a modality, for the memory plan."""
        return self.tower.spec

    def input_bytes(self, modality: str, rows: int) -> int:
        tower = self.tower_spec(modality)
        return rows * tower.merge**2 * tower.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        tower = self.tower_spec(modality)
        return tower_bytes(tower, rows * tower.merge**2, self.projector.spec, self.dtype, limits)


def feature_states(layer: object, depth: int) -> tuple[int, ...]:
    """Return TowerSpec.features for a `vision_feature_layer` (negative: counted from the end); empty for the last layer.

    Raises:
        ConfigError: `layer` is several layers, or one that the tower does not have.
    """
    if isinstance(layer, bool) or not isinstance(layer, int) or not -depth - 1 <= layer <= depth:
        raise ConfigError(f"vision_feature_layer is {layer!r}; it must be one of the tower's {depth} layers")
    number = layer if layer >= 0 else depth + 1 + layer
    return () if number == depth else (number,)


def numbers_of_states(layers: object, depth: int) -> tuple[int, ...]:
    """Return the numbers of the states (0: before the first layer) that a `vision_feature_layer` names, in its order.

    Raises:
        ConfigError: no layer, or one that the tower does not have.
    """
    numbers = layers if isinstance(layers, list | tuple) else [layers]
    if not numbers:
        raise ConfigError("vision_feature_layer is an empty list; give at least one of the tower's layers")
    return tuple((feature_states(number, depth) or (depth,))[0] for number in numbers)
