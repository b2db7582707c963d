"""Ernie-4.5-VL: squares of patches and pairs of frames are merged; vision tokens have their own experts.

Source: the ERNIE 4.5 technical report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...native_model import TENSORS, axial_theta
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.positions import Grid
from ...vision.spec import BLOCKS, RotarySpec, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

PAIR = 2  # frames that are merged; an image is a frame merged with itself
_VISION: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "hidden_act": "quick_gelu", "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "intermediate_size": 5120, "temporal_merge_size": PAIR, "rms_norm_eps": 1e-6,
}  # fmt: skip


class FrameResampler(TensorModule):
    """`[patches, width]` in squares -> `[rows, out]`: merges squares, then pairs of frames, by two layers each."""

    def __init__(self, tower: TowerSpec, out: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.group = tower.merge**2
        wide, build = tower.width * self.group, Builder(self, dtype, device)
        self.spatial_linear = Projector(ProjectorSpec(tower.width, wide, ("fc1", "fc2"), self.group), dtype, device)
        self.temporal_linear = Projector(ProjectorSpec(PAIR * wide, wide, ("fc1", "fc2"), inner=wide), dtype, device)
        self.parts = (  # in a tuple: their only names are the checkpoint's
            build.norm("spatial_linear.ln", wide, tower.eps, True),
            build.norm("temporal_linear.ln", wide, tower.eps, True),
            build.linear(["mlp"], wide, [out], True),
            build.norm("after_norm", out, eps, False),
        )

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        spatial_norm, temporal_norm, last, norm = self.parts
        x = spatial_norm(self.spatial_linear(patches))
        pairs = _frame_pairs([(t, h * w // self.group) for t, h, w in grids]).to(x.device)
        x = x.index_select(0, pairs).view(-1, PAIR * x.shape[1])
        x = temporal_norm(self.temporal_linear(x))
        return norm(last(x))


class Ernie45VL(DecoderModel):
    """A model of images and videos. Their tokens, start and end tokens included, are routed to the vision experts."""

    prefixes = (
        ("model.vision_tower.", "visual."),
        ("model.vision_model.", "visual."),
        ("vision_model.", "visual."),
        *(
            (f"model.resampler_model.{part}_linear.{old}.", f"merger.{part}_linear.{new}.")
            for part in ("spatial", "temporal")
            for old, new in (("0", "fc1"), ("2", "fc2"), ("3", "ln"))
        ),
        ("model.resampler_model.", "merger."),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )
    routes_by_modality = {"image": 1, "video": 1}

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, STACKS["ernie4_5_vl_moe_text"]), dtype, device)
        tower = _tower({**_VISION, **require(config, "vision_config")})
        self.visual = VisionTower(tower, dtype, device)
        self.merger = FrameResampler(tower, self.hidden_size, self.spec.eps, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        rows = self.merger(self.visual(pixels, grids)[-1], grids)
        return list(rows.split([-(-t // PAIR) * h * w // self.merger.group for t, h, w in grids]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._squares(modality, rows) * self.merger.group * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        tower, size, squares = self.visual.spec, self.dtype.itemsize, self._squares(modality, rows)
        first, second = self.merger.spatial_linear.spec, self.merger.temporal_linear.spec
        patches, wide = squares * self.merger.group, second.out * size
        base = patches * (tower.patch_dim + tower.width) * size  # pixels, the tower's state
        pairs = (squares + PAIR * rows) * wide
        temporal = rows * projector_bytes(second, 1, rows, self.dtype, limits)
        return max(tower_bytes(tower, patches, first, self.dtype, limits), base + max(pairs, temporal))

    def _squares(self, modality: str, rows: int) -> int:
        """Return the number of squares of patches that are encoded for `rows` rows."""
        return rows * (PAIR if modality == "video" else 1)


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    if vision["temporal_merge_size"] != PAIR:
        raise ConfigError(f"temporal_merge_size {vision['temporal_merge_size']} is not supported; known is {PAIR}")
    return TowerSpec(
        depth=positive_int(vision, "depth"),
        width=positive_int(vision, "hidden_size"),
        heads=positive_int(vision, "num_heads"),
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=vision["in_channels"] * positive_int(vision, "patch_size") ** 2,
        act=vision["hidden_act"],
        merge=vision["spatial_merge_size"],
        eps=vision["rms_norm_eps"],
        patch_bias=False,
        rotary=RotarySpec(axial_theta(vision)),
        post_norm=True,
        names=replace(BLOCKS, post_norm="ln"),
    )


def _frame_pairs(items: Sequence[tuple[int, int]]) -> Tensor:
    """Return an int64 index that puts the squares of two adjacent frames side by side; items are `(frames, squares each)`.

    Example: two frames of two squares, then an image of one square: 0 2 1 3 and 4 4.
    """
    parts, start = [], 0
    for frames, squares in items:
        numbers = torch.arange(start, start + frames * squares).view(-1, min(frames, PAIR), squares).transpose(1, 2)
        parts.append(numbers.expand(-1, -1, PAIR).flatten())
        start += frames * squares
    return torch.cat(parts)
