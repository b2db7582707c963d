"""OpenVLA (arXiv 2406.09246): DINOv2 and SigLIP, whose rows are joined and projected, and Llama.

Both towers have timm's names. The rows are those before the last layer, without a norm. Source: vLLM's openvla.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, positive_number
from ....kernels.activation import activation
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...layers.linear import Linear
from ...memory_formulas import SMALL, OpBytes
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...vision.spec import BLOCKS, TableSpec, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

_SHAPES: dict[str, dict[str, Any]] = {
    "vit_large_patch14_reg4_dinov2.lvd142m": {"embed_dim": 1024, "depth": 24, "num_heads": 16, "mlp_ratio": 4, "reg_tokens": 4},
    "vit_so400m_patch14_siglip_224": {"embed_dim": 1152, "depth": 27, "num_heads": 16, "mlp_ratio": 3.7362},
}
"""timm's names of the two towers -> its arguments."""
_PATCH = 14
_NAMES = replace(
    BLOCKS, table="pos_embed", class_token="first_rows", post_norm="norm", scales=("ls1.scale_factor", "ls2.scale_factor")
)
_FIRST = ("cls_token", "reg_token")  # the learned rows before those of an image, in order


class OpenVLA(DecoderModel):
    """A model of an image."""

    prefixes = (
        ("vision_backbone.featurizer.", "dino."),
        ("vision_backbone.fused_featurizer.", "siglip."),
        ("projector.fc3.", "fc3."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, stack_of(config, "llama")), dtype, device)
        dino, siglip = tower_specs(config)
        self.dino, self.siglip = VisionTower(dino, dtype, device), VisionTower(siglip, dtype, device)
        width = dino.width + siglip.width
        spec = ProjectorSpec(width, self.hidden_size, ("fc1", "fc2"), inner=4 * width)
        self.projector = Projector(spec, dtype, device)
        self.last = Linear(self.hidden_size, {"fc3": self.hidden_size}, True, dtype, device)
        unbuilt = (*(f"dino.{name}" for name in dino.unbuilt), *(f"siglip.{name}" for name in siglip.unbuilt))
        self.ignored = (*unbuilt, "siglip.attn_pool.")

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        towers = ((self.dino, "pixel_values"), (self.siglip, "fused_pixel_values"))
        rows = torch.cat([tower(tensors[name], grids)[-1] for tower, name in towers], 1)
        rows = self.last(activation("gelu", self.projector(rows)))
        return list(rows.split([t * h * w for t, h, w in grids]))

    def keep_encoders(self, modalities: Collection[str]) -> None:
        super().keep_encoders(modalities)
        if not modalities:
            self._remove("dino", "siglip", "projector", "last")

    def input_bytes(self, modality: str, rows: int) -> int:
        return 2 * rows * self.dino.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        dino, siglip, size, ops = self.dino.spec, self.siglip.spec, self.dtype.itemsize, OpBytes(self.dtype, limits)
        inputs, joined = self.input_bytes(modality, rows), rows * self.projector.spec.width * size
        first = inputs // 2 + tower_bytes(dino, rows, None, self.dtype, limits)
        second = inputs // 2 + rows * dino.width * size + tower_bytes(siglip, rows, None, self.dtype, limits)
        projected = rows * projector_bytes(self.projector.spec, 1, rows, self.dtype, limits)
        hidden = self.hidden_size
        last = rows * (2 * ops.linear_result(hidden, rows) + ops.linear(hidden, hidden, rows))
        return max(first, second, SMALL + inputs + max(2 * joined, projected, last))

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors; the learned rows are joined, and those and the positions lose their first axis."""
        first: dict[str, Tensor] = {}
        for name, tensor in weights:
            stem, _, last = name.rpartition(".")
            if last in _FIRST:
                first[last] = tensor[0]
                if len(first) == len(_FIRST):
                    yield f"{stem}.first_rows", torch.cat([first[part] for part in _FIRST])
            else:
                yield name, tensor[0] if last == "pos_embed" else tensor


def tower_specs(config: Mapping[str, Any]) -> tuple[TowerSpec, TowerSpec]:
    """Read DINOv2 and SigLIP: their shapes follow from `timm_model_ids`, unless `timm_model_args` state them.

    Raises:
        ConfigError: a tower is unknown, there are not two, or its activation is not the published one.
    """
    names = config.get("timm_model_ids") or [*_SHAPES]
    if not config.get("use_fused_vision_backbone", True) or len(names) != len(_SHAPES):
        raise ConfigError("config.json names one vision tower; only DINOv2 and SigLIP together are supported")
    if any(config.get("timm_override_act_layers") or ()):
        raise ConfigError("timm_override_act_layers in config.json are set; only the default activations are supported")
    stated = config.get("timm_model_args") or [{}, {}]
    shapes = [{**_SHAPES.get(name, {}), **args} for name, args in zip(names, stated, strict=True)]
    unknown = [name for name, shape in zip(names, shapes, strict=True) if not shape]
    if unknown:
        raise ConfigError(f"timm_model_ids in config.json has {unknown[0]!r}; known are {', '.join(_SHAPES)}")
    side = positive_int({"side": (config.get("image_sizes") or [224])[0]}, "side") // _PATCH
    dino, siglip = (_tower(shape, side) for shape in shapes)
    return replace(dino, registers=1 + positive_int(shapes[0], "reg_tokens"), layer_scale=True), siglip


def _tower(shape: Mapping[str, Any], side: int) -> TowerSpec:
    width, depth = positive_int(shape, "embed_dim"), positive_int(shape, "depth")
    return TowerSpec(
        depth=depth,
        width=width,
        heads=positive_int(shape, "num_heads"),
        inner=int(width * positive_number(shape, "mlp_ratio")),
        patch_dim=3 * _PATCH**2,
        table=TableSpec(side),
        features=(depth - 1,),
        names=_NAMES,
    )
