"""The base of models that encode images and videos at native resolution: a packed tower, mergers and a decoder.

Such a model may also have an audio tower, whose rows have no deepstack levels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..callers.errors import ConfigError
from ..checkpoints.config import positive_int
from .decoder_model import DecoderModel
from .interface import StepLimits
from .layers.connectors import Projector, ProjectorSpec, projector_bytes
from .text.spec import DecoderSpec
from .vision.spec import TowerSpec
from .vision.vit import VisionTower, tower_bytes

if TYPE_CHECKING:
    from .audio.aut import AutEncoder
    from .audio.chunked_encoder import ChunkedEncoder

    AudioTower = AutEncoder | ChunkedEncoder

TENSORS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}
"""Modality -> names of the patch and grid tensors that processors/bases/native.py creates."""


class NativeModel(DecoderModel):
    """A family passes the specs of its decoder, its tower and its mergers.

    The first merger projects the tower's last state to the rows that replace token embeddings. Each further merger projects
    one of the tower's states to a deepstack level.

    Audio items have `input_features` and `audio_frames`; their deepstack levels are zeros.

    `merger_class`: class of the first merger. `level_mergers`: for each deepstack level, in the order of the tower's states,
    the number of its merger; it is that of the level if the family sets no other.
    """

    merger_class: ClassVar[type[Projector]] = Projector

    def __init__(
        self,
        decoder: DecoderSpec,
        tower: TowerSpec,
        mergers: Sequence[ProjectorSpec],
        dtype: torch.dtype,
        device: torch.device,
        audio_tower: AudioTower | None = None,
    ) -> None:
        super().__init__(decoder, dtype, device)
        for spec in mergers:
            if spec.out != self.hidden_size:
                raise ConfigError(f"the tower's rows have width {spec.out}, the decoder takes {self.hidden_size}")
        self.visual = VisionTower(tower, dtype, device)
        self.merger = self.merger_class(mergers[0], dtype, device)
        self.deepstack_mergers = nn.ModuleList(Projector(spec, dtype, device) for spec in mergers[1:])
        self.level_mergers = tuple(range(len(mergers) - 1))
        self.audio_tower = audio_tower

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality == "audio":
            assert self.audio_tower is not None
            items = self.audio_tower(tensors["input_features"], tensors["audio_frames"].tolist())
            return [F.pad(rows, (0, self.row_size - self.hidden_size)) for rows in items]
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        counts = [t * h * w // self.merger.spec.group for t, h, w in grids]
        states = self.visual(pixels, grids)
        rows = self.merger(states[-1])
        if self.level_mergers:  # the last state may also be a level
            levels = [self.deepstack_mergers[number](state) for number, state in zip(self.level_mergers, states, strict=False)]
            rows = torch.cat([rows, *levels], 1)
        return list(rows.split(self.item_rows(tensors, counts)))

    def item_rows(self, tensors: Mapping[str, Any], rows: list[int]) -> list[int]:
        """Hook: return the rows of each item from those of each grid, for items of several grids."""
        return rows

    def keep_encoders(self, modalities: Collection[str]) -> None:
        super().keep_encoders(modalities)
        if self.audio_tower is not None and "audio" not in modalities:
            self._remove("audio_tower")
        if self.visual is not None and not {*modalities} - {"audio"}:
            self._remove("visual", "merger", "deepstack_mergers")

    def input_bytes(self, modality: str, rows: int) -> int:
        if modality == "audio":
            assert self.audio_tower is not None
            return self.audio_tower.input_bytes(rows)
        return rows * self.merger.spec.group * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        if modality == "audio":
            assert self.audio_tower is not None
            result = rows * (self.hidden_size + self.row_size) * self.dtype.itemsize
            return max(self.audio_tower.encoder_bytes(rows, limits), result)
        tower, merger, size = self.visual.spec, self.merger.spec, self.dtype.itemsize
        levels, patches, level_bytes = len(self.level_mergers), rows * merger.group, rows * self.hidden_size * size
        peak = max(tower_bytes(tower, patches, merger, self.dtype, limits), self.merger.extra_bytes(rows))
        if not levels:
            return peak
        base = patches * (tower.patch_dim + (1 + levels) * tower.width) * size  # pixels, states
        last = patches * (projector_bytes(merger, 1, patches, self.dtype, limits) - tower.width * size)
        # the last projection beside the other levels, or all levels and their concatenation
        return max(peak, base + max(levels * level_bytes + last, 2 * (1 + levels) * level_bytes))


def patch_numbers(vision: Mapping[str, Any]) -> int:
    """Return how many numbers a flat patch has: channels x frames x height x width."""
    patch, frames = positive_int(vision, "patch_size"), vision.get("temporal_patch_size", 2)
    return int(vision.get("in_channels", vision.get("in_chans", 3)) * frames * patch * patch)


def axial_theta(vision: Mapping[str, Any]) -> float:
    """Return the base of the tower's rotary frequencies; ConfigError if its rope type is not axial."""
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ConfigError(f"rope_type of vision_config is {rope['rope_type']!r}; only axial is defined for images")
    return float(rope.get("rope_theta", 10000.0))
