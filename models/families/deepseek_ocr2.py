"""DeepSeek-OCR: SAM's tower, an encoder behind it (CLIP, or a decoder that reads by learned queries), a mixture that writes.

Sources: arXiv 2510.18234 (the first one), 2601.20552 (the second).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..mm.errors import ConfigError
from .activations import decoder_bytes, gathered_bytes, sam_bytes, tower_bytes
from .config import count, decoder_spec, need
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.basic import Embedding
from .layers.connectors import Projector, ProjectorSpec
from .layers.tree import Stored
from .text.query_encoder import QueryEncoder
from .text.spec import AttentionSpec, DecoderSpec
from .text.stacks import STACKS
from .vision.encoders import encoder_spec
from .vision.sam import SAM, SamSpec, Tower, convolved_names
from .vision.spec import ENCODER, TableSpec, TowerSpec
from .vision.vit import Tower as Encoder

STACK = replace(STACKS["deepseek_v2"], defaults={**STACKS["deepseek_v2"].defaults, "kv_lora_rank": None}, neighbours=False)
QUERIES = {144: "query_768", 256: "query_1024"}  # by how many rows the tower makes of a picture of so many pixels a side
SIDES = (10, 16)  # rows along a side of what the first one sees
_SAM = {
    "hidden_size": 768, "output_channels": 256, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3,
    "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "qkv_bias": True, "mlp_ratio": 4.0,
    "use_abs_pos": True, "use_rel_pos": True, "window_size": 14, "global_attn_indexes": (2, 5, 8, 11),
}  # fmt: skip
CLIP = replace(ENCODER, layers="transformer.layers", qkv=("self_attn.qkv_proj",))
_READER = {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "rope_theta": 1e6,
}  # fmt: skip
_CLIP = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14, "image_size": 224}
_DOWN = (512, 896)
_PARTS = {"sam_config": "sam_vit_b", "clip_config": "clip-l-14-224", "encoder_config": "qwen2-0-5b"}  # the publisher's names
_KEYS = {"width": "hidden_size", "dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
_HELD = "model.vision_tower."  # in memory
_NORM = re.compile(r"(?<=sam_encoder\.layers\.)(\d+)\.layer_norm(?=[12]\.)")
_PREFIXES = (
    *((old, f"sam.{new}") for old, new in convolved_names(f"{_HELD}sam_encoder.")),
    (f"{_HELD}sam_encoder.layers.", "sam.blocks."),
    (f"{_HELD}sam_encoder.", "sam."),
    (f"{_HELD}vision_encoder.", "reader."),
    (f"{_HELD}query_768_resolution.", "query_768."),
    (f"{_HELD}query_1024_resolution.", "query_1024."),
    ("model.multi_modal_projector.", "projector.proj."),
    ("model.view_separator", "view_separator"),
    ("model.sam_model.", "sam."),
    ("model.qwen2_model.model.model.", "reader."),
    ("model.qwen2_model.", ""),
    ("model.projector.layers.", "projector.proj."),
    ("model.vision_model.", "clip."),
    ("model.image_newline", "image_newline"),
    ("model.view_seperator", "view_separator"),  # so spelled in the checkpoints
    *TEXT_PREFIXES,
    ("model.", "language_model."),
)


class DeepseekOcr(DecoderModel):
    """The first one: CLIP's layers over SAM's rows, both side by side; a learned row ends each line, one the picture."""

    prefixes = _PREFIXES
    ignored: Sequence[str] = ("clip.embeddings.patch_embedding.", "clip.embeddings.position_ids")
    down: ClassVar[tuple[int, ...]] = (512, 1024)  # channels behind SAM where the config does not say

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, STACK), dtype, device)
        vision = _hub(need(config, "vision_config"))
        self.sam = Tower(_sam(vision, self.down), dtype, device)
        width = self.connect(vision, device)
        self.projector = Projector(ProjectorSpec(width, self.hidden_size, ("proj",)), dtype, device)
        self.view_separator = Stored((self.hidden_size,), dtype, device)

    def connect(self, vision: Mapping[str, Any], device: torch.device) -> int:
        """Make what lies between SAM and projector; the width of its rows."""
        spec = _clip(vision)
        if spec.width != self.sam.spec.width:
            raise ConfigError(f"SAM's rows are {self.sam.spec.width} wide, CLIP takes {spec.width}")
        self.clip = Encoder(spec, self.dtype, device)
        self.image_newline = Stored((self.hidden_size,), self.dtype, device)
        return 2 * spec.width

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((_NORM.sub(r"\1.norm", name), tensor) for name, tensor in weights)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """`tiles` `[items, 4]`: rows and columns of them, and the patches along a side of each and of the whole."""
        items = tensors["tiles"].tolist()
        sizes = [side**2 for tall, wide, side, _ in items for _ in range(tall * wide)]
        tiles = iter(tensors["pixel_values_local"].split(sizes))
        wholes = tensors["pixel_values"].split([side**2 for *_, side in items])
        end, found = self.view_separator.weight[None], []
        for whole, (tall, wide, side, own) in zip(wholes, items, strict=True):
            seen = [self._see(next(tiles), side) for _ in range(tall * wide)]
            found.append(torch.cat((*self.lines(seen, wide), *self.lines([self._see(whole, own)], 1), end)))
        return found

    def _see(self, patches: Tensor, side: int) -> Tensor:
        """`[side^2, patch_dim]` -> `[rows, hidden]`; pictures go one by one, so that none depends on its company."""
        return self.projector(self.encode(self.sam(patches, side)))  # type: ignore[no-any-return]

    def encode(self, rows: Tensor) -> Tensor:
        """SAM's rows of a square -> what is projected, as many."""
        side = math.isqrt(len(rows))
        return torch.cat((self.clip(rows, [(1, side, side)])[-1], rows), 1)

    def lines(self, pieces: Sequence[Tensor], wide: int) -> Sequence[Tensor]:
        """Rows of square pieces, `wide` beside one another -> rows of the decoder: line by line, across all pieces."""
        if not pieces:
            return ()
        tall, side = len(pieces) // wide, math.isqrt(len(pieces[0]))
        plane = torch.stack(list(pieces)).view(tall, wide, side, side, -1).transpose(1, 2).reshape(tall * side, wide * side, -1)
        ends = self.image_newline.weight.expand(len(plane), 1, -1)
        return (torch.cat((plane, ends), 1).flatten(0, 1),)

    def input_bytes(self, modality: str, rows: int) -> int:
        spec = self.sam.spec
        return rows * spec.shrinks**2 * spec.tower.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        """Of the largest piece, beside what goes in and what comes out."""
        spec = self.sam.spec
        made = self.largest(rows)
        held = self.input_bytes(modality, rows) + (rows + made) * self.hidden_size * self.dtype.itemsize
        return held + max(sam_bytes(spec, made * spec.shrinks**2, self.dtype, work), self.behind_bytes(made, work))

    def largest(self, rows: int) -> int:
        """The most rows that one piece of a picture of so many makes."""
        return max((side**2 for side in SIDES if side * (side + 1) < rows), default=min(SIDES) ** 2)

    def behind_bytes(self, made: int, work: Work) -> int:
        """Of what makes so many rows of SAM's, them included."""
        own, joined = self.clip.spec, 2 * self.clip.spec.width * made * self.dtype.itemsize
        return joined + tower_bytes(own, made, self.projector.spec, self.dtype, work)


class DeepseekOcr2(DeepseekOcr):
    """The second one: a decoder's layers as encoder, read by queries. Rows of the tiles, of the whole, a learned one."""

    ignored = ()
    down = _DOWN

    def connect(self, vision: Mapping[str, Any], device: torch.device) -> int:
        reader, width = _reader(vision), self.sam.spec.width
        if width != reader.hidden_size:
            raise ConfigError(f"the tower's rows are {width} wide, those of encoder_config {reader.hidden_size}")
        self.reader = QueryEncoder(reader, self.dtype, device)
        for rows, name in QUERIES.items():
            self.add_module(name, Embedding(rows, width, self.dtype, device))
        return width

    def encode(self, rows: Tensor) -> Tensor:
        return self.reader(rows, self.get_submodule(QUERIES[len(rows)]).weight)  # type: ignore[no-any-return]

    def lines(self, pieces: Sequence[Tensor], wide: int) -> Sequence[Tensor]:
        """One piece after another."""
        return pieces

    def largest(self, rows: int) -> int:
        return max((few for few in QUERIES if few < rows), default=min(QUERIES))

    def behind_bytes(self, made: int, work: Work) -> int:
        inner, spec = replace(work, rows=2 * made, keys=2 * made, longest=2 * made), self.reader.spec
        return decoder_bytes(spec, inner, self.dtype) + gathered_bytes(spec, inner, self.dtype)


def _hub(vision: Mapping[str, Any]) -> Mapping[str, Any]:
    """A vision_config in the Hub's layout; the publisher's has its parts in `width`, under other names.

    That of the second one names more channels behind SAM than the weights have: the encoder's width.
    """
    own = vision.get("width")
    if not isinstance(own, Mapping):
        return vision
    known = {name: own[stored] for name, stored in _PARTS.items() if isinstance(own.get(stored), Mapping)}
    parts = {name: {_KEYS.get(key, key): value for key, value in part.items()} for name, part in known.items()}
    if "encoder_config" in parts:
        parts["encoder_config"] = _READER | parts["encoder_config"]
        sam = parts.setdefault("sam_config", {})
        sam["downsample_channels"] = (*(sam.get("downsample_channels") or _DOWN)[:-1], parts["encoder_config"]["hidden_size"])
    return {**vision, **parts}


def _sam(vision: Mapping[str, Any], down: tuple[int, ...]) -> SamSpec:
    """`down`: where the config does not say."""
    sam = {**_SAM, **(vision.get("sam_config") or {})}
    width, patch = count(sam, "hidden_size"), count(sam, "patch_size")
    if not sam["use_abs_pos"]:
        raise ConfigError("sam_config switches position embeddings off; this tower has them")
    tower = TowerSpec(
        depth=count(sam, "num_hidden_layers"),
        width=width,
        heads=count(sam, "num_attention_heads"),
        inner=sam.get("mlp_dim") or int(width * sam["mlp_ratio"]),
        patch_dim=sam["num_channels"] * patch**2,
        act=sam["hidden_act"],
        eps=sam["layer_norm_eps"],
        qkv_bias=sam["qkv_bias"],
        table=TableSpec(count(sam, "image_size") // patch, fit="bicubic", antialias=True),
        window=sam["window_size"],
        full_layers=frozenset(sam["global_attn_indexes"]),
        names=SAM,
    )
    return SamSpec(tower, count(sam, "output_channels"), tuple(sam.get("downsample_channels") or down), sam["use_rel_pos"])


def _reader(vision: Mapping[str, Any]) -> DecoderSpec:
    spec = decoder_spec(vision.get("encoder_config") or {}, STACKS["qwen2"])
    if any(not isinstance(attention, AttentionSpec) or attention.window for attention in spec.attentions):
        raise ConfigError("encoder_config has layers that see a window, or latents; the known ones see all rows")
    return spec


def _clip(vision: Mapping[str, Any]) -> TowerSpec:
    clip = {**_CLIP, **(vision.get("clip_config") or {})}
    table = TableSpec(count(clip, "image_size") // count(clip, "patch_size"), "bicubic", antialias=True)
    clip = {"intermediate_size": 4 * count(clip, "hidden_size"), **clip}
    return encoder_spec(clip, "clip_vision_model", patch_dim=0, table=table, names=CLIP)
