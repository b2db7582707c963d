"""Mllama, the vision models of Llama 3.2 (arXiv 2407.21783): some decoder layers cross-attend to the tiles of an image.

Every image is padded to the same number of tiles. In the tower, tokens attend to padding, and padding
attends to all but padding, like in the published model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int
from ....mm.tiling.sizes import grids_by_rows
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...memory_formulas import OpBytes
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.spec import TowerNames, TowerSpec
from ...vision.vit import VisionMlp, vision_mlp_bytes

VISION: Mapping[str, Any] = {
    "hidden_size": 1280, "num_hidden_layers": 32, "num_global_layers": 8, "attention_heads": 16, "intermediate_size": 5120,
    "image_size": 448, "patch_size": 14, "num_channels": 3, "max_num_tiles": 4, "hidden_act": "gelu", "norm_eps": 1e-5,
    "intermediate_layers_indices": (3, 7, 15, 23, 30),
}  # fmt: skip
SPECIAL_TOKENS = 8
"""Token embeddings beyond the vocabulary, which have no logit."""
_ALIGNMENT = 8  # the rows of a tile are padded to a multiple of it
_EPS = 1e-5  # of the norms around the layers; norm_eps of config.json does not apply to them
_NAMES = TowerNames(
    norms=("input_layernorm", "post_attention_layernorm"),
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
)


@dataclass(frozen=True)
class MllamaTowerSpec:
    """`layers`: layers before the gated ones. `states`: layers whose outputs a row has, too. `tiles`: per image."""

    tower: TowerSpec
    layers: int
    states: tuple[int, ...]
    tiles: int
    patches: int

    @property
    def rows(self) -> int:
        """Rows per tile: a class token and the patches."""
        return 1 + self.patches

    @property
    def padded(self) -> int:
        """Rows per tile in the tower."""
        return -(-self.rows // _ALIGNMENT) * _ALIGNMENT


class TileLayer:
    """Attention and MLP over all tiles of an image; their outputs may be gated."""

    def __init__(self, s: TowerSpec, build: Builder, gated: bool) -> None:
        self.heads, self.dim = s.heads, s.head_dim
        self.norms = [build.norm(name, s.width, s.eps, True) for name in s.names.norms]
        self.qkv = build.linear(s.names.qkv, s.width, [s.width] * 3, False)
        self.out = build.linear([s.names.out], s.width, [s.width], False)
        self.mlp = VisionMlp(s, build)
        self.gates = [build.stored(name, 1) for name in ("gate_attn", "gate_ffn")] if gated else []

    def __call__(self, x: Tensor, add: Tensor | None, real: Tensor, padding: Tensor) -> Tensor:
        """Update the residual stream `x` by `add`, and return what is added next. `real`, `padding`: int64 indices of rows."""
        add = self._attend(self.norms[0](x, add), real, padding)
        if self.gates:
            add *= self.gates[0].weight.tanh()
        add = self.mlp(self.norms[1](x, add))
        if self.gates:
            add *= self.gates[1].weight.tanh()
        return add

    def _attend(self, x: Tensor, real: Tensor, padding: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, len(x), 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        out = torch.empty_like(q)
        out[:, :, real] = F.scaled_dot_product_attention(q[:, :, real], k, v)
        out[:, :, padding] = F.scaled_dot_product_attention(q[:, :, padding], k[:, :, real], v[:, :, real])
        return self.out(out[0].transpose(0, 1).flatten(1))


class TileTower(nn.Module):
    """The tiles of an image -> a row per patch and class token, padding tiles included."""

    def __init__(self, spec: MllamaTowerSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.device, s = spec, device, spec.tower
        build = Builder(self, dtype, device)
        self.patch = build.linear(["patch_embedding"], s.patch_dim, [s.width], False)
        self.token = build.stored("class_embedding", s.width)
        self.grids = grids_by_rows(spec.tiles)
        count = len(self.grids) + 1
        self.gate = build.stored("gated_positional_embedding.gate", 1)
        self.table = build.stored("gated_positional_embedding.embedding", spec.rows, s.width)
        stored = "gated_positional_embedding.tile_embedding.weight"
        self.tile_table = build.stored(stored, count, spec.tiles * spec.rows * s.width)
        names = [f"{side}_tile_positional_embedding" for side in ("pre", "post")]
        self.tile_gates = [build.stored(f"{name}.gate", 1) for name in names]
        self.tile_rows = [build.stored(f"{name}.embedding.weight", count, spec.tiles * s.width) for name in names]
        self.before, self.after = (build.norm(f"layernorm_{side}", s.width, _EPS, True) for side in ("pre", "post"))
        self.layers = [TileLayer(s, build.scope(f"transformer.layers.{i}"), False) for i in range(spec.layers)]
        gated = range(s.depth - spec.layers)
        self.gated_layers = [TileLayer(s, build.scope(f"global_transformer.layers.{i}"), True) for i in gated]

    def forward(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return `[tiles * rows, width * (1 + states)]`.

        Args:
            patches: `[patches, patch_dim]` of the tiles that are not padding. grid: rows and columns of these tiles.
        """
        c, width, index = self.spec, self.spec.tower.width, 1 + self.grids.index(grid)
        x = self._embed(patches, index)
        row = torch.arange(c.tiles * c.padded)
        is_real = (row // c.padded < grid[0] * grid[1]) & (row % c.padded < c.rows)
        real, padding = (mask.nonzero().flatten().to(self.device) for mask in (is_real, ~is_real))
        features = x.new_empty(c.tiles, c.rows, width * (1 + len(c.states)))
        inner = features[..., width:].view(c.tiles, c.rows, width, len(c.states))
        add = None
        for number, layer in enumerate(self.layers):
            add = layer(x, add, real, padding)
            if number in c.states:
                x += add
                add = None
                for level in (i for i, state in enumerate(c.states) if state == number):
                    inner[..., level] = self._without_padding(x)
        x = self.after(x, add)
        x.view(c.tiles, c.padded, width).add_(self._tile_rows(1, index))
        add = None
        for layer in self.gated_layers:
            add = layer(x, add, real, padding)
        features[..., :width] = self._without_padding(x if add is None else x.add_(add))
        return features.flatten(0, 1)

    def _embed(self, patches: Tensor, index: int) -> Tensor:
        """Return the input of the first layer, `[tiles * padded, width]`. `index`: of the arrangement of tiles."""
        c, width, gate = self.spec, self.spec.tower.width, self.gate.weight.tanh()
        whole = self.table.weight.new_zeros(c.tiles, c.padded, width)
        rows = whole[:, : c.rows]
        rows[:, 0] = self.token.weight
        tiles = self.patch(patches.to(whole.dtype)).view(-1, c.patches, width)
        rows[: len(tiles), 1:] = tiles
        rows[:, 1:] += self._tile_rows(0, index)
        rows += (1 - gate) * self.table.weight
        rows += gate * self.tile_table.weight[index].view(c.tiles, c.rows, width)
        rows.copy_(self.before(rows.flatten(0, 1)).view(rows.shape))
        return whole.flatten(0, 1)

    def _tile_rows(self, end: int, index: int) -> Tensor:
        rows = self.tile_rows[end].weight[index].view(self.spec.tiles, 1, -1)
        return rows * self.tile_gates[end].weight.tanh()

    def _without_padding(self, x: Tensor) -> Tensor:
        return x.view(self.spec.tiles, self.spec.padded, -1)[:, : self.spec.rows]


class Mllama(DecoderModel):
    """A model that reads images by cross-attention. A token before which no image stands skips these layers."""

    prefixes = (
        *((f"{root}vision_model.", "tower.") for root in ("model.", "")),
        *((f"{root}multi_modal_projector.", "projector.linear.") for root in ("model.", "")),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text = decoder_spec(config, STACKS["mllama_text_model"])
        super().__init__(replace(text, vocab_size=text.vocab_size + SPECIAL_TOKENS, unpredicted=SPECIAL_TOKENS), dtype, device)
        spec = tile_spec({**VISION, **(config.get("vision_config") or {})})
        self.tower = TileTower(spec, dtype, device)
        width = spec.tower.width * (1 + len(spec.states))
        self.projector = Projector(ProjectorSpec(width, text.hidden_size, ("linear",)), dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        grids = [(int(rows), int(columns)) for rows, columns in tensors["tiles"].tolist()]
        counts = [rows * columns * self.tower.spec.patches for rows, columns in grids]
        images: Sequence[Tensor] = tensors["pixel_values"].split(counts)
        return [self.projector(self.tower(patches, grid)) for patches, grid in zip(images, grids, strict=True)]

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.tower.spec.tower.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        image, results = image_bytes(self.tower.spec, self.projector.spec, self.dtype, limits), rows * self.hidden_size
        return self.input_bytes(modality, rows) + results * self.dtype.itemsize + image


def tile_spec(vision: Mapping[str, Any]) -> MllamaTowerSpec:
    """Read the tower from a vision config with defaults."""
    patch, layers = positive_int(vision, "patch_size"), positive_int(vision, "num_hidden_layers")
    states = tuple(vision["intermediate_layers_indices"])
    if not all(isinstance(state, int) and -layers <= state < layers for state in states):
        layers_known = f"the tower has the layers {-layers} to {layers - 1}"
        raise ConfigError(f"intermediate_layers_indices in vision_config is {states}; {layers_known}")
    tower = TowerSpec(
        depth=layers + positive_int(vision, "num_global_layers"),
        width=positive_int(vision, "hidden_size"),
        heads=positive_int({"attention_heads": vision.get("num_attention_heads"), **vision}, "attention_heads"),
        inner=positive_int(vision, "intermediate_size"),
        patch_dim=positive_int(vision, "num_channels") * patch**2,
        act=check_activation("hidden_act in vision_config", vision["hidden_act"]),
        eps=vision["norm_eps"],
        names=_NAMES,
    )
    patches = (positive_int(vision, "image_size") // patch) ** 2
    states = tuple(state % layers for state in states)
    return MllamaTowerSpec(tower, layers, states, positive_int(vision, "max_num_tiles"), patches)


def image_bytes(c: MllamaTowerSpec, projector: ProjectorSpec, dtype: torch.dtype, limits: StepLimits) -> int:
    """Return the bytes alive in TileTower and the projector for one image, without its pixels and its result."""
    ops, s, w = OpBytes(dtype, limits), dtype.itemsize, c.tower.width
    rows, kept = c.tiles * c.padded, c.tiles * c.rows * w * (1 + len(c.states)) * s
    row, added = w * s, ops.linear_result(w, rows)
    qkv = ops.linear_result(3 * w, rows)
    attend = max(3 * row + ops.attention_copies(w), row + ops.linear(w, w, rows))
    attention = row + max(ops.linear(w, 3 * w, rows), qkv + attend)
    layer = rows * (row + added + max(attention, vision_mlp_bytes(c.tower, rows, ops))) + kept
    projected = c.tiles * c.rows * projector_bytes(projector, 1, c.tiles * c.rows, dtype, limits) + rows * row
    return max(layer, projected)
