"""Idefics2 (arXiv 2405.02246): quarters of an image and the whole at their own sizes, a gated MLP, a perceiver resampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, get_text_config, positive_int, require
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.mlp import GatedMlp, gated_mlp_bytes
from ...layers.perceiver import PerceiverResampler, PerceiverSpec, perceiver_bytes
from ...memory_formulas import OpBytes
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec, MlpSpec
from ...text.stacks import stack_of
from ...vision.vit import VisionTower, tower_bytes
from ..idefics3.model import bucketed_tower

_TEXT = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5}  # used if config.json has no text_config
_PERCEIVER = {
    "hidden_size": 4096, "rms_norm_eps": 1e-6, "resampler_n_latents": 64, "resampler_depth": 3, "resampler_n_heads": 16,
    "resampler_head_dim": 96, "num_key_value_heads": 4, "hidden_act": "silu",
}  # fmt: skip


class Idefics2(DecoderModel):
    """Images of any size. Each becomes as many rows as the resampler has latents."""

    prefixes = (
        ("model.vision_model.", "tower."),
        ("model.connector.modality_projection.", "projector."),
        ("model.connector.perceiver_resampler.", "resampler."),
        ("model.text_model.", "language_model."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {**config, "text_config": config.get("text_config") or _TEXT}
        text = decoder_spec(config, stack_of(config, "mistral"))
        super().__init__(text, dtype, device)
        mlp = text.layers[0].mlp
        assert mlp is not None
        self.inner = mlp.inner if isinstance(mlp, MlpSpec) else positive_int(get_text_config(config), "intermediate_size")
        tower = bucketed_tower({"patch_size": 32, **require(config, "vision_config")})
        assert tower.table is not None
        self.most_patches = tower.table.side**2
        self.tower = VisionTower(tower, dtype, device)
        self.projector = GatedMlp(tower.width, self.inner, False, dtype, device, act=mlp.act, out=text.hidden_size)
        self.resampler = PerceiverResampler(_perceiver_spec(config.get("perceiver_config") or {}, text), dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `tensors["grids"]` has an int64 `[images, 3]` per item: the grids of its quarters and of the whole."""
        items = [[(t, h, w) for t, h, w in grids.tolist()] for grids in tensors["grids"]]
        grids = [grid for item in items for grid in item]
        patches = self.tower(tensors["pixel_values"], grids)[-1].split([h * w for _, h, w in grids])
        rows = torch.cat([self.resampler(self.projector(image)) for image in patches])
        return list(rows.split([len(item) * self.resampler.spec.latents for item in items]))

    def max_patches(self, rows: int) -> tuple[int, int]:
        """Return the most patches of one image, and of all images that give `rows` rows."""
        return self.most_patches, -(-rows // self.resampler.spec.latents) * self.most_patches

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.max_patches(rows)[1] * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the peak in the tower, which takes all images together, or after it, where one image follows another."""
        tower, size, (each, patches) = self.tower.spec, self.dtype.itemsize, self.max_patches(rows)
        mlp = each * gated_mlp_bytes(tower.width, self.inner, OpBytes(self.dtype, replace(limits, rows=each)), self.hidden_size)
        image = max(mlp, perceiver_bytes(self.resampler.spec, each, self.dtype, limits))
        result = rows * self.hidden_size * size
        base = patches * (tower.patch_dim + tower.width) * size + result
        return max(tower_bytes(tower, patches, None, self.dtype, limits), base + max(image, result))


def _perceiver_spec(perceiver: Mapping[str, Any], text: DecoderSpec) -> PerceiverSpec:
    """Return the resampler's spec. As in transformers, epsilon is the decoder's if the widths differ."""
    c = {**_PERCEIVER, **perceiver}
    heads, kv_heads = positive_int(c, "resampler_n_heads"), positive_int(c, "num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(f"resampler_n_heads {heads} is not a multiple of num_key_value_heads {kv_heads} (perceiver_config)")
    return PerceiverSpec(
        width=text.hidden_size,
        latents=positive_int(c, "resampler_n_latents"),
        layers=positive_int(c, "resampler_depth"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=positive_int(c, "resampler_head_dim"),
        inner=4 * text.hidden_size,
        act=check_activation("hidden_act of perceiver_config", c["hidden_act"]),
        eps=c["rms_norm_eps"] if c["hidden_size"] == text.hidden_size else text.eps,
    )
