"""DeepSeek-VL2 (arXiv 2412.10302): SigLIP over tiles, squares of patches projected, lines ended by a learned row, experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import get_text_config, positive_int
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.builder import StoredTensor
from ...layers.connectors import Projector, ProjectorSpec, in_lines, projector_bytes, squares
from ...text.decoder_config import decoder_spec
from ...text.stack import Stack
from ...text.stacks import STACKS
from ...vision.spec import TableSpec, TowerNames, TowerSpec
from ...vision.vit import VisionTower, tower_bytes

_VISION: Mapping[str, Any] = {
    "image_size": 384, "patch_size": 16, "width": 1024, "layers": 24, "heads": 16, "mlp_ratio": 4,
}  # fmt: skip
_PROJECTOR: Mapping[str, Any] = {
    "projector_type": "downsample_mlp_gelu", "depth": 2, "mlp_ratio": 1, "downsample_ratio": 2, "token_pooling": False,
}  # fmt: skip


class DeepseekVL2(DecoderModel):
    """A model of images: the whole image and tiles of it, padded, as lines of rows with a separator between them."""

    prefixes = (
        ("vision.", "tower."),
        ("projector.layers.", "projector."),
        ("language.lm_head.", "head.lm_head."),
        ("language.model.", "language_model."),
    )
    ignored = ("tower.attn_pool.",)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text = dict(get_text_config(config))
        if text.get("use_mla") is False:
            text["kv_lora_rank"] = None
        super().__init__(decoder_spec({**config, "language_config": text}, _stack(text)), dtype, device)
        c = {**_PROJECTOR, **(config.get("projector_config") or {})}
        if (c["projector_type"], config.get("tile_tag", "2D"), c["token_pooling"]) != ("downsample_mlp_gelu", "2D", False):
            raise ConfigError(
                "projector_type must be downsample_mlp_gelu without token_pooling, and tile_tag 2D, in config.json"
            )
        self.whole_first = config.get("global_view_pos", "head") == "head"
        tower, self.merge = _tower({**_VISION, **(config.get("vision_config") or {})}), positive_int(c, "downsample_ratio")
        self.tower = VisionTower(tower, dtype, device)
        assert tower.table is not None
        self.patches, self.side = tower.table.side, -(-tower.table.side // self.merge)  # along a side of a tile; rows
        layers = tuple(str(2 * i) for i in range(positive_int(c, "depth")))
        inner = self.hidden_size * positive_int(c, "mlp_ratio")
        spec = ProjectorSpec(tower.width, self.hidden_size, layers, self.merge**2, inner, channels_first=True)
        self.projector = Projector(spec, dtype, device)
        self.image_newline = StoredTensor((self.hidden_size,), dtype, device)
        self.view_seperator = StoredTensor((self.hidden_size,), dtype, device)  # so spelled in every checkpoint
        image = (config.get("vision_config") or _VISION).get("image_size", 384)
        sizes = [(tall // image, wide // image) for wide, tall in config.get("candidate_resolutions") or ((image, image),)]
        ratios = [(1 + tall * wide) * self.patches**2 / self.num_rows(tall, wide) for tall, wide in (*sizes, (1, 1))]
        self.max_patches_per_row: float = max(ratios)

    def num_rows(self, tall: int, wide: int) -> int:
        """Return the rows of an image of `tall` x `wide` tiles."""
        return self.side * (self.side + 1) + 1 + tall * self.side * (wide * self.side + 1)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `tiles`: int64 `[items, 2]`, the rows and columns of tiles, which follow the whole image."""
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        state, padding = self.tower(tensors["pixel_values"], grids)[-1], -self.patches % self.merge
        planes = F.pad(state.view(-1, self.patches, self.patches, state.shape[1]), (0, 0, 0, padding, 0, padding))
        grid = (len(planes), planes.shape[1], planes.shape[2])
        encoded = self.projector(squares(planes.flatten(0, 2), [grid], self.merge)).view(len(planes), self.side, self.side, -1)
        items = zip(encoded.split([t for t, _, _ in grids]), tensors["tiles"].tolist(), strict=True)
        return [self.in_lines(tiles, tall, wide) for tiles, (tall, wide) in items]

    def in_lines(self, tiles: Tensor, tall: int, wide: int) -> Tensor:
        """Return the rows of the whole image and of its tiles line by line, with the separator between them."""
        plane = tiles[1:].view(tall, wide, self.side, self.side, -1).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        whole, cut = (in_lines(lines, self.image_newline.weight) for lines in (tiles[0], plane))
        first, last = (whole, cut) if self.whole_first else (cut, whole)
        return torch.cat((first, self.view_seperator.weight[None], last))

    def input_bytes(self, modality: str, rows: int) -> int:
        return math.ceil(rows * self.max_patches_per_row) * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        patches, tower, size = math.ceil(rows * self.max_patches_per_row), self.tower.spec, self.dtype.itemsize
        padded = math.ceil(patches * (self.side * self.merge / self.patches) ** 2)
        after = patches * (tower.patch_dim + tower.width) * size + 2 * rows * self.hidden_size * size
        after += padded * (tower.width * size + projector_bytes(self.projector.spec, 1, padded, self.dtype, limits))
        return max(tower_bytes(tower, patches, None, self.dtype, limits), after)


def _stack(text: Mapping[str, Any]) -> Stack:
    """Return the decoder's stack: with latent attention or without, and with a bias of the router or without."""
    stack = STACKS["deepseek_v2"]
    if text.get("topk_method") == "noaux_tc":
        stack = replace(stack, router={"correction": True})
    return stack if text.get("kv_lora_rank", 512) else replace(stack, interleaved=False)


def _tower(vision: Mapping[str, Any]) -> TowerSpec:
    width, patch = positive_int(vision, "width"), positive_int(vision, "patch_size")
    return TowerSpec(
        depth=positive_int(vision, "layers"),
        width=width,
        heads=positive_int(vision, "heads"),
        inner=int(width * vision["mlp_ratio"]),
        patch_dim=3 * patch**2,
        act="gelu_pytorch_tanh",
        table=TableSpec(positive_int(vision, "image_size") // patch),
        post_norm=True,
        names=TowerNames(table="pos_embed", post_norm="norm"),
    )
