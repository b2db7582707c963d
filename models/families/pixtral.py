"""Pixtral and Mistral 3: a tower with 2-D rotary positions over pictures of any size, a Mistral decoder (arXiv 2410.07073)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from .config import Stack, count, decoder_spec, need
from .consolidated import hub_names
from .decoder_model import TEXT_PREFIXES
from .layers.connectors import Projector, ProjectorSpec
from .text.spec import DecoderSpec
from .text.stacks import stack_of
from .tower_model import TowerModel, state_of
from .vision.spec import RotarySpec, TowerNames, TowerSpec

_VISION: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3,
    "hidden_act": "gelu",
}  # fmt: skip
_NAMES = TowerNames(
    patch="patch_conv",
    pre_norm="ln_pre",
    layers="transformer.layers",
    norms=("attention_norm", "ffn_norm"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.o_proj",
    mlp=("feed_forward.gate_proj", "feed_forward.up_proj", "feed_forward.down_proj"),
)


class Pixtral(TowerModel):
    """Pixtral: a row for each patch, through two layers."""

    prefixes: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.vision_tower.", "tower."),
        ("vision_tower.", "tower."),
        ("model.multi_modal_projector.", "projector."),
        ("multi_modal_projector.", "projector."),
        *TEXT_PREFIXES,
    )
    patch: ClassVar[int] = 16
    layer: ClassVar[int] = -2  # of the tower whose state is used, where config.json does not say
    bias: ClassVar[bool] = True
    tied: ClassVar[bool] = False
    neighbours: ClassVar[bool] = False
    decoder: ClassVar[str] = "mistral"  # its model_type, where config.json does not say

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, tower = decoder_spec(config, self.stack(config)), self.tower_spec(config)
        super().__init__(text, tower, self.projector_spec(config, text, tower.width), dtype, device)

    def stack(self, config: Mapping[str, Any]) -> Stack:
        """Of the decoder."""
        stack = stack_of(config, self.decoder)
        return replace(stack, defaults={"tie_word_embeddings": self.tied, **stack.defaults}, neighbours=self.neighbours)

    def tower_spec(self, config: Mapping[str, Any]) -> TowerSpec:
        """Of the tower; patches come in the squares that are merged."""
        vision = {**_VISION, "patch_size": self.patch, **need(config, "vision_config")}
        theta = (vision.get("rope_parameters") or vision).get("rope_theta", 10000.0)
        depth = count(vision, "num_hidden_layers")
        return TowerSpec(
            depth=depth,
            width=count(vision, "hidden_size"),
            heads=count(vision, "num_attention_heads"),
            inner=count(vision, "intermediate_size"),
            patch_dim=count(vision, "num_channels") * count(vision, "patch_size") ** 2,
            act=vision["hidden_act"],
            merge=self.merge_of(config),
            eps=1e-5,
            rms=True,
            patch_bias=False,
            qkv_bias=False,
            out_bias=False,
            mlp_bias=False,
            rotary=RotarySpec(theta, "even_odd", self.neighbours),
            pre_norm=True,
            features=state_of(config.get("vision_feature_layer", self.layer), depth),
            names=_NAMES,
        )

    def merge_of(self, config: Mapping[str, Any]) -> int:
        """Patches along each side that become one row."""
        return 1

    def projector_spec(self, config: Mapping[str, Any], text: DecoderSpec, width: int) -> ProjectorSpec:
        """Of the two layers."""
        return ProjectorSpec(
            width=width,
            out=text.hidden_size,
            layers=("linear_1", "linear_2"),
            inner=text.hidden_size,
            act=config.get("projector_hidden_act", "gelu"),
            bias=config.get("multimodal_projector_bias", self.bias),
        )


class Mistral3(Pixtral):
    """Mistral 3: patches are normed and merged by a layer before the other two."""

    prefixes: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.multi_modal_projector.norm.", "merger.norm."),
        ("model.multi_modal_projector.patch_merger.", "merger.patch_merger."),
        ("multi_modal_projector.norm.", "merger.norm."),
        ("multi_modal_projector.patch_merger.", "merger.patch_merger."),
        *Pixtral.prefixes,
    )
    patch, layer, bias, tied = 14, -1, False, True

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        tower = self.tower.spec
        merger = ProjectorSpec(
            width=tower.width,
            out=tower.width,
            layers=("patch_merger.merging_layer",),
            group=self.merge_of(config) ** 2,
            bias=False,
            norm="norm",
            eps=self.spec.eps,
            rms=True,
            channels_first=True,
        )
        self.merger = Projector(merger, dtype, device)

    def merge_of(self, config: Mapping[str, Any]) -> int:
        return count({"spatial_merge_size": 2, **config}, "spatial_merge_size")

    def project(self, rows: Tensor) -> Tensor:
        return super().project(self.merger(rows))


class PixtralFormat(Pixtral):
    """Pixtral in its publisher's own layout, where pairs of rotary positions are neighbours."""

    neighbours = True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(hub_names(weights))


class Mistral3Format(Mistral3):
    """Mistral 3 in its publisher's own layout."""

    neighbours = True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(hub_names(weights))
