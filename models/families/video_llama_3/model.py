"""VideoLLaMA3 (arXiv 2501.13106): SigLIP with rotary positions, rows of frames averaged in squares, two layers, Qwen2.

Source: the class of transformers 5.23. Its bilinear resampling to half the size is the average of 2 x 2 rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int, require
from ...decoder_model import TEXT_PREFIXES
from ...interface import StepLimits
from ...layers.connectors import ProjectorSpec, projector_bytes, squares
from ...native_model import TENSORS, NativeModel, axial_theta
from ...text.decoder_config import decoder_spec
from ...text.stacks import stack_of
from ...vision.spec import ENCODER, RotarySpec, TowerSpec
from ...vision.vit import tower_bytes
from .config import MAX_RATIO, MERGES

_VISION: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6,
}  # fmt: skip
_GROUP = 1 << 14  # patches that the tower encodes together, if no frame has more

Grid = tuple[int, int, int]


class VideoLlama3(NativeModel):
    """A model of images and videos. Its rows have positions of one axis."""

    prefixes = (
        ("model.vision_model.", "visual."),
        ("model.projector.readout.", "merger."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        vision = {**_VISION, **require(config, "vision_config")}
        tied = config.get("tie_word_embeddings") or (config.get("text_config") or {}).get("tie_word_embeddings", False)
        decoder = decoder_spec({**config, "tie_word_embeddings": tied}, stack_of(config, "qwen2"))
        tower = TowerSpec(
            depth=positive_int(vision, "num_hidden_layers"),
            width=positive_int(vision, "hidden_size"),
            heads=positive_int(vision, "num_attention_heads"),
            inner=positive_int(vision, "intermediate_size"),
            patch_dim=3 * positive_int(vision, "patch_size") ** 2,
            act=vision["hidden_act"],
            eps=vision["layer_norm_eps"],
            rotary=RotarySpec(axial_theta(vision)),
            post_norm=True,
            names=ENCODER,
        )
        merger = ProjectorSpec(tower.width, decoder.hidden_size, ("0", "2"), inner=decoder.hidden_size)
        super().__init__(decoder, tower, (merger,), dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Read the tensors of NativeModel; those of videos have `kept_rows` (numbers of rows of the item), too."""
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids, merge = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()], MERGES[modality]
        frames = [(1, h, w) for t, h, w in grids for _ in range(t)]
        parts = [self._averaged(part, group, merge) for part, group in _in_groups(pixels, frames)]
        rows, counts = parts[0] if len(parts) == 1 else torch.cat(parts), [t * h * w // merge**2 for t, h, w in grids]
        del parts
        if modality == "video":
            items, counts = rows.split(counts), tensors["num_kept"].tolist()
            kept = tensors["kept_rows"].split(counts)
            rows = torch.cat([item.index_select(0, index) for item, index in zip(items, kept, strict=True)])
            del items
        return list(self.merger(rows).split(counts))

    def _averaged(self, pixels: Tensor, frames: Sequence[Grid], merge: int) -> Tensor:
        """Encode frames, and average their rows in squares of merge x merge."""
        rows = self.visual(pixels, frames)[-1]
        return rows if merge == 1 else squares(rows, frames, merge).view(-1, merge**2, rows.shape[1]).mean(1)

    def _all_rows(self, modality: str, rows: int) -> int:
        """Return the most rows that items have before compression."""
        return rows * (MAX_RATIO if modality == "video" else 1)

    def input_bytes(self, modality: str, rows: int) -> int:
        patches = self._all_rows(modality, rows) * MERGES[modality] ** 2
        return patches * self.visual.spec.patch_dim * self.dtype.itemsize + rows * 8 * (modality == "video")

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        if modality == "image" and rows <= _GROUP:
            return super().encoder_bytes(modality, rows, limits)
        tower, merger, size, squared = self.visual.spec, self.merger.spec, self.dtype.itemsize, MERGES[modality] ** 2
        every = self._all_rows(modality, rows)
        group = min(every * squared, max(_GROUP, rows * squared))
        encoded = every * tower.width * size
        encoding = tower_bytes(tower, group, None, self.dtype, limits) - group * tower.patch_dim * size
        averaging = 2 * group * tower.width * size
        kept = rows * (tower.width * size + projector_bytes(merger, 1, rows, self.dtype, limits))
        return self.input_bytes(modality, rows) + encoded + max(encoding, averaging, encoded, kept)


def _in_groups(pixels: Tensor, frames: Sequence[Grid]) -> Iterator[tuple[Tensor, list[Grid]]]:
    """Yield the patches of frames in groups of at most _GROUP patches, or of one frame, and the grids of each group."""
    start = used = 0
    group = list[Grid]()
    for frame in frames:
        patches = frame[1] * frame[2]
        if group and used + patches > _GROUP:
            yield pixels[start : start + used], group
            start, used, group = start + used, 0, []
        used, group = used + patches, [*group, frame]
    yield pixels[start : start + used], group
