"""Phi-3-vision and Phi-3.5-vision (arXiv 2404.14219): CLIP over padded tiles and the whole image, squares in lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.builder import StoredTensor
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes, squares, tiles_in_lines
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...tower_model import feature_states
from ...vision.encoders import encoder_spec
from ...vision.vit import VisionTower, tower_bytes

VISION: Mapping[str, Any] = {  # openai/clip-vit-large-patch14-336
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 336,
    "patch_size": 14, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5,
}  # fmt: skip
_ENCODER = "clip_vision_model"
_EMBED = "model.vision_embed_tokens."
_MERGE = 2  # patches along a side of a square
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "embd_layer": {"use_hd_transform": True, "with_learnable_separator": True, "hd_transform_order": "sub_glb"},
    "img_processor": {"name": _ENCODER, "type_feature": "patch"},
}


class Phi3V(DecoderModel):
    """A model of images."""

    prefixes = (
        (f"{_EMBED}img_processor.vision_model.", "tower."),
        (f"{_EMBED}img_projection.0.", "projector.up."),
        (f"{_EMBED}img_projection.2.", "projector.down."),
        (f"{_EMBED}glb_GN", "separator"),
        (f"{_EMBED}sub_GN", "line_end"),
        ("model.", "language_model."),
        ("lm_head.", "head.lm_head."),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, STACKS["phi3"]), dtype, device)
        for section, values in _FIXED.items():
            for key, value in values.items():
                if (config.get(section) or {}).get(key, value) != value:
                    raise ConfigError(
                        f"{key} of {section} is {config[section][key]!r} in config.json; only {value!r} is supported"
                    )
        vision = {**VISION, **(config.get("vision_config") or {}), "model_type": _ENCODER}
        layer = (config.get("img_processor") or {}).get("layer_idx", -2)
        tower = encoder_spec(vision, _ENCODER, features=feature_states(layer, vision["num_hidden_layers"]))
        assert tower.table is not None
        self.side = tower.table.side // _MERGE  # rows along a side of a tile
        if tower.table.side % _MERGE:
            raise ConfigError("image_size of vision_config must be an even number of patches of patch_size pixels")
        self.tower = VisionTower(tower, dtype, device)
        width = _MERGE**2 * tower.width
        spec = ProjectorSpec(width, self.hidden_size, ("up", "down"), inner=self.hidden_size)
        self.projector = Projector(spec, dtype, device)
        self.separator, self.line_end = (StoredTensor((width,), dtype, device) for _ in range(2))
        self.ignored = tuple(f"tower.{name}" for name in tower.unbuilt)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode items. `layout` int64 `[items, 2]`: rows and columns of tiles, which follow the whole image."""
        layouts, full = tensors["layout"].tolist(), _MERGE * self.side
        counts = [1 + rows * columns for rows, columns in layouts]
        grid = (sum(counts), full, full)
        state = self.tower(tensors["pixel_values"], [grid])[-1]
        planes = squares(state, [grid], _MERGE).view(sum(counts), self.side, self.side, -1)
        del state
        items = zip(planes.split(counts), layouts, strict=True)
        lines = [tiles_in_lines(tiles, columns, self.line_end.weight, self.separator.weight) for tiles, (_, columns) in items]
        sizes, joined = [len(item) for item in lines], torch.cat(lines)
        del planes, lines, items
        return list(self.projector(joined).split(sizes))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * _MERGE**2 * self.tower.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        tower, size, patches = self.tower.spec, self.dtype.itemsize, rows * _MERGE**2
        joined = patches * tower.patch_dim * size + 3 * rows * self.projector.spec.width * size
        after = self.input_bytes(modality, rows) + rows * projector_bytes(self.projector.spec, 1, rows, self.dtype, limits)
        return max(tower_bytes(tower, patches, None, self.dtype, limits), joined, after)
