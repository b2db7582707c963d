"""Qwen2-VL and Qwen2.5-VL: the tower's rows take the place of placeholder embeddings in an M-RoPE decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..mm.errors import ConfigError
from .activations import decoder_bytes, gathered_bytes, tower_bytes
from .config import count, need, text_config
from .interface import ForwardBatch, Work
from .layers.basic import ACTIVATIONS
from .layers.connectors import Projector, ProjectorSpec
from .layers.linear import Head
from .text.decoder import Decoder
from .vision.spec import GATED_BLOCKS, RotarySpec, TowerSpec
from .vision.vit import Tower
from .weights import fill

PREFIXES = (  # as stored -> canonical; new names first, since old ones are shorter
    ("model.visual.merger.", "merger."),
    ("visual.merger.", "merger."),
    ("model.visual.", "visual."),
    ("model.language_model.", "language_model."),
    ("lm_head.", "head.lm_head."),
    ("model.", "language_model."),
)
FEATURES = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


class _QwenVL(nn.Module):
    """What both share: see `models.interface.Model`."""

    def __init__(
        self, config: Mapping[str, Any], tower: TowerSpec, out_width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        text = text_config(config)
        if out_width != text.hidden_size:
            raise ConfigError(f"the tower makes rows of {out_width}, the decoder takes {text.hidden_size}")
        self.rope_axes = len(text.rope_sections)
        self.vocab_size, self.hidden_size, self.max_positions = text.vocab_size, text.hidden_size, text.max_positions
        self.visual = Tower(tower, dtype, device)
        merger = ProjectorSpec(
            tower.width, out_width, ("mlp.0", "mlp.2"), tower.merge**2, norm="ln_q", eps=tower.eps, rms=tower.rms
        )
        self.merger = Projector(merger, dtype, device)
        self.language_model = Decoder(text, dtype, device)
        table = self.language_model.embed_tokens.weight if text.tied else None
        self.head = Head(text.hidden_size, text.vocab_size, table, dtype, device)
        self.cache_specs = self.language_model.cache_specs
        self.tied = text.tied

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        pixels, grid = (tensors[name] for name in FEATURES[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        counts = [t * h * w // self.merger.spec.group for t, h, w in grids]
        return list(self.merger(*self.visual(pixels, grids)).split(counts))

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.language_model(batch)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # type: ignore[no-any-return]

    def forward_bytes(self, work: Work) -> int:
        text, dtype = self.language_model.config, self.visual.dtype
        return decoder_bytes(text, work, dtype) + gathered_bytes(text, work, dtype)

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.merger.spec.group * self.visual.spec.patch_dim * self.visual.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        patches, dtype = rows * self.merger.spec.group, self.visual.dtype
        return tower_bytes(self.visual.spec, patches, self.merger.spec, dtype, work)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        aliases = {"head.lm_head.weight": "language_model.embed_tokens.weight"} if self.tied else {}
        fill(self, weights, PREFIXES, aliases)


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
