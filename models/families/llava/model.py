"""LLaVA 1.5, LLaVA-NeXT, Granite Vision, LLaVA-OneVision, MinerU 2.0: CLIP or SigLIP, a projector of two layers, a decoder.

Sources: arXiv 2310.03744 (1.5), 2408.03326 (tiles in lines, pooled videos), 2502.09927 (several layers of the encoder).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import get_text_config
from ....mm.tiling.canvas import AnyResTiles
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.builder import StoredTensor
from ...layers.connectors import Projector, ProjectorSpec
from ...memory_formulas import SMALL
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stacks import stack_of
from ...vision.encoders import encoder_spec, with_defaults
from ...vision.positions import Grid
from ...vision.vit import VisionTower, tower_bytes
from .config import PINPOINTS_336, PINPOINTS_384, PINPOINTS_MINIMAX, POOL_STRIDE, max_patches_per_row, stretched_tiles

PREFIXES = (
    ("model.vision_tower.vision_model.", "vision_tower."),
    ("model.vision_tower.", "vision_tower."),
    ("vision_tower.vision_model.", "vision_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.image_newline", "image_newline"),
    *TEXT_PREFIXES,
)
_CLIP: Mapping[str, Any] = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 336,
}  # fmt: skip
_SIGLIP: Mapping[str, Any] = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 26,
    "num_attention_heads": 16, "patch_size": 14, "image_size": 384,
}  # fmt: skip


class LlavaBase(DecoderModel):
    """Tower, projector and the lines of tiles. Class attributes are defaults of what config.json may leave out.

    Attributes:
        vision: vision config, if config.json has none. text: model_type of the decoder.
        layer: `vision_feature_layer`. strategy: "full" keeps the class token.
        pinpoints: sizes (height, width) of tiled images; empty: images are not tiled.
    """

    prefixes: Sequence[tuple[str, str]] = PREFIXES
    vision: ClassVar[Mapping[str, Any]] = _CLIP
    text: ClassVar[str] = "llama"
    layer: ClassVar[int] = -2
    strategy: ClassVar[str] = "default"
    pinpoints: ClassVar[Sequence[tuple[int, int]]] = ()

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(self.decoder(config), dtype, device)
        model_type = self.vision["model_type"]
        vision = with_defaults(config.get("vision_config") or self.vision, model_type)
        self.layers = _feature_layers(self.feature_layers(config), vision["num_hidden_layers"])
        keep = config.get("vision_feature_select_strategy", self.strategy) == "full"
        tower = encoder_spec(vision, model_type, features=tuple(sorted(set(self.layers))), keep_class=keep)
        self.vision_tower = VisionTower(tower, dtype, device)
        self.drops_patch = not keep and not tower.class_token  # as transformers does, in place of a class token
        # the published model scales everything that goes into the decoder, encoder rows included
        self.scale = get_text_config(config).get("embedding_multiplier", 1.0)
        assert tower.table is not None
        self.side = tower.table.side  # rows along a side of a tile
        if self.pinpoints:
            self.image_newline = StoredTensor((self.hidden_size,), dtype, device)
            tiling = self.tiling(config, vision["image_size"])
            self.max_patches_per_row = max_patches_per_row(tiling, self.side, self.max_tiles(config))
        self.build_projectors(config)
        unused = (*tower.unbuilt, "head.", "embeddings.position_ids")  # a pooling head; a buffer in old checkpoints
        self.ignored = tuple(f"vision_tower.{name}" for name in unused)

    def decoder(self, config: Mapping[str, Any]) -> DecoderSpec:
        """Read the decoder; the published models ignore the text config's logits_scaling."""
        return decoder_spec(config, stack_of(config, self.text), logit_scale=1.0)

    def feature_layers(self, config: Mapping[str, Any]) -> int | Sequence[int]:
        """Return the numbers of the tower's states that are used; negative ones count from the end."""
        layers: int | Sequence[int] = config.get("vision_feature_layer", self.layer)
        return layers

    def tiling(self, config: Mapping[str, Any], side: int) -> AnyResTiles:
        """Return the tiling of images into tiles of `side` pixels."""
        sizes = tuple((int(h), int(w)) for h, w in config.get("image_grid_pinpoints") or self.pinpoints)
        return AnyResTiles((side, side), (side, side), sizes)

    def max_tiles(self, config: Mapping[str, Any]) -> int | None:
        """Return the number of tiles beyond which an image's rows are pooled; None: never."""
        return None

    def build_projectors(self, config: Mapping[str, Any]) -> None:
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
        """Return projected rows per item, `[tiles, rows of a tile, hidden]`."""
        states, grids = self.tower_states(tensors)
        used = [states[layer] for layer in self.layers]
        rows = self.multi_modal_projector(used[0] if len(used) == 1 else torch.cat(used, 1))
        if self.scale != 1.0:
            rows *= self.scale
        spec = self.vision_tower.spec
        class_rows = int(spec.class_token and spec.keep_class)
        items = rows.split([t * (h * w + class_rows) for t, h, w in grids])
        return [item.view(t, -1, self.hidden_size) for item, (t, _, _) in zip(items, grids, strict=True)]

    def tower_states(self, tensors: Mapping[str, Any]) -> tuple[dict[int, Tensor], list[Grid]]:
        """Return the tower's states by number, `[rows, width]` of all items, and the items' grids."""
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        states = self.vision_tower(tensors["pixel_values"], grids)
        return dict(zip(self.vision_tower.spec.states, states, strict=True)), grids

    def in_lines(self, tiles: Tensor, lines: Sequence[int]) -> Tensor:
        """Return the whole image's rows, then those of its tiles line by line, each line followed by `image_newline`.

        `tiles` `[tiles + 1, side^2, hidden]`, the whole image first, and `lines` (as the family's processor creates them)
        -> `[rows, hidden]`.
        """
        newline = self.image_newline.weight * self.scale
        rows, columns, *kept = lines  # tiles; height and width without padding, and after pooling
        if not rows:
            return torch.cat((tiles[0], newline[None]))
        side = self.side
        plane = tiles[1:].view(rows, columns, side, side, -1).transpose(1, 2).reshape(rows * side, columns * side, -1)
        top, left = (rows * side - kept[0]) // 2, (columns * side - kept[1]) // 2
        plane = plane[top : top + kept[0], left : left + kept[1]]
        if kept[2:] != kept[:2]:
            plane = _resized(plane[None], (kept[2], kept[3]))[0]
        ended = torch.cat((plane, newline.expand(len(plane), 1, -1)), 1)
        return torch.cat((tiles[0], ended.flatten(0, 1)))

    def max_patches(self, modality: str, rows: int) -> int:
        """Return an upper bound of the patches that are encoded for `rows` rows."""
        return math.ceil(rows * self.max_patches_per_row) if self.pinpoints else rows

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.max_patches(modality, rows) * self.vision_tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        patches, projector = self.max_patches(modality, rows), self.multi_modal_projector.spec
        return SMALL + tower_bytes(self.vision_tower.spec, patches, projector, self.dtype, limits)  # SMALL: layouts


class Llava(LlavaBase):
    """LLaVA 1.5: one row per patch of the image."""

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        first = int(self.drops_patch)
        return [tiles[:, first:].flatten(0, 1) for tiles in self.encode(tensors)]


class LlavaNext(LlavaBase):
    """LLaVA-NeXT: the rows of the whole image, then those of its tiles in lines."""

    pinpoints = PINPOINTS_336

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        items = zip(self.encode(tensors), tensors["layout"].tolist(), strict=True)
        return [self.in_lines(tiles, lines) for tiles, lines in items]


class MiniMaxVL(LlavaNext):
    """MiniMax-VL-01: LLaVA-NeXT with the last layer of CLIP and MiniMax-Text-01."""

    text = "minimax"
    layer = -1
    pinpoints = PINPOINTS_MINIMAX


class Mineru2(LlavaNext):
    """MinerU 2.0: the last layer but one of SigLIP, tiles without padding, Qwen2; config.json is the text config.

    SigLIP is the published one of 400 million parameters (`mm_vision_tower`), unless config.json has a vision_config.
    """

    prefixes = (
        ("model.vision_tower.vision_tower.vision_model.", "vision_tower."),
        ("model.vision_tower.vision_tower.", "vision_tower."),
        ("model.mm_projector.0.", "multi_modal_projector.linear_1."),
        ("model.mm_projector.2.", "multi_modal_projector.linear_2."),
        ("model.image_newline", "image_newline"),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )
    vision = {**_SIGLIP, "num_hidden_layers": 27}
    strategy = "full"
    pinpoints = PINPOINTS_384

    def decoder(self, config: Mapping[str, Any]) -> DecoderSpec:
        if config.get("mm_projector_type", "mlp2x_gelu") != "mlp2x_gelu":
            raise ConfigError(
                f"mm_projector_type in config.json is {config['mm_projector_type']!r}; only mlp2x_gelu is supported"
            )
        tower = str(config.get("mm_vision_tower", "siglip-so400m-patch14-384"))
        if "siglip-so400m-patch14-384" not in tower and not config.get("vision_config"):
            raise ConfigError(f"mm_vision_tower in config.json is {tower!r}; only siglip-so400m-patch14-384 is supported")
        return super().decoder({**config, "model_type": "qwen2"})

    def tiling(self, config: Mapping[str, Any], side: int) -> AnyResTiles:
        return stretched_tiles(config, side)[0]

    def max_tiles(self, config: Mapping[str, Any]) -> int | None:
        return stretched_tiles(config, 1)[1]


class LlavaOnevision(LlavaBase):
    """LLaVA-OneVision: images of many tiles are pooled; each frame of a video is pooled, and one newline row ends the video."""

    vision = _SIGLIP
    text = "qwen2"
    layer = -1
    strategy = "full"
    pinpoints = PINPOINTS_384

    def max_tiles(self, config: Mapping[str, Any]) -> int | None:
        return int(str(config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality == "image":
            items = zip(self.encode(tensors), tensors["layout"].tolist(), strict=True)
            return [self.in_lines(tiles, lines) for tiles, lines in items]
        side, newline = math.ceil(self.side / POOL_STRIDE), self.image_newline.weight[None] * self.scale
        videos = (frames.unflatten(1, (self.side, self.side)) for frames in self.encode(tensors))
        return [torch.cat((_resized(frames, (side, side)).flatten(0, 2), newline)) for frames in videos]

    def max_patches(self, modality: str, rows: int) -> int:
        if modality == "image":
            return super().max_patches(modality, rows)
        return rows * self.side**2 // math.ceil(self.side / POOL_STRIDE) ** 2


def _feature_layers(layers: int | Sequence[int], depth: int) -> tuple[int, ...]:
    """Return the numbers of tower states (0: before the first layer); ConfigError for a layer that the tower does not have."""
    several = [layers] if isinstance(layers, int) else list(layers)
    numbers = tuple(depth + 1 + layer if layer < 0 else layer for layer in several)
    if not numbers or any(not 0 <= layer <= depth for layer in numbers):
        raise ConfigError(f"vision_feature_layer {layers} is not a layer of the tower, which has {depth}")
    return numbers


def _resized(planes: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize `[n, h, w, hidden]` bilinearly, without antialiasing."""
    return F.interpolate(planes.permute(0, 3, 1, 2), size, mode="bilinear").permute(0, 2, 3, 1)
