"""Ernie-4.5-VL: squares of patches, then pairs of frames are joined; what is seen has experts of its own (ERNIE 4.5 report)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..mm.errors import ConfigError
from .activations import projector_bytes, tower_bytes
from .config import count, decoder_spec, need
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.connectors import Projector, ProjectorSpec
from .layers.tree import Maker
from .native_model import FEATURES, axial_theta
from .text.stacks import STACKS
from .vision.places import Grid
from .vision.spec import BLOCKS, RotarySpec, TowerSpec
from .vision.vit import Tower

PAIR = 2  # frames that are joined; a picture is joined with itself
_VISION: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "hidden_act": "quick_gelu", "num_heads": 16, "in_channels": 3, "patch_size": 14,
    "spatial_merge_size": 2, "intermediate_size": 5120, "temporal_merge_size": PAIR, "rms_norm_eps": 1e-6,
}  # fmt: skip


class Resampler(nn.Module):
    """`[patches, width]`, in squares -> `[rows, out]`: squares joined, then pairs of frames, each through two layers."""

    def __init__(self, tower: TowerSpec, out: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.group = tower.merge**2
        wide, make = tower.width * self.group, Maker(self, dtype, device)
        self.spatial_linear = Projector(ProjectorSpec(tower.width, wide, ("fc1", "fc2"), self.group), dtype, device)
        self.temporal_linear = Projector(ProjectorSpec(PAIR * wide, wide, ("fc1", "fc2"), inner=wide), dtype, device)
        self.parts = (  # no attributes of a module: each layer has one name
            make.norm("spatial_linear.ln", wide, tower.eps, True),
            make.norm("temporal_linear.ln", wide, tower.eps, True),
            make.linear(["mlp"], wide, [out], True),
            make.norm("after_norm", out, eps, False),
        )

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        spatial_norm, temporal_norm, last, norm = self.parts
        x = spatial_norm(self.spatial_linear(patches))
        pairs = _pairs([(t, h * w // self.group) for t, h, w in grids]).to(x.device)
        x = x.index_select(0, pairs).view(-1, PAIR * x.shape[1])
        x = temporal_norm(self.temporal_linear(x))
        return norm(last(x))  # type: ignore[no-any-return]


class Ernie45VL(DecoderModel):
    """Rows of pictures and clips, their marks among them, take the second kind of experts."""

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
        tower = _tower({**_VISION, **need(config, "vision_config")})
        self.visual = Tower(tower, dtype, device)
        self.merger = Resampler(tower, self.hidden_size, self.spec.eps, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        pixels, grid = (tensors[name] for name in FEATURES[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        rows = self.merger(self.visual(pixels, grids)[-1], grids)
        return list(rows.split([-(-t // PAIR) * h * w // self.merger.group for t, h, w in grids]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._squares(modality, rows) * self.merger.group * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        tower, size, squares = self.visual.spec, self.dtype.itemsize, self._squares(modality, rows)
        first, second = self.merger.spatial_linear.spec, self.merger.temporal_linear.spec
        patches, wide = squares * self.merger.group, second.out * size
        given = patches * (tower.patch_dim + tower.width) * size  # pixels, the tower's state
        joined = (squares + PAIR * rows) * wide
        made = rows * projector_bytes(second, 1, rows, self.dtype, work)
        return max(tower_bytes(tower, patches, first, self.dtype, work), given + max(joined, made))

    def _squares(self, modality: str, rows: int) -> int:
        return rows * (PAIR if modality == "video" else 1)


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    if vision["temporal_merge_size"] != PAIR:
        raise ConfigError(f"temporal_merge_size {vision['temporal_merge_size']} is not supported; known is {PAIR}")
    return TowerSpec(
        depth=count(vision, "depth"),
        width=count(vision, "hidden_size"),
        heads=count(vision, "num_heads"),
        inner=count(vision, "intermediate_size"),
        patch_dim=vision["in_channels"] * count(vision, "patch_size") ** 2,
        act=vision["hidden_act"],
        merge=vision["spatial_merge_size"],
        eps=vision["rms_norm_eps"],
        patch_bias=False,
        rotary=RotarySpec(axial_theta(vision)),
        post_norm=True,
        names=replace(BLOCKS, post_norm="ln"),
    )


def _pairs(items: Sequence[tuple[int, int]]) -> Tensor:
    """The squares of each pair of frames, of items of `(frames, squares of one)`, one pair after another: int64.

    Example: two frames of two squares, then a picture of one, are 0 2 1 3 and 4 4.
    """
    parts, start = [], 0
    for frames, squares in items:
        own = torch.arange(start, start + frames * squares).view(-1, min(frames, PAIR), squares).transpose(1, 2)
        parts.append(own.expand(-1, -1, PAIR).flatten())
        start += frames * squares
    return torch.cat(parts)
