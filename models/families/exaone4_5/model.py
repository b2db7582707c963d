"""EXAONE 4.5: the tower of Qwen2.5-VL with grouped queries, and EXAONE 4 with positions of one axis.

Source: the class of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ....checkpoints.config import positive_int, require
from ...native_model import NativeModel
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.spec import GATED_BLOCKS
from ..qwen2_vl.model import PREFIXES, qwen25_tower


class Exaone45(NativeModel):
    """A model of images and videos. Older configs call the decoder `exaone4_5_text`."""

    prefixes = PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {"num_key_value_heads": 8, **require(config, "vision_config")}
        tower, merger = qwen25_tower(vision, GATED_BLOCKS)
        tower = replace(tower, kv_heads=positive_int(vision, "num_key_value_heads"))
        super().__init__(decoder_spec(config, STACKS["exaone4"]), tower, (merger,), dtype, device)
