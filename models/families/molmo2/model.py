"""Molmo2 (arXiv 2601.10611): SigLIP 2 over overlapping crops, attention pooling of patches, a Qwen3 or OLMo 3 decoder.

Encoder rows are added to token embeddings. The rows of the start, column and end tokens of a picture are zeros.
Source: the modelling file of transformers 5.23, whose names of tensors load as well as the publisher's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, get_text_config, positive_int, require
from ....kernels.activation import act_and_mul
from ....mm.tiling.overlapped import OverlappedTiles
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.linear import Linear
from ...layers.patch_pooling import PatchPooling, PatchPoolingSpec, patch_pooling_bytes
from ...memory_formulas import SMALL, OpBytes
from ...text.decoder_config import decoder_spec
from ...text.spec import AttentionSpec, DecoderSpec
from ...text.stack import Stack
from ...text.stacks import replace_parts
from ...vision.spec import TableSpec, TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

TEXT: Mapping[str, Any] = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 36864,
}  # fmt: skip
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 25, "num_attention_heads": 16, "head_dim": 72,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "patch_size": 14, "num_channels": 3,
}  # fmt: skip
_ADAPTER: Mapping[str, Any] = {
    "vision_feature_layer": (24, 18), "hidden_size": 1152, "num_attention_heads": 16, "head_dim": 72,
    "intermediate_size": 18944, "hidden_act": "silu",
}  # fmt: skip
ADDED_TOKENS = 128
"""Default number of tokens that have an embedding but no logit."""
_OLD_KEYS = {"image_default_input_size": "image_size", "image_patch_size": "patch_size", "vit_layers": "vision_feature_layer"}
_NAMES = TowerNames(
    patch="patch_embedding",
    table="positional_embedding",
    layers="layers",
    norms=("layer_norm1", "layer_norm2"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
)
_PARTS = (
    ("image_pooling_2d.wq.", "image_pooling_2d.q_proj."),
    ("image_pooling_2d.wk.", "image_pooling_2d.k_proj."),
    ("image_pooling_2d.wv.", "image_pooling_2d.v_proj."),
    ("image_pooling_2d.wo.", "image_pooling_2d.o_proj."),
    ("image_projector.w1.", "image_projector.gate_proj."),
    ("image_projector.w2.", "image_projector.down_proj."),
    ("image_projector.w3.", "image_projector.up_proj."),
    (".attention.wq.", ".self_attn.q_proj."),
    (".attention.wk.", ".self_attn.k_proj."),
    (".attention.wv.", ".self_attn.v_proj."),
    (".attention.wo.", ".self_attn.o_proj."),
    (".attention_norm.", ".layer_norm1."),
    (".ffn_norm.", ".layer_norm2."),
    (".feed_forward.w1.", ".mlp.fc1."),
    (".feed_forward.w2.", ".mlp.fc2."),
    (".input_layernorm.", ".attn_norm."),
    (".post_attention_layernorm.", ".ff_norm."),
    (".self_attn.attn_out.", ".self_attn.o_proj."),
    (".mlp.ff_out.", ".mlp.down_proj."),
)
"""Parts of names of tensors, the publisher's or those of transformers, and our names."""
_TABLES = ("wte.embedding", "wte.new_embedding")


class Molmo2(DecoderModel):
    """A model of images or one video."""

    max_crops = 8

    prefixes: Sequence[tuple[str, str]] = (
        ("model.vision_backbone.image_vit.transformer.resblocks.", "tower.layers."),
        ("model.vision_backbone.image_vit.", "tower."),
        ("model.vision_backbone.image_pooling_2d.", "patch_pooling."),
        ("model.vision_backbone.image_projector.", "projector."),
        ("model.vision_tower.", "tower."),
        ("model.multi_modal_projector.image_pooling_2d.", "patch_pooling."),
        ("model.multi_modal_projector.image_projector.", "projector."),
        ("model.transformer.ln_f.", "language_model.norm."),
        ("model.transformer.blocks.", "language_model.layers."),
        ("model.language_model.", "language_model."),
        ("lm_head.", "head.lm_head."),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(self.text_spec(config), dtype, device)
        adapter = _read(config.get("adapter_config"), _ADAPTER)
        vision = _read(config.get("vision_config") or config.get("vit_config"), _VISION)
        tower, self.feature_order = self.tower_spec(vision, adapter["vision_feature_layer"])
        assert tower.table is not None
        self.side = tower.table.side
        self.tower = VisionTower(tower, dtype, device)
        self.ignored = tuple(f"tower.{name}" for name in tower.unbuilt)
        heads = positive_int(adapter, "num_attention_heads")
        kv_heads = positive_int({"num_key_value_heads": heads, **adapter}, "num_key_value_heads")
        width, head_dim = positive_int(adapter, "hidden_size"), positive_int(adapter, "head_dim")
        wide, bias = tower.width * len(self.feature_order), bool(adapter.get("attention_bias", True))
        self.patch_pooling = PatchPooling(PatchPoolingSpec(wide, heads, head_dim, width, bias, kv_heads), dtype, device)
        self.act = check_activation("hidden_act in adapter_config", adapter["hidden_act"])
        self.inner = inner = positive_int(adapter, "intermediate_size")
        self.mlp_bias = bool(adapter.get("mlp_bias"))
        gate_up = Linear(width, {"gate_proj": inner, "up_proj": inner}, self.mlp_bias, dtype, device)
        down = Linear(inner, {"down_proj": self.hidden_size}, False, dtype, device)
        self.projector = torch.nn.ModuleDict({"gate_up": gate_up, "down": down})

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items: `grid` int64 `[items, 2]`, crops and rows of each; `token_pooling` int64 `[rows, n]`, see PatchPooling.

        The patches of an item are numbered from 0.
        """
        (crops, counts), side = zip(*tensors["grid"].tolist(), strict=True), self.side
        states = self.tower(tensors["pixel_values"], [(count, side, side) for count in crops])
        patches = torch.cat([states[number] for number in self.feature_order], 1)
        del states
        self.add_to_patches_(patches, tensors)
        starts = accumulate((0, *crops[:-1]))
        first = torch.cat([torch.full((count,), start * side**2) for start, count in zip(starts, counts, strict=True)])
        groups = tensors["token_pooling"]
        pooled = self.patch_pooling(patches, torch.where(groups >= 0, groups + first.to(groups.device)[:, None], -1))
        del patches
        gate_up, down = self.projector["gate_up"], self.projector["down"]
        rows = down(act_and_mul(self.act, gate_up(pooled)))
        if self.mlp_bias:  # rows of start and end tokens stay zeros
            rows.masked_fill_((groups < 0).all(1, keepdim=True), 0)
        return list(rows.split(list(counts)))

    def add_to_patches_(self, patches: Tensor, tensors: Mapping[str, Any]) -> None:
        """Hook: change the states `[patches, width]` in place before they are pooled. `tensors`: see `embed_multimodal`."""

    def text_spec(self, config: Mapping[str, Any]) -> DecoderSpec:
        """Hook: read the decoder."""
        return text_spec(config)

    def tower_spec(self, vision: Mapping[str, Any], layers: Any) -> tuple[TowerSpec, tuple[int, ...]]:
        """Hook: return the tower, and for each layer that is pooled the number of its state among those that it returns."""
        return _tower(vision, layers)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename the publisher's parts, split and join its matrices, and put the channels of a patch first."""
        tables = dict[str, Tensor]()
        for stored, tensor in weights:
            name = replace_parts(stored, _PARTS)
            if name.endswith(_TABLES):
                tables[name.rpartition(".")[2]] = tensor
                if len(tables) == len(_TABLES):
                    joined = torch.cat([tables["embedding"], tables["new_embedding"]])
                    yield "model.language_model.embed_tokens.weight", joined
            elif ".self_attn.att_proj." in name:
                mixer = next(layer.mixer for layer in self.spec.layers if isinstance(layer.mixer, AttentionSpec))
                rows = [count * mixer.head_dim for count in (mixer.heads, mixer.kv_heads, mixer.kv_heads)]
                for new, part in zip("qkv", _split(tensor, rows), strict=True):
                    yield name.replace("att_proj", f"{new}_proj"), part
            elif ".mlp.ff_proj." in name:
                for new, part in zip(("up_proj", "gate_proj"), _split(tensor, [len(tensor) // 2] * 2), strict=True):
                    yield name.replace("ff_proj", new), part
            elif name.endswith("patch_embedding.weight") and tensor.numel():
                patch = math.isqrt(tensor.shape[1] // 3)
                yield name, tensor.view(len(tensor), patch, patch, 3).permute(0, 3, 1, 2).reshape(tensor.shape)
            else:
                yield name, tensor

    def max_patches(self, modality: str, rows: int) -> int:
        """Return the most patches of items with this many rows: of the crops of an image, or the frames of a video."""
        side = self.side
        if modality == "video":
            return -(-rows * side**2 // (-((-side // 3) ** 2) + 2))
        return math.ceil(rows * OverlappedTiles(1, side, max_tiles=self.max_crops).patches_per_row)

    def input_bytes(self, modality: str, rows: int) -> int:
        group = 9 if modality == "video" else 4
        return self.max_patches(modality, rows) * self.tower.spec.patch_dim * self.dtype.itemsize + rows * group * 8

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        spec, size, ops = self.patch_pooling.spec, self.dtype.itemsize, OpBytes(self.dtype, limits)
        patches, group = self.max_patches(modality, rows), 9 if modality == "video" else 4
        index = SMALL + rows * group * 3 * 8  # groups, as given and as numbers of patches of all items
        inputs = patches * self.tower.spec.patch_dim * size + index
        joined = 2 * patches * spec.width * size
        pooled = patch_pooling_bytes(spec, patches, rows, group, ops)
        inner = self.inner
        projected = rows * (spec.out * size + ops.mlp(spec.out, 2 * inner, inner, rows, self.hidden_size))
        tower = tower_bytes(self.tower.spec, patches, None, self.dtype, limits) + index
        return max(tower, inputs + max(joined, pooled, projected))


def text_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """Return the decoder; ConfigError for a form of norms that is not known."""
    text = {**TEXT, **get_text_config(config)}
    kind, added = text.get("qk_norm_type", "qwen3"), text.get("additional_vocab_size", ADDED_TOKENS)
    if kind not in ("qwen3", "olmo"):
        raise ConfigError(f"qk_norm_type in text_config is {kind!r}; known are qwen3 and olmo")
    stack = Stack(
        out_bias=False,
        qk_norm="head" if kind == "qwen3" else "all",
        norms=(None, "attn_norm", None, "ff_norm") if text.get("norm_after") else ("attn_norm", None, "ff_norm", None),
        aliases={"layer_norm_eps": "rms_norm_eps"},
    )
    text["vocab_size"] = positive_int(text, "vocab_size") + added
    spec = decoder_spec({**config, "text_config": text}, stack, adds_encoder_rows=True, unpredicted=added)
    scaled = text.get("rope_scaling_layers")
    if scaled is None:
        return spec
    layers = list(spec.layers)
    for number in set(range(len(layers))) - {*scaled}:
        mixer = layers[number].mixer
        assert isinstance(mixer, AttentionSpec)
        assert mixer.rope is not None
        layers[number] = replace(layers[number], mixer=replace(mixer, rope=replace(mixer.rope, scaling={})))
    return replace(spec, layers=tuple(layers))


def _split(tensor: Tensor, rows: Sequence[int]) -> Sequence[Tensor]:
    """Split a matrix. A header without a shape stands for each part."""
    return tensor.split(list(rows)) if len(tensor) == sum(rows) else [tensor] * len(rows)


def _read(section: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section of config.json with today's names of its keys, and the defaults."""
    renamed = {_OLD_KEYS.get(key, key): value for key, value in (section or {}).items()}
    return {**defaults, **{key: value for key, value in renamed.items() if value is not None}}


def _tower(vision: Mapping[str, Any], layers: Any) -> tuple[TowerSpec, tuple[int, ...]]:
    """Return the tower, and for each layer that is pooled the number of its state among those that the tower returns."""
    depth, patch = positive_int(vision, "num_hidden_layers"), positive_int(vision, "patch_size")
    width, heads = positive_int(vision, "hidden_size"), positive_int(vision, "num_attention_heads")
    if (
        not isinstance(layers, list | tuple)
        or not all(isinstance(layer, int) and -depth <= layer < depth for layer in layers)
        or not layers
    ):
        raise ConfigError(f"vision_feature_layer in adapter_config is {layers!r}; give some of the tower's {depth} layers")
    kv_heads, dim = (
        positive_int({"num_key_value_heads": heads, **vision}, "num_key_value_heads"),
        positive_int(vision, "head_dim"),
    )
    sides = vision.get("image_size", (378, 378))
    if not isinstance(sides, list | tuple) or len(sides) != 2 or sides[0] != sides[1]:
        raise ConfigError(
            f"image_size in vision_config is {repr(sides)[:60]}; it must be two equal sides, as only squares are supported"
        )
    side = positive_int({"image_size": sides[0]}, "image_size")
    states = [layer + 1 if layer >= 0 else depth + 1 + layer for layer in layers]
    features = tuple(sorted({*states}))
    tower = TowerSpec(
        depth=depth,
        width=width,
        heads=heads,
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=positive_int(vision, "num_channels") * patch**2,
        act=require(vision, "hidden_act"),
        eps=vision["layer_norm_eps"],
        qkv_bias=bool(vision.get("attention_bias", True)),
        out_bias=bool(vision.get("attention_bias", True)),
        table=TableSpec(side // patch),
        features=features,
        names=_NAMES,
        kv_heads=kv_heads,
        attention_dim=dim,
    )
    return tower, tuple(features.index(state) for state in states)
