"""dots.ocr (arXiv 2512.02498): pages at native size, a tower with RMSNorm and SwiGLU, a Qwen2 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...layers.connectors import ProjectorSpec
from ...native_model import NativeModel
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.spec import RotarySpec, TowerNames, TowerSpec

_VISION = {
    "embed_dim": 1536, "intermediate_size": 4224, "num_hidden_layers": 42, "num_attention_heads": 12, "num_channels": 3,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 1, "rms_norm_eps": 1e-5, "use_bias": False,
    "post_norm": True,
}  # fmt: skip
_NAMES = TowerNames(
    patch="patch_embed.patchifier.proj",
    patch_norm="patch_embed.patchifier.norm",
    mlp=("mlp.fc1", "mlp.fc3", "mlp.fc2"),
    post_norm="post_trunk_norm",
)


class DotsOcr(NativeModel):
    """A model of images. The text config is at the top level of config.json."""

    prefixes = (
        ("vision_tower.merger.", "merger."),
        ("vision_tower.", "visual."),
        ("lm_head.", "head.lm_head."),
        ("model.", "language_model."),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **(config.get("vision_config") or {})}
        if vision["temporal_patch_size"] != 1 or vision.get("is_causal"):
            raise ConfigError("vision_config has patches of several frames or causal attention; this tower supports neither")
        decoder, bias = decoder_spec(config, STACKS["qwen2"]), bool(vision["use_bias"])
        tower = TowerSpec(
            depth=positive_int(vision, "num_hidden_layers"),
            width=positive_int(vision, "embed_dim"),
            heads=positive_int(vision, "num_attention_heads"),
            inner=positive_int(vision, "intermediate_size"),
            patch_dim=positive_int(vision, "num_channels") * positive_int(vision, "patch_size") ** 2,
            act="silu",
            merge=positive_int(vision, "spatial_merge_size"),
            eps=vision["rms_norm_eps"],
            rms=True,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            rotary=RotarySpec(),
            patch_norm=True,
            post_norm=bool(vision["post_norm"]),
            names=_NAMES,
        )
        merger = ProjectorSpec(tower.width, decoder.hidden_size, ("mlp.0", "mlp.2"), tower.merge**2, norm="ln_q", eps=1e-6)
        super().__init__(decoder, tower, (merger,), dtype, device)
