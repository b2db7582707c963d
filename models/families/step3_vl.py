"""Step3-VL-10B (arXiv 2601.09668): a perception encoder (arXiv 2504.13181), two convolutions, a linear layer, a Qwen3 decoder.

Source: vLLM's step_vl.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...mm.errors import ConfigError
from ..config import decoder_spec, positive_int, positive_number, require
from ..decoder_model import TEXT_PREFIXES, DecoderModel
from ..interface import StepLimits
from ..layers.connectors import Projector, ProjectorSpec
from ..memory_formulas import OpBytes
from ..text.stacks import stack_of
from ..vision.downsample import Convolution, Downsampler, downsampler_bytes
from ..vision.spec import RotarySpec, TableSpec, TowerNames, TowerSpec
from ..vision.vit import VisionTower, tower_bytes

_VISION: dict[str, Any] = {
    "width": 1536, "layers": 47, "heads": 16, "image_size": 728, "patch_size": 14, "mlp_ratio": 8960 / 1536,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "ls_init_value": 0.1, "use_cls_token": False, "use_ln_pre": True,
    "use_ln_post": False, "use_abs_posemb": True, "use_rope2d": True,
}  # fmt: skip
_NAMES = TowerNames(
    patch="conv1",
    table="positional_embedding",
    class_token="class_embedding",
    pre_norm="ln_pre",
    post_norm="ln_post",
    layers="transformer.resblocks",
    norms=("ln_1", "ln_2"),
    qkv=("attn.in_proj",),
    out="attn.out_proj",
    mlp=("mlp.c_fc", "mlp.c_proj"),
    scales=("ls_1.gamma", "ls_2.gamma"),
)


class StepVL(DecoderModel):
    """A model of images. Each view is encoded and shrunk on its own, so that its bits do not depend on the batch."""

    prefixes = (
        *(
            (root + old, new)
            for root in ("model.", "")
            for old, new in (
                ("vision_model.vit_downsampler", "downsampler."),
                ("vision_model.", "tower."),
                ("vit_large_projector.", "projector.linear."),
            )
        ),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, stack_of(config, "qwen3")), dtype, device)
        tower = _tower({**_VISION, **require(config, "vision_config")})
        convolutions = [Convolution(str(i), tower.width * i, tower.width * 2 * i) for i in (1, 2)]
        self.tower = VisionTower(tower, dtype, device)
        self.downsampler = Downsampler(convolutions, dtype, device)
        bias = bool(config.get("projector_bias", False))
        spec = ProjectorSpec(4 * tower.width, self.hidden_size, ("linear",), bias=bias)
        self.projector = Projector(spec, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return ((name.replace(".attn.in_proj_", ".attn.in_proj."), tensor) for name, tensor in weights)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        items = [[(int(t), int(h), int(w)) for t, h, w in grids.tolist()] for grids in tensors["grids"]]
        views = [view for item in items for view in item]
        state = self.tower(tensors["pixel_values"], views)[-1]
        parts = zip(state.split([h * w for _, h, w in views]), views, strict=True)
        rows = torch.cat([self.downsampler(part, h) for part, (_, h, _) in parts])
        return list(self.projector(rows).split([sum(self.downsampler.rows(h) for _, h, _ in item) for item in items]))

    def _max_patches(self, rows: int) -> int:
        """Return the most patches for `rows` rows."""
        return int(rows * 4 ** len(self.downsampler.specs))

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._max_patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        tower, merger, size, patches = self.tower.spec, self.projector.spec, self.dtype.itemsize, self._max_patches(rows)
        assert tower.table is not None
        held = patches * (tower.patch_dim + tower.width) * size  # pixels and the tower's state
        shrunk = rows * merger.width * size
        view = downsampler_bytes(self.downsampler.specs, tower.table.side, self.dtype, limits)
        last = shrunk + rows * OpBytes(self.dtype, limits).linear(merger.width, merger.out, rows)
        return max(tower_bytes(tower, patches, None, self.dtype, limits), held + shrunk + max(view, shrunk, last))


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    for key in ("use_abs_posemb", "use_rope2d"):
        if not vision[key]:
            raise ConfigError(f"{key} of vision_config is {vision[key]!r}; only true is supported")
    width, patch, token = positive_int(vision, "width"), positive_int(vision, "patch_size"), bool(vision["use_cls_token"])
    return TowerSpec(
        depth=positive_int(vision, "layers"),
        width=width,
        heads=positive_int(vision, "heads"),
        inner=_inner(vision, width),
        patch_dim=3 * patch**2,
        act=vision["hidden_act"],
        eps=vision["layer_norm_eps"],
        patch_bias=False,
        rotary=RotarySpec(order="columns_first", interleaved=True, first=int(token)),
        table=TableSpec(positive_int(vision, "image_size") // patch, "bilinear"),
        class_token=token,
        pre_norm=bool(vision["use_ln_pre"]),
        post_norm=bool(vision["use_ln_post"]),
        layer_scale=vision["ls_init_value"] is not None,
        names=_NAMES,
    )


def _inner(vision: Mapping[str, Any], width: int) -> int:
    """Return `intermediate_size`, or the width times `mlp_ratio`."""
    if vision.get("intermediate_size") is not None:
        return positive_int(vision, "intermediate_size")
    return round(width * positive_number(vision, "mlp_ratio"))
