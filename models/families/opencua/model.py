"""OpenCUA (arXiv 2508.09123): the tower of Qwen2.5-VL and Qwen2, whose positions have one axis. Source: vLLM's opencua.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ....checkpoints.config import require
from ...native_model import NativeModel
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.spec import GATED_BLOCKS
from ..qwen2_vl.model import PREFIXES, qwen25_tower


class OpenCUA(NativeModel):
    """A model of images."""

    prefixes = PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        tower, merger = qwen25_tower(require(config, "vision_config"), GATED_BLOCKS)
        super().__init__(decoder_spec(config, STACKS["qwen2"]), tower, (merger,), dtype, device)
