"""LLaVA-OneVision-2 (arXiv 2605.25979): OneVision-Encoder, an MLP over squares of patches, Qwen3 with positions of one axis.

Sources: the publisher's class (EvolvingLMMs-Lab/LLaVA-OneVision-2 on GitHub); vLLM's llava_onevision2.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError, short_repr
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...native_model import TENSORS, NativeModel
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...vision.spec import RotarySpec, TowerNames, TowerSpec

_VISION: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3,
    "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "layer_norm_type": "layer_norm", "rope_theta": 10000.0,
    "use_head": False, "spatial_merge_size": 3,
}  # fmt: skip
_NORMS = ("layer_norm", "rms_norm")
_HEAD_UNIT = 32  # a head is divided by time, rows and columns as 4 : 6 : 6, twice
_NAMES = TowerNames(
    patch="embeddings.patch_embedding",
    pre_norm="layernorm_pre",
    post_norm="layernorm_post",
    layers="encoder.layers",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.qkv",),
    out="self_attn.proj",
)


class LlavaOnevision2(NativeModel):
    """A model of images and videos. Patches attend within their frame, and are rotated by its number, too."""

    prefixes = (("model.visual.merger.", "merger."), ("model.visual.", "visual."), *TEXT_PREFIXES)
    ignored = ("visual.head.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **require(config, "vision_config")}
        tower = _tower(vision)
        decoder = decoder_spec(config, stack_of(config, "qwen3"))
        names, eps = ("mlp.0", "mlp.2"), vision["layer_norm_eps"]
        merger = ProjectorSpec(tower.width, decoder.hidden_size, names, tower.merge**2, norm="ln_q", eps=eps)
        super().__init__(decoder, tower, (merger,), dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Read the tensors of NativeModel; those of videos have `frame_numbers`, too."""
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        times = tensors["frame_numbers"].tolist() if modality == "video" else ()
        (state,) = self.visual(pixels, grids, times=times)
        return list(self.merger(state).split([t * h * w // self.merger.spec.group for t, h, w in grids]))


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    width, heads = positive_int(vision, "hidden_size"), positive_int(vision, "num_attention_heads")
    if width % (heads * _HEAD_UNIT):
        raise ConfigError(f"heads of the tower must have a multiple of {_HEAD_UNIT} numbers, not {width} / {heads}")
    if vision["layer_norm_type"] not in _NORMS:
        raise ConfigError(f"layer_norm_type of vision_config is {short_repr(vision['layer_norm_type'])}; give one of {_NORMS}")
    return TowerSpec(
        depth=positive_int(vision, "num_hidden_layers"),
        width=width,
        heads=heads,
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=positive_int(vision, "num_channels") * positive_int(vision, "patch_size") ** 2,
        act=vision["hidden_act"],
        merge=positive_int(vision, "spatial_merge_size"),
        eps=vision["layer_norm_eps"],
        rms=vision["layer_norm_type"] == "rms_norm",
        patch_bias=False,
        rotary=RotarySpec(float(vision["rope_theta"]), "frames"),
        pre_norm=True,
        post_norm=bool(vision["use_head"]),
        names=_NAMES,
    )
