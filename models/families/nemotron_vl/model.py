"""Nemotron-Nano-VL: RADIO, pixel shuffle, and a Llama (v1) or Nemotron-H (v2) decoder (arXiv 2511.03929)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ....mm.geometry import pixel_shuffle_side, video_pruning_rate
from ...decoder_model import TEXT_PREFIXES
from ...interface import StepLimits
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import replace_parts, stack_of
from ...tower_model import TowerModel
from ...vision.pruning import prune_video
from ...vision.radio import RADIO_PREFIX, RADIO_UNUSED, radio_spec
from ...vision.spec import TowerSpec

_ENCODER, _DECODER = "vision_model.", "language_model."


class NemotronVL(TowerModel):
    """Nemotron-Nano-VL v2: RMSNorm and squared ReLU in the projector, and a decoder with Mamba 2 layers."""

    prefixes: tuple[tuple[str, str], ...] = (
        (_ENCODER + RADIO_PREFIX, "tower."),
        ("mlp1.", "projector."),
        ("language_model.backbone.", _DECODER),
        *TEXT_PREFIXES,
    )
    ignored = tuple(_ENCODER + name for name in RADIO_UNUSED)
    projector_fields: Mapping[str, Any] = {"rms": True, "bias": False, "act": "relu2"}

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if config.get("ps_version", "v2") != "v2":
            raise ConfigError("ps_version in config.json is not v2, so images would be transposed; use a newer checkpoint")
        vision, stack = require(config, "vision_config"), stack_of(config)
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
        self.pruning_rate = video_pruning_rate(config)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            yield replace_parts(name, self.renames) if name.startswith(_DECODER) else name, tensor

    def remove_decoder(self) -> None:
        if self.pruning_rate:
            raise ConfigError("video_pruning_rate needs the decoder's token embeddings beside the encoder; set it to 0")
        super().remove_decoder()

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. With pruning, the rows of a video include the embeddings of the text between its frames."""
        items = super().embed_multimodal(modality, tensors)
        if modality != "video" or not self.pruning_rate:
            return items
        lengths = [part.tolist() for part in tensors["text_lengths"].split(tensors["grid"][:, 0].tolist())]
        text = self.language_model.embed_tokens(tensors["text_ids"]).split([sum(part) + len(part) for part in lengths])
        return [prune_video(*item, self.pruning_rate) for item in zip(items, text, lengths, strict=True)]

    def _all_rows(self, modality: str, rows: int) -> int:
        """Return the most rows that an item has before pruning."""
        return math.ceil((rows + 1) / (1 - self.pruning_rate)) if modality == "video" and self.pruning_rate else rows

    def tower_spec(self, modality: str) -> TowerSpec:
        spec = self.tower.spec
        return replace(spec, patch_dim=spec.joined_frames * spec.patch_dim) if modality == "video" else spec

    def input_bytes(self, modality: str, rows: int) -> int:
        return super().input_bytes(modality, self._all_rows(modality, rows))

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        every = self._all_rows(modality, rows)
        copies = 5 if every != rows else 0  # normed rows and their products, the result
        pruning = copies * every * self.hidden_size * self.dtype.itemsize
        return super().encoder_bytes(modality, every, limits) + pruning


class LlamaNemotronVL(NemotronVL):
    """Llama-Nemotron-Nano-VL (v1): LayerNorm and biases in the projector."""

    projector_fields = {}


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
