"""Gemma 3 (arXiv 2503.19786): SigLIP with squares of its rows averaged, a decoder with sliding windows in most layers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...interface import StepLimits
from ...layers.connectors import ProjectorSpec, squares
from ...text.bidirectional import one_sided
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...tower_model import TOWER_PREFIXES, TowerModel
from ...vision.encoders import encoder_spec
from ...vision.vit import tower_bytes

_MATRIX = "mm_input_projection_weight"  # stored as `[in, out]`


class Gemma3(TowerModel):
    """A model of images."""

    prefixes = (
        (f"model.multi_modal_projector.{_MATRIX}", "projector.matrix.weight"),
        (f"multi_modal_projector.{_MATRIX}", "projector.matrix.weight"),
        *TOWER_PREFIXES,
    )
    ignored = ("tower.head.", "tower.embeddings.position_ids")  # a pooling head; a buffer in old checkpoints

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        stack = stack_of(config, "gemma3_text")
        inner = require(config, "text_config")
        # beside images, use_bidirectional_attention changes the windows alone: the processor's token types make the masks
        inner = {**one_sided(inner, stack), "is_causal": inner.get("is_causal")}
        text = decoder_spec({**config, "text_config": inner}, stack)
        tower = encoder_spec(require(config, "vision_config"), "siglip_vision_model", post_norm=True)
        assert tower.table is not None
        side, tokens = tower.table.side, positive_int({"mm_tokens_per_image": 256, **config}, "mm_tokens_per_image")
        merge = side // math.isqrt(tokens)
        if not merge:
            raise ConfigError(f"mm_tokens_per_image is {tokens}; at most {side**2} fit {side} patches per side")
        projector = ProjectorSpec(
            tower.width,
            text.hidden_size,
            ("matrix",),
            merge**2,
            bias=False,
            norm="mm_soft_emb_norm",
            eps=tower.eps,
            rms=True,
            norm_offset=1.0,
            averaged=True,
        )
        super().__init__(text, replace(tower, merge=1 if side % merge else merge), projector, dtype, device)
        self.merge, self.side = merge, side

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. Patches at the right and bottom that fill no square are left out after the tower."""
        if self.tower.spec.merge == self.merge:
            return super().embed_multimodal(modality, tensors)
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        (state,) = self.tower(tensors["pixel_values"], grids)
        rows = self.projector(squares(state, grids, self.merge))
        return list(rows.split([t * (h // self.merge) * (w // self.merge) for t, h, w in grids]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return tower_bytes(self.tower.spec, self._patches(rows), self.projector.spec, self.dtype, limits)

    def _patches(self, rows: int) -> int:
        """Return the patches of the images that have this many rows."""
        return -(-rows * self.side**2 // (self.side // self.merge) ** 2)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return ((name, tensor.T if name.endswith(_MATRIX) else tensor) for name, tensor in weights)
