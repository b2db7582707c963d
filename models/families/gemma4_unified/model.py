"""Gemma 4 Unified: patches and frames of samples, projected without an encoder, and a Gemma 4 decoder."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...memory_formulas import SMALL, OpBytes
from ...native_model import TENSORS
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...vision.positions import Grid, plan_layout
from ..gemma4.model import RowProjection

VISION: Mapping[str, Any] = {
    "patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120, "rms_norm_eps": 1e-6,
}  # fmt: skip
AUDIO: Mapping[str, Any] = {"audio_embed_dim": 640, "rms_norm_eps": 1e-6}
_EPS = 1e-5  # of the LayerNorms, which config.json does not name


@dataclass(frozen=True)
class PatchRowsSpec:
    """Parameters of PatchRows. `side`: pixels along a side of a patch; `positions`: entries of the table along each axis."""

    side: int
    width: int
    positions: int

    @property
    def patch_dim(self) -> int:
        return 3 * self.side**2


class PatchRows(TensorModule):
    """`[patches, patch_dim]` of items -> `[patches, width]`: a projection between norms, learned positions, a norm."""

    def __init__(self, spec: PatchRowsSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.spec, self.dtype, self.device, build = spec, dtype, device, Builder(self, dtype, device)
        self.first_norm = (build.norm("patch_ln1", spec.patch_dim, _EPS, True),)
        self.projection = (build.linear(["patch_dense"], spec.patch_dim, [spec.width], True),)
        self.norms = [build.norm(name, spec.width, _EPS, True) for name in ("patch_ln2", "pos_norm")]
        self.table = (build.stored("pos_embedding", spec.positions, 2, spec.width),)

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        layout, table = plan_layout(grids, 1, 0), self.table[0].weight.flatten(0, 1)  # a column's position, then a row's
        after, last = self.norms
        x = after(self.projection[0](self.first_norm[0](patches.to(self.dtype))))
        columns, rows = (2 * layout.w).to(self.device), (2 * layout.h + 1).to(self.device)
        x.add_(table.index_select(0, columns).add_(table.index_select(0, rows)))
        return last(x)


class Gemma4Unified(DecoderModel):
    """A model of images, videos and audio. A checkpoint may lack the projection of images and videos, or that of audio."""

    prefixes = (
        ("model.vision_embedder.", "visual."),
        ("model.embed_vision.multimodal_embedder.", "embed_vision."),
        ("model.embed_vision.embedding_projection.", "embed_vision.embedding_projection."),
        ("model.embed_vision.", "visual."),
        ("model.embed_audio.", "embed_audio."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(decoder_spec(config, STACKS["gemma4_unified_text"]), dtype, device)
        vision, audio = config.get("vision_config"), config.get("audio_config")
        self.visual: PatchRows | None = None
        self.embed_audio: RowProjection | None = None
        self.samples = 0
        if vision is not None:
            vision = {**VISION, **vision}
            side = positive_int(vision, "patch_size") * positive_int(vision, "pooling_kernel_size")
            spec = PatchRowsSpec(side, positive_int(vision, "mm_embed_dim"), positive_int(vision, "mm_posemb_size"))
            self.visual = PatchRows(spec, dtype, device)
            self.embed_vision = RowProjection(spec.width, vision["rms_norm_eps"], self.hidden_size, dtype, device)
        if audio is not None:
            audio = {**AUDIO, **audio}
            self.samples = positive_int(audio, "audio_embed_dim")
            self.embed_audio = RowProjection(self.samples, audio["rms_norm_eps"], self.hidden_size, dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Bring the numbers of a patch into the order channel, row, column."""
        for name, tensor in weights:
            if ".patch_ln1." in name or name.endswith(".patch_dense.weight"):
                side = round((tensor.shape[-1] / 3) ** 0.5)
                tensor = tensor.unflatten(-1, (side, side, 3)).movedim(-1, -3).flatten(-3)
            yield name, tensor

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        if modality == "audio":
            assert self.embed_audio is not None
            return list(self.embed_audio(tensors["input_features"]).split(tensors["audio_frames"].tolist()))
        assert self.visual is not None
        pixels, grid = (tensors[name] for name in TENSORS[modality])
        grids = [(int(t), int(h), int(w)) for t, h, w in grid.tolist()]
        return list(self.embed_vision(self.visual(pixels, grids)).split([t * h * w for t, h, w in grids]))

    def keep_encoders(self, modalities: Collection[str]) -> None:
        super().keep_encoders(modalities)
        if self.embed_audio is not None and "audio" not in modalities:
            self._remove("embed_audio")
        if self.visual is not None and not {*modalities} - {"audio"}:
            self._remove("visual", "embed_vision")

    def input_bytes(self, modality: str, rows: int) -> int:
        if modality == "audio":
            return rows * self.samples * self.dtype.itemsize
        assert self.visual is not None
        return rows * self.visual.spec.patch_dim * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        """Return the bytes alive while rows are normed and projected; in a patch's row, also while it gets its position."""
        ops, out, inputs = OpBytes(self.dtype, limits), self.hidden_size, self.input_bytes(modality, rows)
        if modality == "audio":
            return SMALL + inputs + rows * (ops.norm(self.samples, True) + ops.linear(self.samples, out, rows))
        assert self.visual is not None
        c, row = self.visual.spec, self.visual.spec.width * self.dtype.itemsize
        first = ops.norm(c.patch_dim, False) + ops.linear(c.patch_dim, c.width, rows)
        placed = ops.linear_result(c.width, rows) + ops.norm(c.width, False) + row
        last = row + ops.norm(c.width, True) + ops.linear(c.width, out, rows)
        return SMALL + inputs + rows * (2 * 8 * 2 + max(first, placed, 3 * row, last))
