"""Pixtral and Mistral 3: images of any size, a tower with 2-D rotary positions, a Mistral decoder (arXiv 2410.07073)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ....checkpoints.consolidated import hub_names
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stacks import stack_of
from ...tower_model import TowerModel, numbers_of_states
from ...vision.spec import RotarySpec, TowerNames, TowerSpec

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


_PREFIXES = (
    ("model.vision_tower.", "tower."),
    ("vision_tower.", "tower."),
    ("model.multi_modal_projector.", "projector."),
    ("multi_modal_projector.", "projector."),
    *TEXT_PREFIXES,
)
_MERGER_PREFIXES = (
    ("model.multi_modal_projector.norm.", "merger.norm."),
    ("model.multi_modal_projector.patch_merger.", "merger.patch_merger."),
    ("multi_modal_projector.norm.", "merger.norm."),
    ("multi_modal_projector.patch_merger.", "merger.patch_merger."),
    *_PREFIXES,
)


@dataclass(frozen=True)
class PixtralDefaults:
    """Defaults of what config.json may leave out.

    `layer`: state of the tower that is used. `decoder`: its model_type. `interleaved`: rotated pairs are adjacent numbers,
    as in the publisher's own layout; config.json never states it.
    """

    patch: int = 16
    layer: int = -2
    bias: bool = True
    tied: bool = False
    decoder: str = "mistral"
    interleaved: bool = False


PIXTRAL = PixtralDefaults()
MISTRAL3 = PixtralDefaults(layer=-1, bias=False, tied=True)


class Pixtral(TowerModel):
    """One row per patch, projected by two layers. Several states of the tower (`vision_feature_layer`) are concatenated."""

    prefixes = _PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, tower, projector = pixtral_specs(config, PIXTRAL)
        super().__init__(text, tower, projector, dtype, device, states=_states(config, PIXTRAL, tower.depth))


class PixtralConsolidated(TowerModel):
    """Pixtral in its publisher's own layout."""

    prefixes = _PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*pixtral_specs(config, replace(PIXTRAL, interleaved=True)), dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return hub_names(weights)


class Mistral3(TowerModel):
    """A norm and a linear layer merge squares of patches before the projector's two layers."""

    prefixes = _MERGER_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, tower, projector, merger = mistral3_specs(config, MISTRAL3)
        super().__init__(text, tower, projector, dtype, device, merger=merger)


class Mistral3Consolidated(TowerModel):
    """Mistral 3 in its publisher's own layout."""

    prefixes = _MERGER_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, tower, projector, merger = mistral3_specs(config, replace(MISTRAL3, interleaved=True))
        super().__init__(text, tower, projector, dtype, device, merger=merger)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return hub_names(weights)


def pixtral_specs(config: Mapping[str, Any], defaults: PixtralDefaults) -> tuple[DecoderSpec, TowerSpec, ProjectorSpec]:
    """Read the decoder, the tower without merging, and the projector of two layers."""
    stack = stack_of(config, defaults.decoder)
    stack_defaults = {"tie_word_embeddings": defaults.tied, **stack.defaults}
    text = decoder_spec(config, replace(stack, defaults=stack_defaults, interleaved=defaults.interleaved))
    tower = _tower(config, defaults)
    projector = ProjectorSpec(
        width=tower.width * len(_states(config, defaults, tower.depth)),
        out=text.hidden_size,
        layers=("linear_1", "linear_2"),
        inner=text.hidden_size,
        act=config.get("projector_hidden_act", "gelu"),
        bias=config.get("multimodal_projector_bias", defaults.bias),
    )
    return text, tower, projector


def mistral3_specs(
    config: Mapping[str, Any], defaults: PixtralDefaults
) -> tuple[DecoderSpec, TowerSpec, ProjectorSpec, ProjectorSpec]:
    """Read the decoder, the tower whose patches come in squares, the projector, and the merger before it."""
    text, tower, projector = pixtral_specs(config, defaults)
    if projector.width != tower.width:
        raise ConfigError("vision_feature_layer in config.json is several layers; the model's patch_merger takes a single one")
    merge = positive_int({"spatial_merge_size": 2, **config}, "spatial_merge_size")
    merger = ProjectorSpec(
        width=tower.width,
        out=tower.width,
        layers=("patch_merger.merging_layer",),
        group=merge**2,
        bias=False,
        norm="norm",
        eps=text.eps,
        rms=True,
        channels_first=True,
    )
    return text, replace(tower, merge=merge), projector, merger


def _states(config: Mapping[str, Any], defaults: PixtralDefaults, depth: int) -> tuple[int, ...]:
    return numbers_of_states(config.get("vision_feature_layer", defaults.layer), depth)


def _tower(config: Mapping[str, Any], defaults: PixtralDefaults) -> TowerSpec:
    vision = {**_VISION, "patch_size": defaults.patch, **require(config, "vision_config")}
    theta = (vision.get("rope_parameters") or vision).get("rope_theta", 10000.0)
    depth = positive_int(vision, "num_hidden_layers")
    return TowerSpec(
        depth=depth,
        width=positive_int(vision, "hidden_size"),
        heads=positive_int(vision, "num_attention_heads"),
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=positive_int(vision, "num_channels") * positive_int(vision, "patch_size") ** 2,
        act=vision["hidden_act"],
        merge=1,
        eps=1e-5,
        rms=True,
        patch_bias=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        rotary=RotarySpec(theta, "even_odd", defaults.interleaved),
        pre_norm=True,
        features=tuple(sorted(set(_states(config, defaults, depth)))),
        names=_NAMES,
    )
