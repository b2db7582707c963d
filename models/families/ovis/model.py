"""Ovis (arXiv 2405.20797): each row of the tower becomes probabilities of visual words, and the mean of their embeddings.

Ovis 1.6 and 2 encode tiles; Ovis2 also has the Hub's layout. Ovis2.5 (arXiv 2508.11737) encodes images and videos at native
resolution. Source of the publisher's layouts: the code published with the checkpoints.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int, require
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import Converter, Convertible, Norm, TensorModule
from ...layers.builder import StoredTensor
from ...layers.connectors import squares
from ...layers.linear import Linear
from ...memory_formulas import OpBytes
from ...native_model import TENSORS
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...vision.encoders import encoder_spec
from ...vision.spec import ENCODER, RotarySpec, TableSpec, TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

_CHUNK = 256  # rows whose probabilities are held at a time
_AIMV2 = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 8, "num_channels": 3,
    "image_size": 224, "patch_size": 14, "rms_norm_eps": 1e-5, "qkv_bias": False, "use_bias": False,
}  # fmt: skip
_NAVIT = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "num_channels": 3,
    "num_patches": -1, "image_size": 512, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
    "hidden_stride": 2, "window_size": 112, "fullatt_block_indexes": None, "temporal_patch_size": 1,
    "preserve_original_pe": True, "use_rope": True,
}  # fmt: skip
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
TRUNK = TowerNames(
    patch="preprocessor.patchifier.proj",
    table="preprocessor.pos_embed",
    patch_norm="preprocessor.patchifier.norm",
    post_norm="trunk.post_trunk_norm",
    layers="trunk.blocks",
    norms=("norm_1", "norm_2"),
    mlp=("mlp.fc1", "mlp.fc3", "mlp.fc2"),
)
"""AIMv2 as its publisher names it."""
PUBLISHED_PREFIXES = (
    ("llm.model.", "language_model."),
    ("llm.lm_head.", "head.lm_head."),
    ("visual_tokenizer.backbone.vision_model.", "tower."),
    ("visual_tokenizer.backbone.", "tower."),
    ("visual_tokenizer.vit.vision_model.", "tower."),
    ("visual_tokenizer.head.0.", "vocabulary.head_linear."),
    ("visual_tokenizer.head.1.", "vocabulary.head_norm."),
    ("vte.", "vocabulary.table."),
)
PUBLISHED_IGNORED = ("tower.head.", "tower.post_layernorm.", "tower.embeddings.position_ids")
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


class OvisModel(DecoderModel, ABC):
    """A tower, whose rows are joined in squares of `stride` x `stride`, and a visual vocabulary. `words` includes the marks.

    The rows of an item include the embeddings of its marks.
    """

    def __init__(
        self, config: Mapping[str, Any], tower: TowerSpec, stride: int, words: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(decoder_spec(config, stack_of(config, "qwen2")), dtype, device)
        self.tower, self.stride = VisionTower(tower, dtype, device), stride
        marks = self.count_marks(config)
        if words <= marks:
            raise ConfigError(f"a visual vocabulary of {words} words (config.json) has no room for {marks} marks")
        spec = VocabularySpec(words - marks, marks, stride**2 * tower.width, self.hidden_size)
        self.vocabulary = VisualVocabulary(spec, dtype, device)
        self.ignored = (*self.ignored, *(f"tower.{name}" for name in tower.unbuilt))

    def count_marks(self, config: Mapping[str, Any]) -> int:
        """Return how many of the visual words are marks."""
        return 5

    def words(self, pixels: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return the rows of the squares of all items `[squares, hidden]`; patches that fill no square are joined to zeros."""
        state = self.tower(pixels, grids)[-1]
        if self.tower.spec.merge == 1 < self.stride:
            state = self._padded(state, grids)
        return self.vocabulary(state.view(-1, self.vocabulary.spec.inner))

    def _padded(self, state: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """Pad the rows of equal frames at the right and bottom to whole squares, and order them by square."""
        _, h, w = grids[0]
        down, right = -h % self.stride, -w % self.stride
        frames = F.pad(state.view(-1, h, w, state.shape[1]), (0, 0, 0, right, 0, down))
        return squares(frames.flatten(0, 2), [(len(frames), h + down, w + right)], self.stride)

    @abstractmethod
    def max_patches(self, rows: int) -> int:
        """Return the most patches of items with `rows` rows."""

    def padded_patches(self, patches: int) -> int:
        """Return how many patches the squares of these have."""
        return patches

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.max_patches(rows) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the peak in the tower, among the probabilities of a chunk of rows, or where marks are inserted."""
        tower, size, patches, spec = self.tower.spec, self.dtype.itemsize, self.max_patches(rows), self.vocabulary.spec
        joined = self.padded_patches(patches)
        chunk = min(_CHUNK, -(-joined // self.stride**2))
        ops = OpBytes(self.dtype, replace(limits, rows=chunk))
        row, result = spec.words * size, rows * spec.width * size
        logits = ops.linear_result(spec.words, chunk) + ops.norm(spec.words, False)
        words = chunk * max(
            ops.linear(spec.inner, spec.words, chunk), logits, 2 * row, row + ops.linear(spec.words, spec.width, chunk)
        )
        base = (patches * tower.patch_dim + joined * tower.width) * size
        return max(tower_bytes(tower, patches, None, self.dtype, limits), base + result + max(words, result))


class Ovis2(OvisModel):
    """Images in tiles, in the Hub's layout."""

    prefixes: Sequence[tuple[str, str]] = (
        ("model.vision_tower.transformer.", "tower."),
        ("model.vision_tower.", "vocabulary."),
        ("model.visual_embeddings_table.", "vocabulary.table."),
        *TEXT_PREFIXES,
    )
    defaults: Mapping[str, Any] = {"tie_word_embeddings": True}
    """Values of the keys that config.json leaves out, as transformers' class has them."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {**self.defaults, **config}
        tower, vision = self.read_tower(config)
        if vision.get("tokenize_function", "softmax") != "softmax":
            raise ConfigError(f"tokenize_function {vision['tokenize_function']!r} is not supported; known is softmax")
        stride = positive_int({"hidden_stride": 1, **vision}, "hidden_stride")
        super().__init__(config, tower, stride, positive_int({"vocab_size": 16384, **vision}, "vocab_size"), dtype, device)
        assert tower.table is not None
        self.side = tower.table.side
        self.per_tile = (-(-self.side // stride)) ** 2

    def count_marks(self, config: Mapping[str, Any]) -> int:
        return positive_int({**_VISION, **config["vision_config"]}, "num_visual_indicator_tokens")

    def read_tower(self, config: Mapping[str, Any]) -> tuple[TowerSpec, Mapping[str, Any]]:
        """Return the tower's spec, and the section of config.json that describes the visual words."""
        vision = {**_VISION, **require(config, "vision_config")}
        side, stride = positive_int(vision, "image_size") // positive_int(vision, "patch_size"), vision["hidden_stride"]
        if side % positive_int(vision, "hidden_stride"):
            raise ConfigError(f"{side} patches a side (vision_config) are not a multiple of hidden_stride {stride}")
        act = check_activation("hidden_act of vision_config", vision["hidden_act"])
        changes = {"act": act, "out_bias": bool(vision["qkv_bias"]), "mlp_bias": bool(vision["mlp_bias"]), "post_norm": True}
        return _aimv2(vision, merge=stride, names=NAMES, **changes), vision

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `tiles`: rows and columns of the tiles of each, (0, 0) if it is not cut."""
        grids = [(int(t), self.side, self.side) for t, _, _ in tensors["grid"].tolist()]
        items = self.words(tensors["pixel_values"], grids).split([t * self.per_tile for t, _, _ in grids])
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
        return max(1, rows // (self.per_tile + 1)) * self.side**2

    def padded_patches(self, patches: int) -> int:
        return patches // self.side**2 * self.per_tile * self.stride**2


class Ovis(Ovis2):
    """Ovis 1.6 and Ovis2 in their publisher's layout: AIMv2, SigLIP or CLIP, whose last norm is not applied."""

    prefixes = PUBLISHED_PREFIXES
    ignored = PUBLISHED_IGNORED
    defaults: Mapping[str, Any] = {}

    def count_marks(self, config: Mapping[str, Any]) -> int:
        return 5

    def read_tower(self, config: Mapping[str, Any]) -> tuple[TowerSpec, Mapping[str, Any]]:
        words = require(config, "visual_tokenizer_config")
        backbone = require(words, "backbone_config", "visual_tokenizer_config of config.json")
        if words.get("hd_booster") or words.get("use_indicators"):
            raise ConfigError("hd_booster and use_indicators in visual_tokenizer_config (Ovis 1.5) are not supported")
        kind = backbone.get("model_type", "aimv2")
        if kind == "clip_vision_model" and not words.get("drop_cls_token"):
            raise ConfigError(
                "a CLIP tower needs drop_cls_token=true in visual_tokenizer_config; its class token fits no square"
            )
        stride = positive_int({"hidden_stride": 1, **words}, "hidden_stride")
        spec = _trunk({**_AIMV2, **backbone}) if kind == "aimv2" else encoder_spec(backbone, kind)
        assert spec.table is not None
        return replace(spec, merge=1 if spec.table.side % stride else stride), words

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. As in the publisher's code, the decoder's scale of embeddings applies to them, too."""
        scale = self.spec.embed_scale
        return [rows if scale == 1 else rows.mul_(scale) for rows in super().embed_multimodal(modality, tensors)]

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Remove the first axis of AIMv2's position embeddings."""
        for name, tensor in weights:
            yield name, tensor.squeeze(0) if name.endswith("preprocessor.pos_embed") else tensor


class Ovis25(OvisModel):
    """Ovis2.5: images and videos at native resolution, each between two marks. The tower's last norm is not applied."""

    prefixes = PUBLISHED_PREFIXES
    ignored = PUBLISHED_IGNORED

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_NAVIT, **require(config, "vit_config")}
        words = positive_int({"visual_vocab_size": 65536, **config}, "visual_vocab_size")
        super().__init__(config, _navit(vision), positive_int(vision, "hidden_stride"), words, dtype, device)

    def count_marks(self, config: Mapping[str, Any]) -> int:
        return 4

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        items = self.words(pixels, grids).split([t * h * w // self.stride**2 for t, h, w in grids])
        marks = self.vocabulary.marks.weight.split(1)
        start, end = marks[:2] if modality == "image" else marks[2:]
        return [torch.cat([start, rows, end]) for rows in items]

    def max_patches(self, rows: int) -> int:
        return max(1, rows - 2) * self.stride**2


def _trunk(c: Mapping[str, Any]) -> TowerSpec:
    return _aimv2(c, names=TRUNK, out_bias=bool(c["use_bias"]), mlp_bias=bool(c["use_bias"]))


def _aimv2(c: Mapping[str, Any], **more: Any) -> TowerSpec:
    """Read AIMv2 from its config; `more` are other fields of TowerSpec."""
    patch = positive_int(c, "patch_size")
    fields: dict[str, Any] = {
        "depth": positive_int(c, "num_hidden_layers"),
        "width": positive_int(c, "hidden_size"),
        "heads": positive_int(c, "num_attention_heads"),
        "inner": positive_int(c, "intermediate_size"),
        "patch_dim": positive_int(c, "num_channels") * patch**2,
        "act": "silu",
        "eps": c["rms_norm_eps"],
        "rms": True,
        "qkv_bias": bool(c["qkv_bias"]),
        "table": TableSpec(positive_int(c, "image_size") // patch),
        "patch_norm": True,
    }
    return TowerSpec(**{**fields, **more})


def _navit(c: Mapping[str, Any]) -> TowerSpec:
    """Read the tower of Ovis2.5, SigLIP 2 with rotary positions, and with windows if some layers attend to whole frames."""
    patch, stride = positive_int(c, "patch_size"), positive_int(c, "hidden_stride")
    count, full = c["num_patches"], _full_layers(c["fullatt_block_indexes"])
    if isinstance(count, bool) or not isinstance(count, int):
        raise ConfigError(f"num_patches in vit_config is {repr(count)[:60]}; it must be an integer, -1 for that of image_size")
    side = round(count**0.5) if count > 0 else positive_int(c, "image_size") // patch
    return TowerSpec(
        depth=positive_int(c, "num_hidden_layers"),
        width=positive_int(c, "hidden_size"),
        heads=positive_int(c, "num_attention_heads"),
        inner=positive_int(c, "intermediate_size"),
        patch_dim=positive_int(c, "num_channels") * positive_int(c, "temporal_patch_size") * patch**2,
        act=check_activation("hidden_act of vit_config", c["hidden_act"]),
        merge=stride,
        eps=c["layer_norm_eps"],
        rotary=RotarySpec() if c["use_rope"] else None,
        table=TableSpec(side, "bicubic") if c["preserve_original_pe"] else None,
        window=positive_int(c, "window_size") // stride // patch if full else 0,
        full_layers=full,
        names=ENCODER,
    )


def _full_layers(value: Any) -> frozenset[int]:
    """Return the layers that attend to whole frames, from a list of their numbers, or a text such as "7|15"."""
    parts = value.split("|") if isinstance(value, str) and value else value or ()
    if not isinstance(parts, list | tuple) or not all(str(part).isdecimal() for part in parts):
        reason = 'it must be a list of the numbers of layers, or a text such as "7|15"'
        raise ConfigError(f"fullatt_block_indexes in vit_config is {repr(value)[:60]}; {reason}")
    return frozenset(int(part) for part in parts)
