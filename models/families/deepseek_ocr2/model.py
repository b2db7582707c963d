"""DeepSeek-OCR and DeepSeek-OCR 2: SAM's tower, a second encoder (CLIP, or decoder layers with learned queries), experts.

Sources: arXiv 2510.18234 (the first), 2601.20552 (the second).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import EmbeddingTable
from ...layers.builder import StoredTensor
from ...layers.connectors import Projector, ProjectorSpec
from ...text.attention import gathered_bytes
from ...text.decoder import decoder_bytes
from ...text.decoder_config import decoder_spec
from ...text.query_encoder import QueryEncoder
from ...text.spec import AttentionSpec, DecoderSpec
from ...text.stack import Stack
from ...text.stacks import STACKS
from ...vision.encoders import encoder_spec
from ...vision.sam import SamTower, convolved_names, sam_bytes, sam_spec
from ...vision.spec import ENCODER, TableSpec, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

STACK = replace(STACKS["deepseek_v2"], defaults={**STACKS["deepseek_v2"].defaults, "kv_lora_rank": None}, interleaved=False)
QUERIES = {144: "query_768", 256: "query_1024"}  # rows of SAM -> name of the queries (image side in pixels)
SIDES = (10, 16)  # rows along a side of the first model's tiles and whole images
CLIP = replace(ENCODER, layers="transformer.layers", qkv=("self_attn.qkv_proj",))
_ENCODER = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "rope_theta": 1e6,
}  # fmt: skip
_CLIP = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "image_size": 224}
_DOWN = (512, 896)
_PARTS = {"sam_config": "sam_vit_b", "clip_config": "clip-l-14-224", "encoder_config": "qwen2-0-5b"}  # the publisher's names
_KEYS = {"width": "hidden_size", "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
_TOWER = "model.vision_tower."
_NORM = re.compile(r"(?<=sam_encoder\.layers\.)(\d+)\.layer_norm(?=[12]\.)")
_PREFIXES = (
    *((old, f"sam.{new}") for old, new in convolved_names(f"{_TOWER}sam_encoder.")),
    (f"{_TOWER}sam_encoder.layers.", "sam.blocks."),
    (f"{_TOWER}sam_encoder.", "sam."),
    (f"{_TOWER}vision_encoder.", "encoder."),
    (f"{_TOWER}query_768_resolution.", "query_768."),
    (f"{_TOWER}query_1024_resolution.", "query_1024."),
    ("model.multi_modal_projector.", "projector.proj."),
    ("model.view_separator", "view_separator"),
    ("model.sam_model.", "sam."),
    ("model.qwen2_model.model.model.", "encoder."),
    ("model.qwen2_model.", ""),
    ("model.projector.layers.", "projector.proj."),
    ("model.vision_model.", "clip."),
    ("model.image_newline", "image_newline"),
    ("model.view_seperator", "view_separator"),  # so spelled in the checkpoints
    *TEXT_PREFIXES,
    ("model.", "language_model."),
)


class DeepseekOcr(DecoderModel):
    """DeepSeek-OCR: CLIP runs over SAM's rows, and both are concatenated. Learned rows end each line and the image."""

    prefixes = _PREFIXES
    ignored: Sequence[str] = ("clip.embeddings.patch_embedding.", "clip.embeddings.position_ids")
    stack: ClassVar[Stack] = STACK
    down: ClassVar[tuple[int, ...]] = (512, 1024)  # channels of SAM's convolutions, if the config does not state them

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, self.stack), dtype, device)
        vision = _hub(require(config, "vision_config"))
        self.sam = SamTower(sam_spec(vision.get("sam_config") or {}, self.down), dtype, device)
        width = self.build_encoder(vision, device)
        self.projector = Projector(ProjectorSpec(width, self.hidden_size, ("proj",)), dtype, device)
        self.view_separator = StoredTensor((self.hidden_size,), dtype, device)

    def build_encoder(self, vision: Mapping[str, Any], device: torch.device) -> int:
        """Build the encoder between SAM and the projector; return the width of its rows."""
        spec = self.clip_spec(vision)
        if spec.width != self.sam.spec.width:
            raise ConfigError(f"SAM's rows have width {self.sam.spec.width}, CLIP takes {spec.width}")
        self.clip = VisionTower(spec, self.dtype, device)
        self.image_newline = StoredTensor((self.hidden_size,), self.dtype, device)
        return 2 * spec.width

    def clip_spec(self, vision: Mapping[str, Any]) -> TowerSpec:
        """Hook: read CLIP from the vision_config."""
        return _clip(vision)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return ((_NORM.sub(r"\1.norm", name), tensor) for name, tensor in weights)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Read `tensors["tiles"]` `[items, 4]`: rows and columns of tiles, side of a tile and of the whole in patches."""
        items = tensors["tiles"].tolist()
        tile_sizes = [side**2 for rows, columns, side, _ in items for _ in range(rows * columns)]
        tiles = iter(tensors["pixel_values_local"].split(tile_sizes))
        wholes = tensors["pixel_values"].split([side**2 for *_, side in items])
        end, results = self.view_separator.weight[None], []
        for whole, (rows, columns, side, whole_side) in zip(wholes, items, strict=True):
            encoded = [self._encode_patches(next(tiles), side) for _ in range(rows * columns)]
            whole_lines = self.lines([self._encode_patches(whole, whole_side)], 1)
            results.append(torch.cat((*self.lines(encoded, columns), *whole_lines, end)))
        return results

    def _encode_patches(self, patches: Tensor, side: int) -> Tensor:
        """Encode `[side^2, patch_dim]` -> `[rows, hidden]`; one image at a time, so that bits do not depend on the batch."""
        return self.projector(self.encode(self.sam(patches, side)))

    def encode(self, rows: Tensor) -> Tensor:
        """Encode SAM's rows of a square image to as many rows for the projector."""
        side = math.isqrt(len(rows))
        return torch.cat((self.clip(rows, [(1, side, side)])[-1], rows), 1)

    def lines(self, tiles: Sequence[Tensor], columns: int) -> Sequence[Tensor]:
        """Order the rows of square tiles line by line across their grid, which has `columns` columns; end each line."""
        if not tiles:
            return ()
        rows, side = len(tiles) // columns, math.isqrt(len(tiles[0]))
        plane = torch.stack(list(tiles)).view(rows, columns, side, side, -1).transpose(1, 2)
        plane = plane.reshape(rows * side, columns * side, -1)
        newlines = self.image_newline.weight.expand(len(plane), 1, -1)
        return (torch.cat((plane, newlines), 1).flatten(0, 1),)

    def input_bytes(self, modality: str, rows: int) -> int:
        spec = self.sam.spec
        return rows * spec.downsampling**2 * spec.tower.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the bytes of the largest tile, of the inputs and of the result."""
        spec = self.sam.spec
        tile = self.max_tile(rows)
        base = self.input_bytes(modality, rows) + (rows + tile) * self.hidden_size * self.dtype.itemsize
        return base + max(sam_bytes(spec, tile * spec.downsampling**2, self.dtype, limits), self.second_bytes(tile, limits))

    def max_tile(self, rows: int) -> int:
        """Return the largest number of rows that one tile of an image with `rows` rows can have."""
        return max((side**2 for side in SIDES if side * (side + 1) < rows), default=min(SIDES) ** 2)

    def second_bytes(self, tile: int, limits: StepLimits) -> int:
        """Return the bytes alive in the second encoder and the projector for a tile of `tile` rows."""
        clip, joined = self.clip.spec, 2 * self.clip.spec.width * tile * self.dtype.itemsize
        return joined + tower_bytes(clip, tile, self.projector.spec, self.dtype, limits)


class DeepseekOcr2(DeepseekOcr):
    """DeepSeek-OCR 2: decoder layers with learned queries over SAM's rows. Order: tiles, whole image, a learned row."""

    ignored = ()
    down = _DOWN

    def build_encoder(self, vision: Mapping[str, Any], device: torch.device) -> int:
        encoder, width = _encoder(vision), self.sam.spec.width
        if width != encoder.hidden_size:
            raise ConfigError(f"SAM's rows have width {width}, those of encoder_config {encoder.hidden_size}")
        self.encoder = QueryEncoder(encoder, self.dtype, device)
        for rows, name in QUERIES.items():
            self.add_module(name, EmbeddingTable(rows, width, self.dtype, device))
        return width

    def encode(self, rows: Tensor) -> Tensor:
        return self.encoder(rows, self.get_submodule(QUERIES[len(rows)]).weight)

    def lines(self, tiles: Sequence[Tensor], columns: int) -> Sequence[Tensor]:
        """Return the tiles as they are: this model does not arrange them in lines."""
        return tiles

    def max_tile(self, rows: int) -> int:
        return max((queries for queries in QUERIES if queries < rows), default=min(QUERIES))

    def second_bytes(self, tile: int, limits: StepLimits) -> int:
        inner, spec = replace(limits, rows=2 * tile, keys=2 * tile, longest=2 * tile), self.encoder.spec
        return decoder_bytes(spec, inner, self.dtype) + gathered_bytes(spec, inner, self.dtype)


def _hub(vision: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a vision_config in the Hub's layout; the publisher's own has the parts under `width`, with other key names.

    The published config of the second model states wrong channels for SAM's last convolution; they equal the encoder's width.
    """
    published = vision.get("width")
    if not isinstance(published, Mapping):
        return vision
    sections = {name: published[stored] for name, stored in _PARTS.items() if isinstance(published.get(stored), Mapping)}
    parts = {name: {_KEYS.get(key, key): value for key, value in part.items()} for name, part in sections.items()}
    if "encoder_config" in parts:
        parts["encoder_config"] = _ENCODER | parts["encoder_config"]
        sam = parts.setdefault("sam_config", {})
        sam["downsample_channels"] = (*(sam.get("downsample_channels") or _DOWN)[:-1], parts["encoder_config"]["hidden_size"])
    return {**vision, **parts}


def _encoder(vision: Mapping[str, Any]) -> DecoderSpec:
    spec = decoder_spec(vision.get("encoder_config") or {}, STACKS["qwen2"])
    if any(not isinstance(attention, AttentionSpec) or attention.window for attention in spec.attentions):
        raise ConfigError("encoder_config has sliding windows or latent attention; only full attention is supported")
    return spec


def _clip(vision: Mapping[str, Any]) -> TowerSpec:
    clip = {**_CLIP, **(vision.get("clip_config") or {})}
    table = TableSpec(positive_int(clip, "image_size") // positive_int(clip, "patch_size"), "bicubic", antialias=True)
    clip = {"intermediate_size": 4 * positive_int(clip, "hidden_size"), **clip}
    return encoder_spec(clip, "clip_vision_model", patch_dim=0, table=table, names=CLIP)
