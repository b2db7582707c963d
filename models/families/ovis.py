"""Ovis2 (arXiv 2405.20797): each row of the tower becomes probabilities of visual words, and the mean of their embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...mm.errors import ConfigError
from ..config import check_activation, decoder_spec, positive_int, require
from ..decoder_model import TEXT_PREFIXES, DecoderModel
from ..interface import StepLimits
from ..layers.basic import Converter, Convertible, Norm, TensorModule
from ..layers.builder import StoredTensor
from ..layers.linear import Linear
from ..memory_formulas import OpBytes
from ..text.stacks import stack_of
from ..vision.spec import TableSpec, TowerNames, TowerSpec
from ..vision.vit import VisionTower, tower_bytes

_CHUNK = 256  # rows whose probabilities are held at a time
_VISION = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 8, "num_channels": 3,
    "image_size": 224, "patch_size": 14, "rms_norm_eps": 1e-5, "qkv_bias": False, "mlp_bias": False, "hidden_act": "silu",
    "vocab_size": 16384, "hidden_stride": 1, "num_visual_indicator_tokens": 5, "tokenize_function": "softmax",
}  # fmt: skip
NAMES = TowerNames(
    patch="embeddings.patch_embedding",
    table="embeddings.position_embedding.weight",
    patch_norm="embeddings.rms_norm",
    post_norm="rms_norm",
    layers="encoder.layers",
    norms=("rms_norm1", "rms_norm2"),
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out="attention.out_proj",
    mlp=("ffn.gate_proj", "ffn.up_proj", "ffn.down_proj"),
)
START, GRID, COLUMN, ROW, END = range(5)
"""Visual words that mark the parts of an image: its start, the end of the whole image, of a tile, of a row, and its end."""


@dataclass(frozen=True)
class VocabularySpec:
    """`words`: visual words without the marks of an image. `inner`: numbers per input. `width`: numbers per result row."""

    words: int
    marks: int
    inner: int
    width: int


class VisualVocabulary(TensorModule, Convertible):
    """`[rows, inner]` -> `[rows, width]`: the mean of the words' embeddings, weighted by their probabilities."""

    def __init__(self, spec: VocabularySpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.logits = Linear(spec.inner, {"head_linear": spec.words}, False, dtype, device)
        self.head_norm = Norm(spec.words, 1e-5, True, dtype, device)
        self.embed = Linear(spec.words, {"words": spec.width}, False, dtype, device)
        self.marks = StoredTensor((spec.marks, spec.width), dtype, device)

    def converters(self, path: str) -> Iterator[tuple[str, Converter]]:
        """Split the stored table into the words, whose embeddings are columns here, and the marks."""

        def convert(table: Tensor) -> Iterable[tuple[str, Tensor]]:
            return [(f"{path}.words.weight", table[: -self.spec.marks].T), (f"{path}.marks", table[-self.spec.marks :])]

        yield f"{path}.table.weight", convert

    def forward(self, rows: Tensor) -> Tensor:
        parts = (self.head_norm(self.logits(part)).softmax(-1) for part in rows.split(_CHUNK))
        return torch.cat([self.embed(part) for part in parts])


class Ovis2(DecoderModel):
    """Images in tiles. The rows of an item include the embeddings of its marks."""

    prefixes = (
        ("model.vision_tower.transformer.", "tower."),
        ("model.vision_tower.", "vocabulary."),
        ("model.visual_embeddings_table.", "vocabulary.table."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, stack_of(config, "qwen2")), dtype, device)
        c = {**_VISION, **require(config, "vision_config")}
        if c["tokenize_function"] != "softmax":
            raise ConfigError(f"tokenize_function {c['tokenize_function']!r} is not supported; known is softmax")
        tower = _tower(c)
        self.tower, marks = VisionTower(tower, dtype, device), positive_int(c, "num_visual_indicator_tokens")
        words = positive_int(c, "vocab_size") - marks
        spec = VocabularySpec(words, marks, tower.merge**2 * tower.width, self.hidden_size)
        self.vocabulary = VisualVocabulary(spec, dtype, device)
        assert tower.table is not None
        self.per_tile = (tower.table.side // tower.merge) ** 2

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `tiles`: rows and columns of the tiles of each, (0, 0) if it is not cut."""
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        rows = self.vocabulary(self.tower(tensors["pixel_values"], grids)[-1].view(-1, self.vocabulary.spec.inner))
        items = rows.split([t * self.per_tile for t, _, _ in grids])
        return [
            self._marked(item.split(self.per_tile), *tiles)
            for item, tiles in zip(items, tensors["tiles"].tolist(), strict=True)
        ]

    def _marked(self, views: Sequence[Tensor], rows: int, columns: int) -> Tensor:
        """Return the whole image and its tiles, with marks around and between them."""
        marks = self.vocabulary.marks.weight.split(1)
        whole, *tiles = views
        parts = [marks[START], whole, marks[GRID]]
        for number, tile in enumerate(tiles, 1):
            last = ROW if number < rows * columns else END
            parts += [tile, marks[last if number % columns == 0 else COLUMN]]
        return torch.cat(parts if tiles else [*parts, marks[END]])

    def max_patches(self, rows: int) -> int:
        """Return the most patches of items with `rows` rows. Each tile has at least one mark."""
        return max(1, rows // (self.per_tile + 1)) * self.per_tile * self.tower.spec.merge**2

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.max_patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the peak in the tower, among the probabilities of a chunk of rows, or where marks are inserted."""
        tower, size, patches, spec = self.tower.spec, self.dtype.itemsize, self.max_patches(rows), self.vocabulary.spec
        chunk = min(_CHUNK, patches // tower.merge**2)
        ops = OpBytes(self.dtype, replace(limits, rows=chunk))
        row, result = spec.words * size, rows * spec.width * size
        logits = ops.linear_result(spec.words, chunk) + ops.norm(spec.words, False)
        words = chunk * max(
            ops.linear(spec.inner, spec.words, chunk), logits, 2 * row, row + ops.linear(spec.words, spec.width, chunk)
        )
        held = patches * (tower.patch_dim + tower.width) * size
        return max(tower_bytes(tower, patches, None, self.dtype, limits), held + result + max(words, result))


def _tower(c: Mapping[str, Any]) -> TowerSpec:
    patch, stride = positive_int(c, "patch_size"), positive_int(c, "hidden_stride")
    side = positive_int(c, "image_size") // patch
    if side % stride:
        raise ConfigError(f"{side} patches a side (vision_config) are not a multiple of hidden_stride {stride}")
    return TowerSpec(
        depth=positive_int(c, "num_hidden_layers"),
        width=positive_int(c, "hidden_size"),
        heads=positive_int(c, "num_attention_heads"),
        inner=positive_int(c, "intermediate_size"),
        patch_dim=positive_int(c, "num_channels") * patch**2,
        act=check_activation("hidden_act of vision_config", c["hidden_act"]),
        merge=stride,
        eps=c["rms_norm_eps"],
        rms=True,
        qkv_bias=bool(c["qkv_bias"]),
        out_bias=bool(c["qkv_bias"]),
        mlp_bias=bool(c["mlp_bias"]),
        table=TableSpec(side),
        patch_norm=True,
        post_norm=True,
        names=NAMES,
    )
