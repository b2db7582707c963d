"""Qwen2-VL and Qwen2.5-VL: the tower's rows take the place of placeholder embeddings in an M-RoPE decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..mm.errors import ConfigError
from .activations import tower_bytes
from .config import Stack, count, decoder_spec, need
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.basic import ACTIVATIONS
from .layers.connectors import Projector, ProjectorSpec
from .vision.spec import GATED_BLOCKS, RotarySpec, TowerSpec
from .vision.vit import Tower

STACK = Stack(
    {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "mrope_section": (16, 24, 24), "use_sliding_window": False},
    bias=True,
    out_bias=False,
)
FEATURES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


class _QwenVL(DecoderModel):
    """What both share."""

    prefixes = (  # new names first, since old ones are shorter
        ("model.visual.merger.", "merger."),
        ("visual.merger.", "merger."),
        ("model.visual.", "visual."),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )

    def __init__(
        self, config: Mapping[str, Any], tower: TowerSpec, out_width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(decoder_spec(config, STACK), dtype, device)
        if out_width != self.hidden_size:
            raise ConfigError(f"the tower makes rows of {out_width}, the decoder takes {self.hidden_size}")
        self.visual = Tower(tower, dtype, device)
        merger = ProjectorSpec(
            tower.width, out_width, ("mlp.0", "mlp.2"), tower.merge**2, norm="ln_q", eps=tower.eps, rms=tower.rms
        )
        self.merger = Projector(merger, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        pixels, grid = (tensors[name] for name in FEATURES[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        counts = [t * h * w // self.merger.spec.group for t, h, w in grids]
        return list(self.merger(*self.visual(pixels, grids)).split(counts))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.merger.spec.group * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        patches, dtype = rows * self.merger.spec.group, self.dtype
        return tower_bytes(self.visual.spec, patches, self.merger.spec, dtype, work)


def _rope_theta(vision: Mapping[str, Any]) -> float:
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ConfigError(f"vision rope type {rope['rope_type']!r} is not supported; known is axial")
    return float(rope.get("rope_theta", 10000.0))


def _shared(vision: Mapping[str, Any]) -> dict[str, Any]:
    patch, frames = count(vision, "patch_size"), vision.get("temporal_patch_size", 2)
    channels = vision.get("in_channels", vision.get("in_chans", 3))
    return {
        "depth": count(vision, "depth"),
        "heads": count(vision, "num_heads"),
        "patch_dim": channels * frames * patch * patch,
        "merge": vision.get("spatial_merge_size", 2),
        "rotary": RotarySpec(_rope_theta(vision)),
        "patch_bias": False,
    }


class Qwen2VL(_QwenVL):
    """LayerNorm tower, whole frames in every layer. Its config calls the tower's width `embed_dim`."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = need(config, "vision_config")
        width, act = count(vision, "embed_dim"), vision.get("hidden_act", "quick_gelu")
        if act not in ACTIVATIONS:
            raise ConfigError(f"vision hidden_act {act!r} is not supported; known are {', '.join(ACTIVATIONS)}")
        inner = int(width * vision.get("mlp_ratio", 4))
        tower = TowerSpec(**_shared(vision), width=width, inner=inner, act=act)
        super().__init__(config, tower, count(vision, "hidden_size"), dtype, device)


class Qwen25VL(_QwenVL):
    """RMSNorm and SwiGLU tower, windows in all but a few layers."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = need(config, "vision_config")
        if vision.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"vision hidden_act {vision['hidden_act']!r} is not supported; known is silu")
        shared = _shared(vision)
        size, side = vision.get("window_size", 112), shared["merge"] * vision["patch_size"]
        if size < side:
            raise ConfigError(f"vision window_size {size} holds no merged patch of {side} pixels")
        tower = TowerSpec(
            **shared,
            width=count(vision, "hidden_size"),
            inner=count(vision, "intermediate_size"),
            act="silu",
            rms=True,
            window=size // side,
            full_layers=frozenset(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
            names=GATED_BLOCKS,
        )
        super().__init__(config, tower, count(vision, "out_hidden_size"), dtype, device)
