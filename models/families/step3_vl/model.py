"""Step3-VL: an encoder, two convolutions, a linear layer and a decoder.

Step3-VL-10B (arXiv 2601.09668) has a perception encoder (arXiv 2504.13181) and Qwen3 as its decoder. Step-3.7 has the same
encoder and Step 3.5's decoder. Step3 (arXiv 2507.19427) has an encoder of its own and a decoder with experts. Sources: vLLM's
step_vl.py, step3_vl.py and step3_text.py; step3p7 of transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, positive_number, require
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec
from ...memory_formulas import OpBytes
from ...text.decoder_config import decoder_spec
from ...text.stacks import replace_parts, stack_of
from ...vision.downsample import Convolution, Downsampler, downsampler_bytes
from ...vision.spec import ENCODER, RotarySpec, TableSpec, TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

_VISION: dict[str, Any] = {
    "width": 1536, "layers": 47, "heads": 16, "image_size": 728, "patch_size": 14, "mlp_ratio": 8960 / 1536,
    "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "ls_init_value": 0.1, "use_cls_token": False, "use_ln_pre": True,
    "use_ln_post": False, "use_abs_posemb": True, "use_rope2d": True,
}  # fmt: skip
_VISION3: dict[str, Any] = {
    "hidden_size": 1792, "num_hidden_layers": 63, "num_attention_heads": 16, "intermediate_size": 3072, "image_size": 728,
    "patch_size": 14, "output_hidden_size": 4096, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_PUBLISHED_KEYS = {
    "hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "layer_scale_init_value": "ls_init_value",
}  # fmt: skip
"""Keys of `vision_config` in transformers -> the publisher's keys."""
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
_NAMES37 = replace(
    ENCODER,
    table="embeddings.position_embedding.weight",
    pre_norm="pre_layernorm",
    layers="layers",
    norms=("layernorm_before", "layernorm_after"),
)
_PUBLISHED37 = (
    ("conv1.", "embeddings.patch_embedding."),
    (".positional_embedding", ".embeddings.position_embedding.weight"),
    (".transformer.resblocks.", ".layers."),
    (".ln_pre.", ".pre_layernorm."),
    (".ls_1.gamma", ".lambda_1"),
    (".ls_2.gamma", ".lambda_2"),
    (".mlp.c_fc.", ".mlp.fc1."),
    (".mlp.c_proj.", ".mlp.fc2."),
    (".attn.", ".self_attn."),
    (".ln_1.", ".layernorm_before."),
    (".ln_2.", ".layernorm_after."),
)
"""(part of a publisher's tensor name, the part of transformers' name that replaces it), for the encoder."""
_NAMES3 = replace(
    ENCODER,
    layers="transformer.layers",
    qkv=("self_attn.qkv_proj",),
)


class StepVL(DecoderModel):
    """A model of images. Each view is encoded and shrunk on its own, so that its bits do not depend on the batch."""

    prefixes = (
        *(
            (root + old, new)
            for root in ("model.", "")
            for old, new in (
                ("vision_model.vit_downsampler", "downsampler."),
                ("vit_downsampler2.", "downsampler.2."),
                ("vit_downsampler.", "downsampler.1."),
                ("vision_model.", "tower."),
                ("vit_large_projector.", "projector.linear."),
            )
        ),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )
    default_stack, projector_bias, tower_names = "qwen3", False, _NAMES
    renames: Sequence[tuple[str, str]] = ((".attn.in_proj_", ".attn.in_proj."),)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        stack = stack_of(config, self.default_stack)
        super().__init__(decoder_spec(config, stack), dtype, device)
        self.renames = (*self.renames, *stack.renames)
        tower, convolutions = self.read_encoder(config)
        self.tower = VisionTower(tower, dtype, device)
        self.downsampler = Downsampler(convolutions, dtype, device)
        bias = bool(config.get("projector_bias", self.projector_bias))
        spec = ProjectorSpec(convolutions[-1].out, self.hidden_size, ("linear",), bias=bias)
        self.projector = Projector(spec, dtype, device)

    def read_encoder(self, config: Mapping[str, Any]) -> tuple[TowerSpec, Sequence[Convolution]]:
        """Read the encoder and the convolutions after it, which make a row of 16 patches."""
        tower = _tower({**_VISION, **require(config, "vision_config")}, self.tower_names)
        return tower, [Convolution(str(i), tower.width * i, tower.width * 2 * i) for i in (1, 2)]

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename tensors, and remove the first axis of Step3's class token."""
        for name, tensor in weights:
            yield replace_parts(name, self.renames), tensor.flatten() if name.endswith(".class_embedding") else tensor

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
        base = patches * (tower.patch_dim + tower.width) * size  # pixels and the tower's state
        shrunk = rows * merger.width * size
        view = downsampler_bytes(self.downsampler.specs, tower.table.side, self.dtype, limits)
        last = shrunk + rows * OpBytes(self.dtype, limits).linear(merger.width, merger.out, rows)
        return max(tower_bytes(tower, patches, None, self.dtype, limits), base + shrunk + max(view, shrunk, last))


class Step37(StepVL):
    """Step-3.7: Step3-VL-10B's encoder and Step 3.5's decoder, in the layout of transformers or of the publisher.

    In the encoder, the publisher stores queries, keys and values in one tensor and rotates adjacent pairs of numbers;
    transformers rotates the two halves of a head.
    """

    prefixes = (
        *(
            (root + old, new)
            for root in ("model.", "")
            for old, new in (
                ("vision_model.downsampler1.", "downsampler.1."),
                ("vision_model.downsampler2.", "downsampler.2."),
                ("multi_modal_projector.", "projector.linear."),
            )
        ),
        *StepVL.prefixes,
    )
    default_stack, tower_names, renames = "step3p5", _NAMES37, _PUBLISHED37

    def read_encoder(self, config: Mapping[str, Any]) -> tuple[TowerSpec, Sequence[Convolution]]:
        vision = require(config, "vision_config")
        published = {_PUBLISHED_KEYS.get(key, key): value for key, value in vision.items() if key != "intermediate_size"}
        tower, convolutions = super().read_encoder({**config, "vision_config": published})
        self.tower_heads = tower.heads
        return replace(tower, rotary=RotarySpec(order="columns_first")), convolutions

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename tensors, and split the publisher's joint projections of queries, keys and values."""
        for name, tensor in super().convert_weights(weights):
            stem, joint, kind = name.partition(".in_proj_")
            if not joint:
                yield name, tensor
                continue
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                # from adjacent pairs to halves: the first number of each pair of a head, then the second ones
                halves = part.view(self.tower_heads, -1, 2, *part.shape[1:]).transpose(1, 2)
                yield f"{stem}.{letter}_proj.{kind}", part if letter == "v" else halves.reshape(part.shape)


class Step3VL(StepVL):
    """Step3. Its encoder norms the outputs of attention and MLP, and puts four copies of its class token before a view."""

    default_stack, projector_bias = "step3_text", True
    renames = ()

    def read_encoder(self, config: Mapping[str, Any]) -> tuple[TowerSpec, Sequence[Convolution]]:
        if config.get("understand_projector_stride", 2) != 2:
            stride = config["understand_projector_stride"]
            raise ConfigError(f"understand_projector_stride in config.json is {stride!r}; only 2 is supported")
        vision = {**_VISION3, **require(config, "vision_config")}
        patch, out, side = (positive_int(vision, key) for key in ("patch_size", "output_hidden_size", "image_size"))
        side //= patch
        tower = TowerSpec(
            depth=positive_int(vision, "num_hidden_layers"),
            width=positive_int(vision, "hidden_size"),
            heads=positive_int(vision, "num_attention_heads"),
            inner=positive_int(vision, "intermediate_size"),
            patch_dim=3 * patch**2,
            act=vision["hidden_act"],
            eps=vision["layer_norm_eps"],
            table=TableSpec(side, "bicubic", antialias=True),
            class_token=True,
            class_copies=4,
            min_frame=(side * 9 // 13) ** 2,  # the published size of windows
            norms_after=True,
            names=_NAMES3,
        )
        first = Convolution("1", tower.width, out, kernel=2, padding=0)
        return tower, [first, Convolution("2", out, 2 * out)]


def _tower(vision: Mapping[str, Any], names: TowerNames) -> TowerSpec:
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
        names=names,
    )


def _inner(vision: Mapping[str, Any], width: int) -> int:
    """Return `intermediate_size`, or the width times `mlp_ratio`, rounded down."""
    if vision.get("intermediate_size") is not None:
        return positive_int(vision, "intermediate_size")
    return int(width * positive_number(vision, "mlp_ratio"))
