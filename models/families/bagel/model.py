"""BAGEL (arXiv 2505.14683), the understanding part: SigLIP at native resolution, a connector, Qwen2 with normed heads.

The checkpoint also holds the part that generates images, which is not built: a second set of the decoder's weights
(`_moe_gen`) and layers around an autoencoder. Source: the publisher's modeling/bagel, and vLLM's bagel.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...layers.builder import StoredTensor
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...tower_model import TowerModel
from ...vision.encoders import encoder_spec, with_defaults
from ...vision.spec import TableSpec

_ENCODER = "siglip_vision_model"
_GENERATES = "_moe_gen"
_STACK = replace(STACKS["qwen2"], qk_norm="head")


class Bagel(TowerModel):
    """A model of images. Connected rows get a second table of positions, the upper left part of which an image uses."""

    prefixes = (
        ("vit_model.vision_model.", "tower."),
        ("connector.", "projector."),
        ("vit_pos_embed.pos_embed", "positions"),
        *TEXT_PREFIXES,
    )
    ignored = ("time_embedder.", "vae2llm.", "llm2vae.", "latent_pos_embed.", "tower.head.")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = with_defaults({**require(config, "vit_config"), "model_type": _ENCODER}, _ENCODER)
        self.patch, self.side = positive_int(vision, "patch_size"), config.get("vit_max_num_patch_per_side", 70)
        if config.get("interpolate_pos") or positive_int(vision, "image_size") != self.side * self.patch:
            positions = f"{vision['image_size']} pixels and interpolate_pos {bool(config.get('interpolate_pos'))}"
            raise ConfigError(f"config.json asks for positions of {positions}; only {self.side} patches a side are supported")
        vision["num_hidden_layers"] = positive_int(vision, "num_hidden_layers") - 1  # the last one is neither used nor stored
        tower = encoder_spec(vision, _ENCODER, table=TableSpec(self.side, "corner"), post_norm=True)
        text = decoder_spec({**config, "tie_word_embeddings": False}, _STACK, tied=False)
        act = config.get("connector_act") or "gelu_pytorch_tanh"
        projector = ProjectorSpec(tower.width, text.hidden_size, ("fc1", "fc2"), inner=text.hidden_size, act=act)
        super().__init__(text, tower, projector, dtype, device)
        self.positions = StoredTensor((self.side**2, text.hidden_size), dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        items = super().embed_multimodal(modality, tensors)
        table = self.positions.weight.view(self.side, self.side, -1)
        for rows, (_, h, w) in zip(items, tensors["grid"].tolist(), strict=True):
            rows.view(h, w, -1).add_(table[:h, :w])
        return items

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Drop the weights that generate images, and put the channels of a patch first, which are stored last."""
        for name, tensor in weights:
            if name.endswith("embeddings.patch_embedding.weight") and tensor.ndim == 2:
                tensor = tensor.unflatten(1, (self.patch, self.patch, -1)).permute(0, 3, 1, 2).flatten(1)
            if _GENERATES not in name:
                yield name, tensor

    def is_unused(self, name: str) -> bool:
        return _GENERATES in name or super().is_unused(name)
