"""Nemotron-Nano-VL: RADIO, pixel shuffle, and a Llama (v1) or Nemotron-H (v2) decoder (arXiv 2511.03929)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...mm.errors import ConfigError
from ...mm.geometry import pixel_shuffle_side
from ..config import decoder_spec, positive_int, require
from ..decoder_model import TEXT_PREFIXES
from ..layers.connectors import ProjectorSpec
from ..text.stacks import replace_parts, stack_of
from ..tower_model import TowerModel
from ..vision.radio import RADIO_PREFIX, RADIO_UNUSED, radio_spec

_ENCODER, _DECODER = "vision_model.", "language_model."


class LlamaNemotronVL(TowerModel):
    """Llama-Nemotron-Nano-VL (v1): LayerNorm and biases in the projector."""

    prefixes = (
        (_ENCODER + RADIO_PREFIX, "tower."),
        ("mlp1.", "projector."),
        ("language_model.backbone.", _DECODER),
        *TEXT_PREFIXES,
    )
    ignored = tuple(_ENCODER + name for name in RADIO_UNUSED)
    projector_fields: Mapping[str, Any] = {}

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if config.get("ps_version", "v2") != "v2":
            raise ConfigError("ps_version in config.json is not v2, so images would be transposed; use a newer checkpoint")
        vision, stack = require(config, "vision_config"), stack_of(config)
        if vision.get("video_temporal_patch_size", 1) != 1:
            raise ConfigError("video_temporal_patch_size in vision_config joins frames of videos; only 1 is supported")
        text = decoder_spec(config, stack)
        merge = pixel_shuffle_side(config)
        tower = radio_spec(vision, _min_frame(config, vision), merge)
        projector = ProjectorSpec(
            width=tower.width,
            out=text.hidden_size,
            layers=("1", "3"),
            group=merge**2,
            inner=positive_int({"projector_hidden_size": 4096, **config}, "projector_hidden_size"),
            norm="0",
            joined_norm=True,
            **self.projector_fields,
        )
        super().__init__(text, tower, projector, dtype, device)
        self.renames = stack.renames

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield replace_parts(name, self.renames) if name.startswith(_DECODER) else name, tensor


class NemotronVL(LlamaNemotronVL):
    """Nemotron-Nano-VL v2: RMSNorm and squared ReLU in the projector, and a decoder with Mamba 2 layers."""

    projector_fields = {"rms": True, "bias": False, "act": "relu2"}


def _min_frame(config: Mapping[str, Any], vision: Mapping[str, Any]) -> int:
    """Return the patches of the smallest tile, image or frame. A frame has at least half of the patches that it should have."""
    patch = positive_int({"patch_size": vision.get("patch_size", 16), **config}, "patch_size")
    tile = positive_int({"force_image_size": 512, **config}, "force_image_size")
    args = require(vision, "args")
    image = frame = max(1, (tile // patch) ** 2)
    if args.get("min_num_patches"):
        image = positive_int(args, "min_num_patches")
    if vision.get("video_target_num_patches"):
        frame = positive_int(vision, "video_target_num_patches") // 2
    elif vision.get("video_target_img_size"):
        frame = math.ceil(positive_int(vision, "video_target_img_size") / patch) ** 2 // 2
    return max(1, min(image, frame))
