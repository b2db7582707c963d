"""Kanana-1.5-v: the tower of Qwen2-VL without its merger, a C-Abstractor, Llama.

Sources: the publisher's class (kakaocorp/kanana-1.5-v-3b-instruct); vLLM's kanana_v.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError, short_repr
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...native_model import TENSORS, axial_theta, patch_numbers
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...tower_model import feature_states
from ...vision.spec import RotarySpec, TowerSpec
from ...vision.vit import VisionTower, tower_bytes
from .abstractor import Abstractor, AbstractorSpec, abstractor_bytes

_VISION: dict[str, Any] = {
    "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "hidden_act": "quick_gelu",
}  # fmt: skip
_PROJECTOR: dict[str, Any] = {
    "depth": 2, "hidden_size": 1024, "merge_size": 2, "mlp_depth": 2, "output_hidden_size": 2048, "pos_emb": True,
    "pos_emb_size": 576, "prenorm": False, "projector_type": "dynamic-c-abs", "feature_layer_index": -1,
}  # fmt: skip


class KananaV(DecoderModel):
    """A model of images."""

    prefixes = (("vision_model.", "visual."), ("abstractor.", "abstractor."), *TEXT_PREFIXES)
    ignored: tuple[str, ...] = ("abstractor.eos_tokens",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **require(config, "vision_config")}
        projector = {**_PROJECTOR, **(config.get("projector_config") or {})}
        text = require(config, "text_config")
        tied = config.get("tie_word_embeddings") or text.get("tie_word_embeddings", False)
        super().__init__(decoder_spec({**config, "tie_word_embeddings": tied}, STACKS["llama"]), dtype, device)
        tower = _tower(vision, projector["feature_layer_index"])
        self.visual = VisionTower(tower, dtype, device)
        self.abstractor = Abstractor(_abstractor(projector, tower), dtype, device)
        self.ignored = (*self.ignored, *(f"visual.{name}" for name in tower.unbuilt))
        if self.abstractor.spec.out != self.hidden_size:
            width = self.abstractor.spec.out
            raise ConfigError(f"output_hidden_size of projector_config is {width}, the decoder takes {self.hidden_size}")

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        (state,) = self.visual(pixels, grids)
        parts = state.split([t * h * w for t, h, w in grids])
        return [self.abstractor(rows, h, w) for rows, (_, h, w) in zip(parts, grids, strict=True)]

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.abstractor.spec.merge**2 * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        tower, c = self.visual.spec, self.abstractor.spec
        patches = rows * c.merge**2
        held = patches * (tower.patch_dim + tower.width) * self.dtype.itemsize
        joined = abstractor_bytes(c, patches, self.dtype, limits)
        return max(tower_bytes(tower, patches, None, self.dtype, limits), held + joined)


def _tower(vision: Mapping[str, Any], layer: object) -> TowerSpec:
    width, depth = positive_int(vision, "embed_dim"), positive_int(vision, "depth")
    return TowerSpec(
        depth=depth,
        width=width,
        heads=positive_int(vision, "num_heads"),
        inner=int(width * vision["mlp_ratio"]),
        patch_dim=patch_numbers(vision),
        act=vision["hidden_act"],
        merge=positive_int(vision, "spatial_merge_size"),
        rotary=RotarySpec(axial_theta(vision)),
        patch_bias=False,
        features=feature_states(layer, depth),
    )


def _abstractor(projector: Mapping[str, Any], tower: TowerSpec) -> AbstractorSpec:
    """Read the C-Abstractor.

    Raises:
        ConfigError: another projector, or positions that are no square.
    """
    kind, table = projector["projector_type"], positive_int(projector, "pos_emb_size") if projector["pos_emb"] else 0
    if kind != _PROJECTOR["projector_type"]:
        raise ConfigError(f"projector_type is {short_repr(kind)}; only {_PROJECTOR['projector_type']} is supported")
    if math.isqrt(table) ** 2 != table:
        raise ConfigError(f"pos_emb_size of projector_config is {table}; it must be a square")
    width = projector.get("encoder_hidden_size", tower.width)
    merge = positive_int(projector, "merge_size")
    if (width, merge) != (tower.width, tower.merge):
        got = f"encoder_hidden_size {width} and merge_size {merge} of projector_config"
        raise ConfigError(f"{got} differ from those of vision_config, {tower.width} and {tower.merge}")
    return AbstractorSpec(
        width=tower.width,
        inner=positive_int(projector, "hidden_size"),
        out=positive_int(projector, "output_hidden_size"),
        depth=positive_int(projector, "depth"),
        merge=merge,
        layers=positive_int(projector, "mlp_depth"),
        table=math.isqrt(table),
        prenorm=bool(projector["prenorm"]),
    )
