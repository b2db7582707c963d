"""The reasoner of Cosmos 3 Edge: SigLIP 2 over packed images and frames, and a Llama with squared ReLUs and M-RoPE.

Sources: the class of transformers 5.23; vLLM's cosmos3_edge.py (the names of checkpoints that also have a generator).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...native_model import NativeModel
from ...text.decoder_config import decoder_spec
from ...text.spec import interleaved_sections
from ...text.stack import Stack
from ...text.stacks import replace_parts
from ...vision.encoders import encoder_spec
from ...vision.spec import TableSpec
from ..cosmos3.model import GENERATOR, reasoner_weights

_TEXT: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 2048, "intermediate_size": 9216, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "hidden_act": "relu2", "rms_norm_eps": 1e-5,
    "rope_theta": 1e8, "mrope_section": (24, 20, 20),
}  # fmt: skip
_VISION: dict[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 16,
    "num_patches": 256, "spatial_merge_size": 2,
}  # fmt: skip
_STACK = Stack(_TEXT, plain=("fc1", "fc2"), axes=interleaved_sections)
_MLP = ((".mlp.up_proj.", ".mlp.fc1."), (".mlp.down_proj.", ".mlp.fc2."))
_PATCH = "visual.embeddings.patch_embedding.weight"


class Cosmos3Edge(NativeModel):
    """A model of images and videos, under its own names or under the flat names of checkpoints with a generator."""

    prefixes = (
        *((f"{name}.", f"language_model.{name}.") for name in ("layers", "embed_tokens", "norm")),
        ("model.visual.", "visual."),
        ("model.projector.", "merger."),
        ("projector.", "merger."),
        *TEXT_PREFIXES,
    )
    ignored = ("visual.head.", *GENERATOR, *(f"language_model.{name}" for name in GENERATOR))

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **require(config, "vision_config")}
        side, merge = math.isqrt(positive_int(vision, "num_patches")), positive_int(vision, "spatial_merge_size")
        tower = encoder_spec(
            {**vision, "model_type": "siglip_vision_model", "image_size": side * positive_int(vision, "patch_size")},
            "siglip_vision_model",
            merge=merge,
            post_norm=True,
            table=TableSpec(side, "bilinear", antialias=True),
        )
        decoder = decoder_spec(config, _STACK, tied=False)  # as in transformers' class, whatever config.json says
        merger = ProjectorSpec(
            tower.width,
            decoder.hidden_size,
            ("linear_fc1", "linear_fc2"),
            group=merge**2,
            inner=positive_int({"projector_hidden_size": 11520, **config}, "projector_hidden_size"),
            norm="norm",
            eps=1e-6,
        )
        super().__init__(decoder, tower, (merger,), dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors; the numbers of a patch are stored pixel by pixel, and here channel by channel."""
        for name, tensor in reasoner_weights(super().convert_weights(weights)):
            if name.endswith(_PATCH):
                side = math.isqrt(tensor.shape[1] // 3)
                tensor = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2).flatten(1)
            yield replace_parts(name, _MLP), tensor
