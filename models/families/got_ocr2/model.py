"""GOT-OCR2 (arXiv 2409.01704): SAM's tower on images or tiles of one size, two convolutions, a linear layer, a decoder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...vision.sam import SamTower, convolved_names, sam_bytes, sam_spec

_TEXT = {
    "vocab_size": 151860, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "max_position_embeddings": 32768, "rope_theta": 1e6,
}  # fmt: skip
_NORM = re.compile(r"(?<=vision_tower\.layers\.)(\d+)\.layer_norm(?=[12]\.)")


class GotOcr2(DecoderModel):
    """A model of images. Each is encoded on its own, tile by tile, to 256 rows a tile; also the publisher's own layout."""

    prefixes = (
        *((old, f"sam.{new}") for old, new in convolved_names("model.vision_tower.")),
        *((old, f"sam.{new}") for old, new in convolved_names("vision_tower.")),
        ("model.vision_tower.layers.", "sam.blocks."),
        ("vision_tower.layers.", "sam.blocks."),
        ("model.vision_tower.", "sam."),
        ("vision_tower.", "sam."),
        *(
            (f"{root}multi_modal_projector.{old}", new)
            for root in ("model.", "")
            for old, new in (("conv_upsampler1.", "sam.net_2."), ("conv_upsampler2.", "sam.net_3."), ("", "projector."))
        ),
        ("model.vision_tower_high.", "sam."),  # the publisher's names
        ("model.mm_projector_vary.", "projector.multimodal_projector."),
        *TEXT_PREFIXES,
        ("model.", "language_model."),
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if config.get("model_type") == "got_ocr2":
            config = {"tie_word_embeddings": True, **config, "text_config": config.get("text_config") or _TEXT}
        stack = stack_of({"text_config": config.get("text_config") or {}}, "qwen2")  # the publisher's model_type is its own
        super().__init__(decoder_spec(config, stack), dtype, device)
        vision = {"mlp_dim": 3072, **(config.get("vision_config") or {})}
        channels = positive_int({"output_channels": 256, **vision}, "output_channels")
        self.sam = SamTower(sam_spec(vision, (2 * channels, self.hidden_size)), dtype, device)
        self.projector = Projector(ProjectorSpec(self.hidden_size, self.hidden_size, ("multimodal_projector",)), dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return ((_NORM.sub(r"\1.norm", name), tensor) for name, tensor in weights)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Encode one tile at a time, so that the bits do not depend on the batch."""
        grids = tensors["grid"].tolist()
        tiles = iter(tensors["pixel_values"].split([h * w for t, h, w in grids for _ in range(t)]))
        return [torch.cat([self.projector(self.sam(next(tiles), h)) for _ in range(t)]) for t, h, _ in grids]

    def input_bytes(self, modality: str, rows: int) -> int:
        spec = self.sam.spec
        return rows * spec.downsampling**2 * spec.tower.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the bytes of one tile, of the inputs and of the result, which is joined at its end."""
        spec, item = self.sam.spec, self.hidden_size * self.dtype.itemsize
        assert spec.tower.table is not None
        patches = spec.tower.table.side**2
        tile = patches // spec.downsampling**2
        last = tile * projector_bytes(self.projector.spec, 1, tile, self.dtype, limits)
        running = rows * item + max(sam_bytes(spec, patches, self.dtype, limits), last)
        return self.input_bytes(modality, rows) + max(running, 2 * rows * item)
