"""LLaVA-NeXT-Video: LLaVA-NeXT whose video frames are pooled before they are projected (LLaVA-NeXT's blog of April 2024).

Source: the class of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ..llava.model import LlavaNext
from .processing import STRIDE

_POOLS: Mapping[str, Callable[..., Tensor]] = {"average": F.avg_pool2d, "max": F.max_pool2d}


class LlavaNextVideo(LlavaNext):
    """Images as in LLaVA-NeXT; a video has the pooled rows of its frames, without newline rows."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        mode = config.get("spatial_pool_mode", "average")
        if mode not in _POOLS:
            raise ConfigError(f"spatial_pool_mode in config.json is {mode!r}; supported are {' and '.join(_POOLS)}")
        self.pool = _POOLS[mode]

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality == "image":
            return super().embed_multimodal(modality, tensors)
        states, grids = self.tower_states(tensors)
        frames = torch.cat([states[layer] for layer in self.layers], 1).unflatten(0, (-1, self.side, self.side))
        pooled = self.pool(frames.permute(0, 3, 1, 2), STRIDE).permute(0, 2, 3, 1)  # [frames, side / 2, side / 2, width]
        rows = self.multi_modal_projector(pooled.flatten(0, 2))
        if self.scale != 1.0:
            rows *= self.scale
        return list(rows.split([t * pooled.shape[1] ** 2 for t, _, _ in grids]))

    def max_patches(self, modality: str, rows: int) -> int:
        if modality == "image":
            return super().max_patches(modality, rows)
        return rows * self.side**2 // (self.side // STRIDE) ** 2
