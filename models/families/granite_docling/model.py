"""Granite Docling (500M): SigLIP on tiles, squares of 4 x 4 patches merged, earlier states added to the decoder (deepstack).

Source: the modelling file of transformers 5.23. Granite-Docling-258M and SmolDocling are Idefics3 models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ....kernels.activation import activation
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.encoders import encoder_spec
from ...vision.vit import VisionTower, tower_bytes

_TEXT = {
    "vocab_size": 133800, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "embedding_multiplier": 12.0, "logits_scaling": 4.0, "residual_multiplier": 0.263, "attention_multiplier": 0.015625,
}  # fmt: skip
_STACK = replace(STACKS["granite"], defaults={**STACKS["granite"].defaults, **_TEXT})
_VISION = {"image_size": 512, "patch_size": 16, "scale_factor": 4, "deepstack_visual_indexes": (3, 7, 10)}
_CONNECTOR = "model.vision_model.connector."


class TileConnector(Projector):
    """Projects squares of patches, adds sinusoidal positions within the tile, and projects again between norms."""

    def __init__(self, spec: ProjectorSpec, side: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        build, width = Builder(self, dtype, device), spec.out
        self.places = _sinusoids(side, width).to(dtype).to(device)
        self.parts = (  # in a tuple: their only names are the checkpoint's
            build.norm("ln_mid", width, spec.eps, True),
            build.linear(["mlp_fc2"], width, [width], False),
            build.norm("ln_out", width, spec.eps, True),
        )

    def forward(self, x: Tensor) -> Tensor:
        middle, last, norm = self.parts
        rows = super().forward(x)
        rows.view(-1, *self.places.shape).add_(self.places)
        return norm(last(activation("gelu", middle(rows))))


class GraniteDocling(DecoderModel):
    """A model of images. Its fine path (four times the rows) and the router that selects it are not used."""

    prefixes = (
        (f"{_CONNECTOR}coarse.deepstack_mergers.", "deepstack_mergers."),
        (_CONNECTOR, "connector."),
        ("model.vision_model.", "tower."),
        ("model.density_router.", "density_router."),
        ("model.text_model.", "language_model."),
        *TEXT_PREFIXES,
    )
    ignored = ("connector.fine.", "density_router.")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **(config.get("vision_config") or {}), "model_type": "siglip_vision_model"}
        layers = tuple(vision["deepstack_visual_indexes"])
        depth = positive_int({"num_hidden_layers": 12, **vision}, "num_hidden_layers")
        if list(layers) != sorted(set(layers)) or any(not 0 <= layer < depth - 1 for layer in layers):
            raise ConfigError(f"deepstack_visual_indexes {list(layers)} must be ascending layers before the last of {depth}")
        super().__init__(decoder_spec(config, _STACK, deepstack=tuple(range(len(layers)))), dtype, device)
        merge = positive_int(vision, "scale_factor")
        features = (*(layer + 1 for layer in layers), depth)
        tower = encoder_spec(vision, "siglip_vision_model", merge=merge, post_norm=True, features=features)
        assert tower.table is not None
        if tower.table.side % merge:
            raise ConfigError(f"tiles of {tower.table.side} patches a side have no squares of {merge}; change scale_factor")
        first = ProjectorSpec(tower.width, self.hidden_size, ("coarse.projection",), merge**2, bias=False, norm="ln_in")
        level = replace(first, layers=("linear_1", "linear_2"), inner=first.out, bias=True, norm="layer_norm", joined_norm=True)
        self.tower = VisionTower(tower, dtype, device)
        self.connector = TileConnector(first, tower.table.side // merge, dtype, device)
        self.deepstack_mergers = nn.ModuleList(Projector(level, dtype, device) for _ in layers)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Return rows scaled like token embeddings, each with its deepstack levels."""
        grids = [(int(t), int(h), int(w)) for t, h, w in tensors["grid"].tolist()]
        *states, last = self.tower(tensors["pixel_values"], grids)
        levels = [merger(state) for merger, state in zip(self.deepstack_mergers, states, strict=True)]
        rows = torch.cat([self.connector(last) * self.spec.embed_scale, *levels], 1)
        return list(rows.split([t * h * w // self.connector.spec.group for t, h, w in grids]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.connector.spec.group * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        tower, spec, size = self.tower.spec, self.connector.spec, self.dtype.itemsize
        patches, levels, level_bytes = rows * spec.group, len(self.deepstack_mergers), rows * self.hidden_size * size
        peak = tower_bytes(tower, patches, spec, self.dtype, limits)
        base = patches * (tower.patch_dim + (1 + levels) * tower.width) * size  # pixels, states
        level: Any = self.deepstack_mergers[0] if levels else self.connector
        projection = patches * (projector_bytes(level.spec, 1, patches, self.dtype, limits) - tower.width * size)
        # the last projection beside the other levels, or all levels and their concatenation
        return max(peak, base + max(levels * level_bytes + projection, 2 * (1 + levels) * level_bytes))


def _sinusoids(side: int, width: int) -> Tensor:
    """Return fixed positions `[side^2, width]`, row by row: sines and cosines of the column, then of the row."""
    frequencies = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    rows, columns = torch.meshgrid(*[torch.arange(side, dtype=torch.float64)] * 2, indexing="ij")
    angles = [axis.flatten().outer(frequencies) for axis in (columns, rows)]
    return torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], 1).float()
