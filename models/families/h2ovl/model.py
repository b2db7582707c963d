"""H2OVL-Mississippi: InternVL in its publisher's layout (arXiv 2410.13611; modeling_h2ovl_chat.py of the checkpoints)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..internvl.model import InternVLChat


class H2OVL(InternVLChat):
    """InternVL, whose config class has another default layer of the tower."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({"select_layer": -4, **config}, dtype, device)
