"""Moondream 3: a tower over overlapping crops, a projector of the small view beside the joined crops, a mixture of experts.

Source: vLLM's class, which names the publisher's tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, positive_number
from ....mm.tiling.overlapped import OverlappedTiles
from ....processors.bases.overlapped import number_patches
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...memory_formulas import SMALL
from ...text.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec
from ...text.stacks import replace_parts
from ...vision.spec import TableSpec, TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes
from .config import hub_config

_TANH_GELU = "gelu_pytorch_tanh"
_EPS = 1e-5
_NAMES = TowerNames(patch="patch_emb", table="pos_emb", post_norm="post_ln", norms=("ln1", "ln2"))
_TEXT = "model.text."
_PARTS = (
    (f"{_TEXT}lm_head.", "head.lm_head."),
    (f"{_TEXT}wte", "language_model.embed_tokens.weight"),
    (f"{_TEXT}post_ln.", "language_model.norm."),
    (f"{_TEXT}blocks.", "language_model.layers."),
)
_LAYER_PARTS = (
    (".ln.", ".input_layernorm."),
    (".attn.qkv.", ".self_attn.qkv_proj."),
    (".attn.proj.", ".self_attn.o_proj."),
    (".attn.tau.alpha", ".self_attn.tau.alpha"),
    (".attn.tau.wq", ".self_attn.tau.wq.weight"),
    (".attn.tau.wv", ".self_attn.tau.wv.weight"),
)
_EXPERTS = {"mlp.fc1.weight": "mlp.experts.gate_up_proj", "mlp.fc2.weight": "mlp.experts.down_proj"}


class Moondream3(DecoderModel):
    """A model of an image, which reads `pixel_values` and `grid`, int64 `[items, 2]`: rows and columns of crops."""

    prefixes = (("model.vision.proj_mlp.", "projector."), ("model.vision.", "tower."))
    ignored = ("model.region.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = hub_config(config)
        super().__init__(_text_spec(config), dtype, device)
        vision, tower = config["vision"], _tower_spec(config["vision"])
        assert tower.table is not None
        margin = vision["overlap_margin"]
        self.tiles = OverlappedTiles(vision["enc_patch_size"], tower.table.side, (margin, margin), vision["max_crops"])
        self.tower = VisionTower(tower, dtype, device)
        inner = positive_int(vision, "proj_inner_dim")
        spec = ProjectorSpec(2 * tower.width, self.hidden_size, ("fc1", "fc2"), inner=inner, act=_TANH_GELU)
        self.projector = Projector(spec, dtype, device)
        self.answer_token = config["tokenizer"]["answer_id"]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits in which the token that ends a question cannot be chosen."""
        logits = super().compute_logits(hidden)
        if self.answer_token is not None:
            logits[:, self.answer_token] = -torch.inf
        return logits

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        layouts, side = tensors["grid"].tolist(), self.tiles.side
        counts = [1 + rows * columns for rows, columns in layouts]
        state = self.tower(tensors["pixel_values"], [(count, side, side) for count in counts])[-1]
        rows = state.new_empty(len(counts) * side**2, 2 * state.shape[1])
        items = zip(state.split([count * side**2 for count in counts]), layouts, rows.split(side**2), strict=True)
        for crops, layout, target in items:
            small, pooled = target.chunk(2, 1)
            small.copy_(crops[: side**2])
            pooled.copy_(self._joined(crops[side**2 :], layout))
        del state, items, crops, target, small, pooled
        return list(self.projector(rows).split(side**2))

    def _joined(self, crops: Tensor, layout: tuple[int, int]) -> Tensor:
        """Join the patches of overlapping crops `[patches, width]` to one plane, and pool it to `[side^2, width]`."""
        numbers = torch.from_numpy(number_patches(self.tiles, *layout)).to(crops.device)
        plane = crops[numbers].permute(2, 0, 1)
        return F.adaptive_avg_pool2d(plane, self.tiles.side).flatten(1).T

    def _patches(self, rows: int) -> int:
        """Return the most patches of images with this many rows."""
        return rows * (1 + self.tiles.max_tiles)

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        spec, projector, s = self.tower.spec, self.projector.spec, self.dtype.itemsize
        inputs, states = self.input_bytes(modality, rows), self._patches(rows) * spec.width * s
        plane = self.tiles.side**2 * self.tiles.max_tiles * (spec.width * s + 8)
        joined = states + 2 * rows * spec.width * s + plane
        projected = rows * projector_bytes(projector, 1, rows, self.dtype, limits)
        return max(tower_bytes(spec, self._patches(rows), None, self.dtype, limits), SMALL + inputs + max(joined, projected))

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names. Experts get biases: a 1 that is added to what gates multiply, otherwise zeros."""
        for stored, tensor in weights:
            name = replace_parts(replace_parts(stored, _PARTS), _LAYER_PARTS) if stored.startswith(_TEXT) else stored
            number = name.removeprefix("language_model.layers.").partition(".")[0]
            moe = self.spec.layers[int(number)].mlp if number.isdigit() and int(number) < len(self.spec.layers) else None
            part = next((part for part in _EXPERTS if name.endswith(part)), None)
            if isinstance(moe, MoeSpec) and part is not None:
                name = name.removesuffix(part) + _EXPERTS[part]
                yield f"{name}_bias", self._expert_biases(moe, name.endswith("gate_up_proj"))
            yield name, tensor[0] if name.endswith("vision.pos_emb") and tensor.dim() == 3 else tensor

    def _expert_biases(self, moe: MoeSpec, is_first: bool) -> Tensor:
        biases = torch.zeros(moe.experts, 2 * moe.inner[0] if is_first else self.hidden_size, dtype=self.dtype)
        if is_first:
            biases[:, moe.inner[0] :] = 1.0
        return biases


def _text_spec(config: Mapping[str, Any]) -> DecoderSpec:
    text, moe = config["text"], config["moe"]
    names = ("dim", "n_heads", "n_kv_heads", "n_layers", "ff_dim")
    width, heads, kv_heads, count, inner = (positive_int(text, name) for name in names)
    head = width // heads
    if width % heads or heads % kv_heads or head % 4:
        sizes = f"dim {width}, n_heads {heads} and n_kv_heads {kv_heads}"
        raise ConfigError(
            f"config.json has {sizes}; each must divide the one before it, and a head have a multiple of 4 numbers"
        )
    rope = RopeSpec(positive_number(text, "rope_theta"), head // 2, (0,) * (head // 4))
    attention = AttentionSpec(heads, kv_heads, head, head**-0.5, rope, bias=True, out_bias=True, fused=True, tau=True)
    experts = MoeSpec(
        positive_int(moe, "n_experts"),
        positive_int(moe, "n_experts_per_tok"),
        (positive_int(moe, "expert_inner_dim"),),
        act="gelu",
        bias=True,
        router_bias=True,
    )
    if experts.top_k > experts.experts:
        raise ConfigError(f"config.json routes a row to {experts.top_k} of {experts.experts} experts, which is impossible")
    plain = MlpSpec(inner, _TANH_GELU, True, plain=("fc1", "fc2"))
    norms = ("input_layernorm", None, None, None)
    layers = (LayerSpec(attention, experts if i >= moe["start_layer"] else plain, norms, parallel=True) for i in range(count))
    return DecoderSpec(
        vocab_size=positive_int(text, "vocab_size"),
        hidden_size=width,
        layers=tuple(layers),
        eps=_EPS,
        max_positions=positive_int(text, "max_context"),
        tied=False,
        norm="layer",
        head_bias=True,
    )


def _tower_spec(vision: Mapping[str, Any]) -> TowerSpec:
    patch, side = positive_int(vision, "enc_patch_size"), positive_int(vision, "enc_n_layers")
    return TowerSpec(
        depth=side,
        width=positive_int(vision, "enc_dim"),
        heads=positive_int(vision, "enc_n_heads"),
        inner=positive_int(vision, "enc_ff_dim"),
        patch_dim=positive_int(vision, "in_channels") * patch**2,
        act=_TANH_GELU,
        eps=_EPS,
        table=TableSpec(side),
        post_norm=True,
        names=_NAMES,
    )
