"""DeepSeek-OCR 2: SAM's tower, a decoder that reads its rows by learned queries, a mixture that writes (arXiv 2601.20552)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..mm.errors import ConfigError
from .activations import decoder_bytes, gathered_bytes, sam_bytes
from .config import count, decoder_spec, need
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.basic import Embedding
from .layers.connectors import Projector, ProjectorSpec
from .layers.tree import Stored
from .text.query_encoder import QueryEncoder
from .text.spec import AttentionSpec, DecoderSpec
from .text.stacks import STACKS
from .vision.sam import SAM, SamSpec, Tower, convolved_names
from .vision.spec import TableSpec, TowerSpec

STACK = replace(STACKS["deepseek_v2"], defaults={**STACKS["deepseek_v2"].defaults, "kv_lora_rank": None}, neighbours=False)
QUERIES = {144: "query_768", 256: "query_1024"}  # by how many rows the tower makes of a picture of so many pixels a side
_SAM = {
    "hidden_size": 768, "output_channels": 256, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3,
    "image_size": 1024, "patch_size": 16, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "qkv_bias": True, "mlp_ratio": 4.0,
    "use_abs_pos": True, "use_rel_pos": True, "window_size": 14, "global_attn_indexes": (2, 5, 8, 11),
}  # fmt: skip
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
    ("model.view_seperator", "view_separator"),  # so spelled in the checkpoints
    *TEXT_PREFIXES,
    ("model.", "language_model."),
)


class DeepseekOcr2(DecoderModel):
    """A picture's rows: those of its tiles, those of the whole, a learned one."""

    prefixes = _PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, STACK), dtype, device)
        vision = need(config, "vision_config")
        sam, reader = _sam(vision), _reader(vision)
        if sam.width != reader.hidden_size:
            raise ConfigError(f"the tower's rows are {sam.width} wide, those of encoder_config {reader.hidden_size}")
        self.sam, self.reader = Tower(sam, dtype, device), QueryEncoder(reader, dtype, device)
        for rows, name in QUERIES.items():
            self.add_module(name, Embedding(rows, reader.hidden_size, dtype, device))
        self.projector = Projector(ProjectorSpec(reader.hidden_size, self.hidden_size, ("proj",)), dtype, device)
        self.view_separator = Stored((self.hidden_size,), dtype, device)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((_NORM.sub(r"\1.norm", name), tensor) for name, tensor in weights)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """`tiles` `[items, 3]`: how many, and the patches along a side of each and of the whole."""
        items = tensors["tiles"].tolist()
        tiles = iter(tensors["pixel_values_local"].split([side**2 for many, side, _ in items for _ in range(many)]))
        wholes = tensors["pixel_values"].split([side**2 for _, _, side in items])
        end, found = self.view_separator.weight[None], []
        for whole, (many, side, own) in zip(wholes, items, strict=True):
            seen = [self._see(next(tiles), side) for _ in range(many)]
            found.append(torch.cat((*seen, self._see(whole, own), end)))
        return found

    def _see(self, patches: Tensor, side: int) -> Tensor:
        """`[side^2, patch_dim]` -> `[rows, hidden]`; pictures go one by one, so that none depends on its company."""
        rows = self.sam(patches, side)
        return self.projector(self.reader(rows, self.get_submodule(QUERIES[len(rows)]).weight))  # type: ignore[no-any-return]

    def input_bytes(self, modality: str, rows: int) -> int:
        spec = self.sam.spec
        return rows * spec.shrinks**2 * spec.tower.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        """Of the largest piece, beside what goes in and what comes out."""
        spec = self.sam.spec
        made = max((few for few in QUERIES if few < rows), default=min(QUERIES))
        inner = replace(work, rows=2 * made, keys=2 * made, longest=2 * made)
        reader = decoder_bytes(self.reader.spec, inner, self.dtype) + gathered_bytes(self.reader.spec, inner, self.dtype)
        held = self.input_bytes(modality, rows) + (rows + made) * self.hidden_size * self.dtype.itemsize
        return held + max(sam_bytes(spec, made * spec.shrinks**2, self.dtype, work), reader)


def _sam(vision: Mapping[str, Any]) -> SamSpec:
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
    down = tuple(sam.get("downsample_channels") or (512, 896))
    return SamSpec(tower, count(sam, "output_channels"), down, sam["use_rel_pos"])


def _reader(vision: Mapping[str, Any]) -> DecoderSpec:
    spec = decoder_spec(vision.get("encoder_config") or {}, STACKS["qwen2"])
    if any(not isinstance(attention, AttentionSpec) or attention.window for attention in spec.attentions):
        raise ConfigError("encoder_config has layers that see a window, or latents; the known ones see all rows")
    return spec
