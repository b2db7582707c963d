"""LLaVA 1.5, LLaVA-NeXT (Granite Vision with it) and LLaVA-OneVision: an image encoder, two layers, any decoder.

Sources: arXiv 2310.03744 (1.5), 2408.03326 (tiles with lines, pooled clips), 2502.09927 (several layers of the encoder).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..mm.anyres import FEW_SIZES, MANY_SIZES, POOL, densest
from ..mm.errors import ConfigError
from ..mm.tiling import Pinpoints
from .activations import tower_bytes
from .config import decoder_spec, need, text_of
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.connectors import Projector, ProjectorSpec
from .layers.tree import Stored
from .text.spec import DecoderSpec
from .text.stacks import stack_of
from .vision.encoders import completed, encoder_spec
from .vision.places import Grid
from .vision.vit import Tower


class Llava(DecoderModel):
    """LLaVA 1.5: all patches of a picture, one row each."""

    prefixes: ClassVar[Sequence[tuple[str, str]]] = (
        ("model.vision_tower.vision_model.", "vision_tower."),
        ("model.vision_tower.", "vision_tower."),
        ("vision_tower.vision_model.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("model.image_newline", "image_newline"),
        *TEXT_PREFIXES,
    )
    vision: ClassVar[Mapping[str, Any]] = {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 336,
    }
    text: ClassVar[str] = "llama"
    layer: ClassVar[int] = -2
    strategy: ClassVar[str] = "default"

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(self.decoder(config), dtype, device)
        given, kind = need(config, "vision_config"), self.vision["model_type"]
        vision = completed({**self.vision, **given} if given.get("model_type", kind) == kind else given, kind)
        self.layers, self.image_size = _layers(self.seen(config), vision["num_hidden_layers"]), vision["image_size"]
        keep = config.get("vision_feature_select_strategy", self.strategy) == "full"
        tower = encoder_spec(vision, kind, features=tuple(sorted(set(self.layers))), keep_class=keep)
        self.vision_tower = Tower(tower, dtype, device)
        self.scale = text_of(config).get("embedding_multiplier", 1.0)  # published as a factor of all that the decoder is given
        self.connect(config)
        unused = (*tower.unbuilt, "head.", "embeddings.position_ids")  # a pooling head; numbers that old releases stored
        self.ignored = tuple(f"vision_tower.{name}" for name in unused)

    def decoder(self, config: Mapping[str, Any]) -> DecoderSpec:
        """Published without the factor of logits that a text config may name."""
        return decoder_spec(config, stack_of(config, self.text), logit_scale=1.0)

    def seen(self, config: Mapping[str, Any]) -> int | Sequence[int]:
        """States of the tower by number, from its end where they are negative."""
        layers: int | Sequence[int] = config.get("vision_feature_layer", self.layer)
        return layers

    def connect(self, config: Mapping[str, Any]) -> None:
        """Make what lies between tower and decoder."""
        projector = ProjectorSpec(
            width=self.vision_tower.spec.width * len(self.layers),
            out=self.hidden_size,
            layers=("linear_1", "linear_2"),
            inner=self.hidden_size,
            act=config.get("projector_hidden_act", "gelu"),
            bias=config.get("multimodal_projector_bias", True),
        )
        self.multi_modal_projector = Projector(projector, self.dtype, self.vision_tower.device)

    def encode(self, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Projected rows of each item, `[pieces, rows of a piece, hidden]`."""
        states, grids = self.see(tensors)
        seen = [states[layer] for layer in self.layers]
        rows = self.multi_modal_projector(seen[0] if len(seen) == 1 else torch.cat(seen, 1))
        if self.scale != 1.0:
            rows *= self.scale
        spec = self.vision_tower.spec
        of_class = int(spec.class_token and spec.keep_class)
        pieces = rows.split([t * (h * w + of_class) for t, h, w in grids])
        return [one.view(t, -1, self.hidden_size) for one, (t, _, _) in zip(pieces, grids, strict=True)]

    def see(self, tensors: Mapping[str, Any]) -> tuple[dict[int, Tensor], list[Grid]]:
        """The tower's states by number, `[rows, width]` of all items, and the items' grids."""
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        states = self.vision_tower(tensors["pixel_values"], grids)
        return dict(zip(self.vision_tower.spec.states, states, strict=True)), grids

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        return [rows.flatten(0, 1) for rows in self.encode(tensors)]

    def patches(self, modality: str, rows: int) -> int:
        """The most that are encoded for so many rows."""
        return rows

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.patches(modality, rows) * self.vision_tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        patches, projector = self.patches(modality, rows), self.multi_modal_projector.spec
        return tower_bytes(self.vision_tower.spec, patches, projector, self.dtype, work)


class LlavaNext(Llava):
    """LLaVA-NeXT: the whole picture's rows, then those of its tiles line by line, each line ending in a learned row."""

    pinpoints: ClassVar[Sequence[tuple[int, int]]] = FEW_SIZES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.image_newline = Stored((self.hidden_size,), dtype, device)
        table = self.vision_tower.spec.table
        assert table is not None
        self.side = table.side
        sizes = tuple((int(h), int(w)) for h, w in config.get("image_grid_pinpoints") or self.pinpoints)
        tile = (self.image_size, self.image_size)
        self.densest = densest(Pinpoints(tile, tile, sizes), self.side, self.most(config))

    def most(self, config: Mapping[str, Any]) -> int | None:
        """Tiles' worth of patches beyond which what is left of a picture is pooled, None: never."""
        return None

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        made = zip(self.encode(tensors), tensors["lines"].tolist(), strict=True)
        return [self._in_lines(pieces, lines) for pieces, lines in made]

    def _in_lines(self, pieces: Tensor, lines: Sequence[int]) -> Tensor:
        """`pieces` `[tiles + 1, side^2, hidden]`, `lines` as the family's processor makes them -> `[rows, hidden]`."""
        end = self.image_newline.weight * self.scale
        rows, columns, *kept = lines
        if not rows:
            return torch.cat((pieces[0], end[None]))
        side = self.side
        plane = pieces[1:].view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        top, left = (rows * side - kept[0]) // 2, (columns * side - kept[1]) // 2
        plane = plane[top : top + kept[0], left : left + kept[1]]
        if kept[2:] != kept[:2]:
            plane = _resized(plane[None], (kept[2], kept[3]))[0]
        ended = torch.cat((plane, end.expand(len(plane), 1, -1)), 1)
        return torch.cat((pieces[0], ended.flatten(0, 1)))

    def patches(self, modality: str, rows: int) -> int:
        return math.ceil(rows * self.densest)


class LlavaOnevision(LlavaNext):
    """LLaVA-OneVision: many tiles are pooled; of clips each frame is pooled, and one learned row ends them all."""

    vision: ClassVar[Mapping[str, Any]] = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
        "patch_size": 14,
        "image_size": 384,
    }
    text = "qwen2"
    layer = -1
    strategy = "full"
    pinpoints = MANY_SIZES

    def most(self, config: Mapping[str, Any]) -> int | None:
        return int(str(config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality == "image":
            return super().embed_multimodal(modality, tensors)
        side, end = math.ceil(self.side / POOL), self.image_newline.weight[None] * self.scale
        clips = (frames.unflatten(1, (self.side, self.side)) for frames in self.encode(tensors))
        return [torch.cat((_resized(frames, (side, side)).flatten(0, 2), end)) for frames in clips]

    def patches(self, modality: str, rows: int) -> int:
        if modality == "image":
            return super().patches(modality, rows)
        return rows * self.side**2 // math.ceil(self.side / POOL) ** 2


def _layers(given: int | Sequence[int], depth: int) -> tuple[int, ...]:
    """States of the tower by number, 0 before its first layer; ConfigError for one that it has not."""
    several = [given] if isinstance(given, int) else list(given)
    found = tuple(depth + 1 + layer if layer < 0 else layer for layer in several)
    if not found or any(not 0 <= layer <= depth for layer in found):
        raise ConfigError(f"vision_feature_layer {given} names no layer of a tower of {depth}")
    return found


def _resized(planes: Tensor, size: tuple[int, int]) -> Tensor:
    """`[n, h, w, hidden]` at another size, between whose corners nothing is low-passed."""
    return F.interpolate(planes.permute(0, 3, 1, 2), size, mode="bilinear").permute(0, 2, 3, 1)
