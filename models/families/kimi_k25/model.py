"""Kimi-K2.5 and Kimi-VL (arXiv 2504.07491): MoonViT attends across a chunk's frames and averages their rows; MLA."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import Converter, Convertible, Renamed
from ...layers.connectors import Projector, ProjectorSpec, squares
from ...native_model import axial_theta
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...vision.positions import Grid
from ...vision.spec import RotarySpec, TableSpec, TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

_VISION: dict[str, Any] = {
    "patch_size": 14, "pos_emb_height": 64, "pos_emb_width": 64, "pos_emb_time": 4, "num_attention_heads": 16,
    "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "hidden_act": "gelu_pytorch_tanh",
    "merge_kernel_size": (2, 2),
}  # fmt: skip
_NAMES = TowerNames(
    table="patch_embed.pos_emb.position_embeddings",
    post_norm="final_layernorm",
    layers="layers",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
)
_FIRST_NAMES = (("norm0", "norm1"), ("norm1", "norm2"), ("mlp.fc0", "mlp.fc1"), ("mlp.fc1", "mlp.fc2"), ("wo", "attn.proj"))
"""Names of a layer's parts: in the first checkpoints -> in later ones."""


class MoonViT(VisionTower, Convertible):
    """The tower. The first checkpoints store q, k and v as one matrix, in which rotated pairs are adjacent."""

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        for i in range(self.spec.depth):
            old, new = f"{path}.encoder.blocks.{i}", f"{path}.layers.{i}"
            for kind in ("weight", "bias"):
                for before, after in _FIRST_NAMES:
                    yield f"{old}.{before}.{kind}", Renamed(f"{new}.{after}.{kind}")
                yield f"{old}.wqkv.{kind}", partial(self._split_qkv, new, kind)

    def _split_qkv(self, layer: str, kind: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        q, k, v = tensor.chunk(3)
        for name, part in zip(_NAMES.qkv[:2], (q, k), strict=True):
            pairs = part.unflatten(0, (self.spec.heads, -1, 2))
            yield f"{layer}.{name}.{kind}", pairs.transpose(1, 2).flatten(0, 2)
        yield f"{layer}.{_NAMES.qkv[2]}.{kind}", v


class KimiK25(DecoderModel):
    """A model of images and of chunks of videos, whose frames share their rows."""

    prefixes: Sequence[tuple[str, str]] = (
        ("model.vision_tower.", "visual."),
        ("vision_tower.patch_embed.pos_emb.weight", "visual.patch_embed.pos_emb.position_embeddings"),
        ("vision_tower.encoder.final_layernorm.", "visual.final_layernorm."),
        ("vision_tower.encoder.patch_embed.", "visual.patch_embed."),  # as transformers 5 writes it
        ("vision_tower.", "visual."),
        ("model.mm_projector.", "merger."),
        ("mm_projector.proj.0.", "merger.in_proj."),
        ("mm_projector.proj.2.", "merger.out_proj."),
        ("mm_projector.", "merger."),
        ("language_model.model.blocks.", "language_model.layers."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {"tie_word_embeddings": True, **config}
        super().__init__(decoder_spec(config, stack_of(config, "deepseek_v3")), dtype, device)
        vision = {**_VISION, **_later_names(require(config, "vision_config"))}
        self.merge, self.frames = _merge(vision), positive_int(vision, "pos_emb_time")
        self.visual = MoonViT(_tower(vision, self.frames), dtype, device)
        width, eps = self.visual.spec.width, config.get("projection_layer_norm_eps", vision.get("projector_ln_eps", 1e-5))
        merger = ProjectorSpec(width, self.hidden_size, ("in_proj", "out_proj"), self.merge**2, norm="pre_norm", eps=eps)
        self.merger = Projector(merger, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Read `pixel_values` `[patches, 3, patch, patch]`, row by row of each frame, and `grid_thw` int64 `[items, 3]`."""
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid_thw"].tolist()]
        (state,) = self.visual(tensors["pixel_values"].flatten(1), grids)
        averaged = [(1, h, w) for _, h, w in grids]
        rows = self.merger(squares(_average_frames(state, grids), averaged, self.merge))
        return list(rows.split([h * w // self.merge**2 for _, h, w in averaged]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.merge**2 * self.frames * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the bytes for the worst case: all rows come from chunks with the most frames."""
        tower, merger, patches = self.visual.spec, self.merger.spec, rows * self.merge**2
        return tower_bytes(tower, patches * self.frames, merger, self.dtype, limits)


class KimiVL(KimiK25):
    """Kimi-VL: the same parts, for images only."""

    prefixes = (
        ("multi_modal_projector.linear_1.", "merger.in_proj."),
        ("multi_modal_projector.linear_2.", "merger.out_proj."),
        ("multi_modal_projector.", "merger."),
        *KimiK25.prefixes,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**require(config, "vision_config"), "pos_emb_time": 1}
        super().__init__({"tie_word_embeddings": False, **config, "vision_config": vision}, dtype, device)


def _tower(vision: Mapping[str, Any], frames: int) -> TowerSpec:
    act, side, patch = vision["hidden_act"], positive_int(vision, "pos_emb_height"), positive_int(vision, "patch_size")
    if vision["pos_emb_width"] != side:
        raise ConfigError(f"position table of {side}x{vision['pos_emb_width']} is not supported; both sides must be equal")
    return TowerSpec(
        depth=positive_int(vision, "num_hidden_layers"),
        width=positive_int(vision, "hidden_size"),
        heads=positive_int(vision, "num_attention_heads"),
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=3 * patch * patch,
        act=act,
        eps=1e-5,
        rotary=RotarySpec(axial_theta(vision), "alternating"),
        table=TableSpec(side, "bicubic", frames=frames),
        post_norm=True,
        temporal_attention=True,
        names=_NAMES,
    )


def _later_names(vision: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rename the keys in a vision config of the first checkpoints to those of later ones."""
    return {key.removeprefix("vt_").removeprefix("init_"): value for key, value in vision.items()}


def _merge(vision: Mapping[str, Any]) -> int:
    tall, wide = vision["merge_kernel_size"]
    if tall != wide:
        raise ConfigError(f"merge_kernel_size {tall}x{wide} is not supported; both sides must be equal")
    return int(tall)


def _average_frames(patches: Tensor, grids: list[Grid]) -> Tensor:
    """Average `[patches, width]` over the frames of each item."""
    items = patches.split([t * h * w for t, h, w in grids])
    return torch.cat([item.view(t, h * w, -1).mean(0) for item, (t, h, w) in zip(items, grids, strict=True)])
