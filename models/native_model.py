"""Models that take pictures and clips at native size: a packed tower, connectors, a decoder. Knows no family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..mm.errors import ConfigError
from .activations import projector_bytes, tower_bytes
from .config import count
from .decoder_model import DecoderModel
from .interface import Work
from .layers.connectors import Projector, ProjectorSpec
from .text.spec import DecoderSpec
from .vision.spec import TowerSpec
from .vision.vit import Tower

FEATURES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Names of patches and grids, by modality, as processors/native.py makes them."""


class NativeModel(DecoderModel):
    """A family says what its tower, connectors and decoder are made of, and their names in checkpoints.

    The first connector makes the rows that take the place of tokens, from the tower's last state; each other one makes a
    level that a layer of the decoder adds, from the tower's other states in turn. `projector`: what the first one is.
    """

    projector: ClassVar[type[Projector]] = Projector

    def __init__(
        self,
        decoder: DecoderSpec,
        tower: TowerSpec,
        connectors: Sequence[ProjectorSpec],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(decoder, dtype, device)
        for spec in connectors:
            if spec.out != self.hidden_size:
                raise ConfigError(f"the tower makes rows of {spec.out}, the decoder takes {self.hidden_size}")
        self.visual = Tower(tower, dtype, device)
        self.merger = self.projector(connectors[0], dtype, device)
        self.levels = nn.ModuleList(Projector(spec, dtype, device) for spec in connectors[1:])

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        pixels, grid = (tensors[name] for name in FEATURES[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        counts = [t * h * w // self.merger.spec.group for t, h, w in grids]
        *states, last = self.visual(pixels, grids)
        rows = self.merger(last)
        if states:
            rows = torch.cat([rows, *(level(state) for level, state in zip(self.levels, states, strict=True))], 1)
        return list(rows.split(counts))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.merger.spec.group * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        tower, merger, size, levels = self.visual.spec, self.merger.spec, self.dtype.itemsize, len(self.levels)
        patches, made = rows * merger.group, rows * self.hidden_size * size
        whole = tower_bytes(tower, patches, merger, self.dtype, work)
        if not levels:
            return whole
        held = patches * (tower.patch_dim + (1 + levels) * tower.width) * size  # pixels, states
        last = patches * (projector_bytes(merger, 1, patches, self.dtype, work) - tower.width * size)
        return max(whole, held + max(levels * made + last, 2 * (1 + levels) * made))  # beside the other levels; all joined


def patch_numbers(vision: Mapping[str, Any]) -> int:
    """Numbers in a flat patch: channels x frames x height x width."""
    patch, frames = count(vision, "patch_size"), vision.get("temporal_patch_size", 2)
    return int(vision.get("in_channels", vision.get("in_chans", 3)) * frames * patch * patch)


def axial_theta(vision: Mapping[str, Any]) -> float:
    """Base of the tower's rotary frequencies; ConfigError for another kind of them."""
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ConfigError(f"vision rope type {rope['rope_type']!r} is not supported; known is axial")
    return float(rope.get("rope_theta", 10000.0))
