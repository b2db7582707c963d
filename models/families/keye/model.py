"""Keye-VL (arXiv 2507.01949) and Keye-VL-1.5 (2509.01563): SigLIP with 2-D rotary positions, a Qwen3 decoder with M-RoPE.

Source: the publisher's modelling code (Kwai-Keye on GitHub), and vLLM's keye.py and keye_vl1_5.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from ...text.stacks import STACKS
from ..paddleocr_vl.model import PaddleOcrVL
from ..qwen2_vl.model import STACK

_DECODER = replace(STACKS["qwen3"], defaults=STACK.defaults)
_VISION: Mapping[str, Any] = {"patch_size": 14, "spatial_merge_size": 2}


class KeyeVL(PaddleOcrVL):
    """Keye-VL: patches attend to all frames of their video."""

    stack, vision_defaults = _DECODER, _VISION
    temporal_attention = True


class KeyeVL15(PaddleOcrVL):
    """Keye-VL-1.5: patches attend to their own frame; frames of a video may differ in size."""

    stack, vision_defaults = _DECODER, _VISION
    joined_norm = True

    def item_rows(self, tensors: Mapping[str, Any], rows: list[int]) -> list[int]:
        """Add up the rows of each video of slow and fast frames, whose every frame is a grid."""
        if "num_frames" not in tensors:
            return rows
        grids = iter(rows)
        return [sum(islice(grids, count)) for count in tensors["num_frames"].tolist()]
