"""Granite Vision 4: states of the encoder, each through a Q-Former over windows, reach several layers of the decoder.

Source: the published modelling file of transformers 5.23 (deepstack as in arXiv 2406.04334).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..mm.errors import ConfigError
from .activations import tower_bytes
from .config import count, decoder_spec, need
from .interface import Work
from .layers.connectors import ProjectorSpec
from .layers.qformer import QFormer, QFormerSpec
from .layers.tree import Maker
from .llava import LlavaNext
from .text.spec import DecoderSpec
from .text.stacks import STACKS

STACK = replace(STACKS["granite"], defaults={**STACKS["granite"].defaults, "attention_multiplier": 1.0})
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))  # of 2 x 2 patches: a row is made from each
_COPIES = 6  # of a state: normed, in windows, with positions, as keys and values, and as attention takes one of those


@dataclass(frozen=True)
class WindowSpec:
    """`side`: patches of a picture; its windows of `seen` x `seen` patches make `made` x `made` rows of `out` numbers each.

    `corner`: queries start from that one of each 2 x 2 patches; None: from the mean of the patches they stand for.
    """

    side: int
    made: int
    seen: int
    out: int
    corner: tuple[int, int] | None
    qformer: QFormerSpec


class WindowQFormer(nn.Module):
    """`[pictures, side^2, width]` -> `[pictures, (windows * made)^2, out]`, row by row."""

    def __init__(self, spec: WindowSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, make, width = spec, Maker(self, dtype, device), spec.qformer.width
        self.parts = (make.norm("norm", width, 1e-6, True), make.linear(["out_linear"], width, [spec.out], True))
        self.tables = (make.stored("query", spec.made**2, width), make.stored("image_positions", spec.seen**2, width))
        self.qformer = QFormer(spec.qformer, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        s, (norm, last), (query, positions) = self.spec, self.parts, self.tables
        windows = s.side // s.seen
        plane = norm(x.flatten(0, 1)).view(len(x), s.side, s.side, -1)
        if s.corner is None:
            side = s.side * s.made // s.seen
            few = F.interpolate(plane.permute(0, 3, 1, 2), (side, side), mode="area").permute(0, 2, 3, 1)
        else:
            few = plane[:, s.corner[0] :: 2, s.corner[1] :: 2]
        rows = self.qformer(_cut(few, s.made) + query.weight, _cut(plane, s.seen) + positions.weight)
        joined = rows.view(len(x), windows, windows, s.made, s.made, -1).transpose(2, 3).flatten(0, 4)
        return last(joined).view(len(x), -1, s.out)  # type: ignore[no-any-return]


class Granite4Vision(LlavaNext):
    prefixes = (
        ("model.layerwise_projectors.", "layerwise_projectors."),
        ("model.spatial_projectors.", "spatial_projectors."),
        *LlavaNext.prefixes,
    )
    vision = {"model_type": "clip_vision_model"}

    def decoder(self, config: Mapping[str, Any]) -> DecoderSpec:
        """A level is added before the layer that the config names, so behind the one before."""
        return decoder_spec(config, STACK, deepstack=tuple(layer - 1 for layer in sorted(_levels(config)) if layer))

    def seen(self, config: Mapping[str, Any]) -> int | Sequence[int]:
        return [layer for layer, _ in need(config, "deepstack_layer_map")] + [config.get("spatial_vision_layer", -1)]

    def connect(self, config: Mapping[str, Any]) -> None:
        table, device = self.vision_tower.spec.table, self.vision_tower.device
        assert table is not None
        spec = _window_spec(config, self.vision_tower.spec.width, table.side, self.hidden_size)
        self.rate, self.rows_side = spec.made / spec.seen, spec.side * spec.made // spec.seen
        *own, last = self.layers
        layerwise = [WindowQFormer(spec, self.dtype, device) for _ in own]
        spatial = [WindowQFormer(replace(spec, corner=corner), self.dtype, device) for corner in CORNERS]
        self.layerwise_projectors, self.spatial_projectors = nn.ModuleList(layerwise), nn.ModuleList(spatial)
        pairs = [*zip(own, layerwise, strict=True), *((last, projector) for projector in spatial)]
        self.levels = dict(sorted(zip(_levels(config), pairs, strict=True)))

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.side = self.rows_side
        self.scale = 1.0  # rows are no token embeddings: those of items are empty before the first level

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        states, grids = self.see(tensors)
        pieces = [t for t, _, _ in grids]
        lines = tensors["lines"].tolist()
        levels = []
        for state, projector in self.levels.values():
            made = projector(states[state].view(sum(pieces), -1, self.vision_tower.spec.width)).split(pieces)
            levels.append([self._in_lines(item, of) for item, of in zip(made, lines, strict=True)])
        if 0 not in self.levels:
            levels.insert(0, [torch.zeros_like(rows) for rows in levels[0]])
        return [torch.cat(several, 1) for several in zip(*levels, strict=True)]

    def patches(self, modality: str, rows: int) -> int:
        return math.ceil(rows * self.densest / self.rate**2)

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        """Of the tower, or behind it of its states, one projector and all levels side by side."""
        spec, s = self.vision_tower.spec, self.dtype.itemsize
        patches, out = self.patches(modality, rows), self.hidden_size
        tower = tower_bytes(spec, patches, ProjectorSpec(spec.width, out, ("out_linear",)), self.dtype, work)
        held = spec.patch_dim + (len(spec.states) + _COPIES) * spec.width
        return max(tower, (patches * held + 3 * rows * self.row_size) * s)


def _levels(config: Mapping[str, Any]) -> list[int]:
    """Decoder layers, in the order of the projectors; ConfigError where two of them reach the same layer."""
    corners = config.get("spatial_target_layers") or (12, 15, 18, 21)
    layers = [layer for _, layer in need(config, "deepstack_layer_map")] + list(corners)
    if len(set(layers)) < len(layers) or len(corners) != len(CORNERS):
        raise ConfigError(f"deepstack_layer_map and spatial_target_layers name decoder layers {layers}; each once is known")
    return layers


def _window_spec(config: Mapping[str, Any], width: int, side: int, out: int) -> WindowSpec:
    q = config.get("qformer_config") or {}
    made, seen = (int(part) for part in need(config, "downsample_rate").split("/"))
    if side % seen or width % 64:
        raise ConfigError(f"pictures of {side} patches a side, {width} wide, have no windows of {seen} in heads of 64")
    qformer = QFormerSpec(
        width=width,
        heads=width // 64,
        inner=count({"intermediate_size": 3072, **q}, "intermediate_size"),
        layers=count({"num_hidden_layers": 1, **q}, "num_hidden_layers"),
        seen_width=width,
        act=q.get("hidden_act", "gelu"),
        eps=q.get("layer_norm_eps", 1e-12),
        every=q.get("cross_attention_frequency", 1),
    )
    return WindowSpec(side, made, seen, out, None, qformer)


def _cut(plane: Tensor, size: int) -> Tensor:
    """`[pictures, h, w, width]` -> `[windows, size^2, width]`, picture by picture, row by row."""
    count_, h, w, width = plane.shape
    cut = plane.reshape(count_, h // size, size, w // size, size, width).transpose(2, 3)
    return cut.reshape(-1, size * size, width)
