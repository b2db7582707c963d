"""Granite Vision 4: several states of the tower, each through a Q-Former over windows, are added to layers of the decoder.

Sources: the modelling file of transformers 5.23; arXiv 2406.04334 (deepstack).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int, require
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...layers.connectors import ProjectorSpec
from ...layers.qformer import QFormer, QFormerSpec
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stacks import STACKS
from ...vision.vit import tower_bytes
from ..llava.config import PINPOINTS_336
from ..llava.model import PREFIXES, LlavaBase

STACK = replace(STACKS["granite"], defaults={**STACKS["granite"].defaults, "attention_multiplier": 1.0})
CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))  # patches of each 2 x 2 square; one projector per corner
_COPIES = 6  # copies of a state: normed, in windows, with positions, keys, values, and one of those in attention's layout


@dataclass(frozen=True)
class WindowQFormerSpec:
    """A Q-Former over windows of a tile.

    Args:
        side: patches along a side of a tile. window: patches along a side of a window. queries: rows along a side of the
            result of a window.
        out: width of a result row.
        corner: queries are initialised from this patch of each 2 x 2 patches; None: from the mean of the patches they cover.
    """

    side: int
    queries: int
    window: int
    out: int
    corner: tuple[int, int] | None
    qformer: QFormerSpec


class WindowQFormer(TensorModule):
    """`[tiles, side^2, width]` -> `[tiles, (windows * queries)^2, out]`, row by row."""

    def __init__(self, spec: WindowQFormerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, build, width = spec, Builder(self, dtype, device), spec.qformer.width
        self.parts = (build.norm("norm", width, 1e-6, True), build.linear(["out_linear"], width, [spec.out], True))
        self.tables = (build.stored("query", spec.queries**2, width), build.stored("image_positions", spec.window**2, width))
        self.qformer = QFormer(spec.qformer, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        s, (norm, last), (query, positions) = self.spec, self.parts, self.tables
        windows = s.side // s.window
        plane = norm(x.flatten(0, 1)).view(len(x), s.side, s.side, -1)
        if s.corner is None:
            side = s.side * s.queries // s.window
            initial = F.interpolate(plane.permute(0, 3, 1, 2), (side, side), mode="area").permute(0, 2, 3, 1)
        else:
            initial = plane[:, s.corner[0] :: 2, s.corner[1] :: 2]
        rows = self.qformer(_to_windows(initial, s.queries) + query.weight, _to_windows(plane, s.window) + positions.weight)
        joined = rows.view(len(x), windows, windows, s.queries, s.queries, -1).transpose(2, 3).flatten(0, 4)
        return last(joined).view(len(x), -1, s.out)


class Granite4Vision(LlavaBase):
    """Tiles in lines as in LLaVA-NeXT, one deepstack level per projector; without one for layer 0, embeddings are zeros."""

    prefixes = (
        ("model.layerwise_projectors.", "layerwise_projectors."),
        ("model.spatial_projectors.", "spatial_projectors."),
        *PREFIXES,
    )
    vision = {"model_type": "clip_vision_model"}
    pinpoints = PINPOINTS_336

    def decoder(self, config: Mapping[str, Any]) -> DecoderSpec:
        """Read the decoder. The config names the layer before which a level is added, DecoderSpec the layer before that one."""
        return decoder_spec(config, STACK, deepstack=tuple(layer - 1 for layer in sorted(_target_layers(config)) if layer))

    def feature_layers(self, config: Mapping[str, Any]) -> int | Sequence[int]:
        return [layer for layer, _ in require(config, "deepstack_layer_map")] + [config.get("spatial_vision_layer", -1)]

    def build_projectors(self, config: Mapping[str, Any]) -> None:
        device = self.vision_tower.device
        spec = _window_spec(config, self.vision_tower.spec.width, self.side, self.hidden_size)
        self.rate = spec.queries / spec.window
        self.side = spec.side * spec.queries // spec.window
        self.scale = 1.0  # encoder rows are not scaled like token embeddings
        *layerwise_states, spatial_state = self.layers
        layerwise = [WindowQFormer(spec, self.dtype, device) for _ in layerwise_states]
        spatial = [WindowQFormer(replace(spec, corner=corner), self.dtype, device) for corner in CORNERS]
        self.layerwise_projectors, self.spatial_projectors = nn.ModuleList(layerwise), nn.ModuleList(spatial)
        states = [*layerwise_states, *[spatial_state] * len(spatial)]
        pairs = [(state, number) for number, state in enumerate(states)]
        # decoder layer -> state, number of the projector (not the module: without encoders, nothing else holds it)
        self.levels = dict(sorted(zip(_target_layers(config), pairs, strict=True)))

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        states, grids = self.tower_states(tensors)
        tiles = [t for t, _, _ in grids]
        lines = tensors["layout"].tolist()
        levels = []
        projectors = [*self.layerwise_projectors, *self.spatial_projectors]
        for state, number in self.levels.values():
            items = projectors[number](states[state].view(sum(tiles), -1, self.vision_tower.spec.width)).split(tiles)
            levels.append([self.in_lines(item, of) for item, of in zip(items, lines, strict=True)])
        if 0 not in self.levels:
            levels.insert(0, [torch.zeros_like(rows) for rows in levels[0]])
        return [torch.cat(level_rows, 1) for level_rows in zip(*levels, strict=True)]

    def max_patches(self, modality: str, rows: int) -> int:
        return math.ceil(rows * self.max_patches_per_row / self.rate**2)

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the peak in the tower, or after it: its states, one projector, and all levels concatenated."""
        spec, s = self.vision_tower.spec, self.dtype.itemsize
        patches, out = self.max_patches(modality, rows), self.hidden_size
        tower = tower_bytes(spec, patches, ProjectorSpec(spec.width, out, ("out_linear",)), self.dtype, limits)
        numbers = spec.patch_dim + (len(spec.states) + _COPIES) * spec.width
        return max(tower, (patches * numbers + 3 * rows * self.row_size) * s)


def _target_layers(config: Mapping[str, Any]) -> list[int]:
    """Return the decoder layer of each projector; ConfigError if two are equal or a corner has none."""
    corners = config.get("spatial_target_layers") or (12, 15, 18, 21)
    layers = [layer for _, layer in require(config, "deepstack_layer_map")] + list(corners)
    if len(set(layers)) < len(layers) or len(corners) != len(CORNERS):
        raise ConfigError(f"deepstack_layer_map and spatial_target_layers name decoder layers {layers}; each may occur once")
    return layers


def _window_spec(config: Mapping[str, Any], width: int, side: int, out: int) -> WindowQFormerSpec:
    q = config.get("qformer_config") or {}
    queries, window = (int(part) for part in require(config, "downsample_rate").split("/"))
    if side % window or width % 64:
        raise ConfigError(f"tiles of {side}x{side} patches of width {width} have no windows of {window}, or no heads of 64")
    qformer = QFormerSpec(
        width=width,
        heads=width // 64,
        inner=positive_int({"intermediate_size": 3072, **q}, "intermediate_size"),
        layers=positive_int({"num_hidden_layers": 1, **q}, "num_hidden_layers"),
        encoder_width=width,
        act=check_activation("hidden_act of the Q-Former", q.get("hidden_act", "gelu")),
        eps=q.get("layer_norm_eps", 1e-12),
        cross_frequency=q.get("cross_attention_frequency", 1),
    )
    return WindowQFormerSpec(side, queries, window, out, None, qformer)


def _to_windows(plane: Tensor, size: int) -> Tensor:
    """Cut `[tiles, h, w, width]` into `[windows, size^2, width]`, tile by tile, row by row."""
    tiles, h, w, width = plane.shape
    windows = plane.reshape(tiles, h // size, size, w // size, size, width).transpose(2, 3)
    return windows.reshape(-1, size * size, width)
