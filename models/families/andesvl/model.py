"""AndesVL (arXiv 2510.11496): AIMv2 with rotary positions at native resolution, squares of four rows, and Qwen3.

Sources: modeling_andesvl.py of the checkpoints, and the publisher's evaluation code (AndesVL_Evaluation on GitHub).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...tower_model import TowerModel
from ...vision.spec import RotarySpec, TableSpec, TowerSpec
from ..ovis.model import TRUNK

MERGE = 2  # squares of 2 x 2 rows of the tower are joined
_VISION: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 8, "num_channels": 3,
    "image_size": 448, "patch_size": 14, "rms_norm_eps": 1e-5, "qkv_bias": False, "use_bias": False, "hidden_stride": MERGE,
    "temporal_patch_size": 1, "window_size": 224, "fullatt_block_indexes": None, "disable_rope": False,
    "preserve_original_pe": False, "interpolate_pe_method": "two_dim",
}  # fmt: skip
_FIXED = {"hidden_stride": MERGE, "temporal_patch_size": 1, "interpolate_pe_method": "two_dim"}


class AndesVL(TowerModel):
    """A model of images."""

    prefixes = (("vision_encoder.", "tower."), ("mlp.", "projector."), *TEXT_PREFIXES)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, tower = decoder_spec(config, stack_of(config, "qwen3")), _tower({**_VISION, **require(config, "vision_config")})
        projector = ProjectorSpec(tower.width, text.hidden_size, ("0", "2"), group=MERGE**2)
        super().__init__(text, tower, projector, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Remove the first axis of the position embeddings."""
        for name, tensor in weights:
            yield name, tensor.squeeze(0) if name.endswith("preprocessor.pos_embed") else tensor


def _tower(c: Mapping[str, Any]) -> TowerSpec:
    for key, value in _FIXED.items():
        if c[key] != value:
            raise ConfigError(f"{key} in vision_config is {c[key]!r}; only {value} is supported")
    patch, full, bias = positive_int(c, "patch_size"), c["fullatt_block_indexes"], bool(c["use_bias"])
    return TowerSpec(
        depth=positive_int(c, "num_hidden_layers"),
        width=positive_int(c, "hidden_size"),
        heads=positive_int(c, "num_attention_heads"),
        inner=positive_int(c, "intermediate_size"),
        patch_dim=positive_int(c, "num_channels") * patch**2,
        act="silu",
        merge=MERGE,
        eps=c["rms_norm_eps"],
        rms=True,
        qkv_bias=bool(c["qkv_bias"]),
        out_bias=bias,
        mlp_bias=bias,
        rotary=None if c["disable_rope"] else RotarySpec(),
        table=TableSpec(positive_int(c, "image_size") // patch, "bicubic") if c["preserve_original_pe"] else None,
        patch_norm=True,
        post_norm=True,
        window=0 if full is None else positive_int(c, "window_size") // MERGE // patch,
        full_layers=frozenset(full or ()),
        names=TRUNK,
    )
