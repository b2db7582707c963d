"""MiDashengLM (arXiv 2508.03983): the Dasheng encoder, groups of five rows projected, Qwen2.5-Omni's decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int
from ...audio.dasheng import DashengEncoder, dasheng_bytes, dasheng_spec
from ...decoder_model import DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec
from ...text.decoder_config import decoder_spec
from ..qwen2_5_omni.model import TEXT
from ..qwen2_vl.model import STACK


class MiDashengLM(DecoderModel):
    """A model of audio. If positions have several axes, an item advances on all of them."""

    prefixes = (
        ("audio_encoder.blocks.", "audio_encoder.tower.blocks."),
        ("audio_encoder.norm.", "audio_encoder.tower.norm."),
        ("decoder.model.", "language_model."),
        ("decoder.lm_head.", "head.lm_head."),
    )
    ignored = ("audio_encoder.front_end.", "audio_encoder.init_bn.num_batches_tracked")

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, audio = config.get("text_config") or {}, config.get("audio_encoder_config") or {}
        super().__init__(decoder_spec({**config, "text_config": {**TEXT, **text}}, STACK), dtype, device)
        spec = dasheng_spec(audio)
        self.audio_encoder = DashengEncoder(spec, dtype, device)
        group, width = positive_int({"subsample_factor": 5, **config}, "subsample_factor"), self.hidden_size
        projector = ProjectorSpec(spec.tower.width, width, ("net.0", "net.2"), group=group, inner=width)
        self.audio_projector = Projector(projector, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        frames, spec = tensors["audio_frames"].tolist(), self.audio_encoder.spec
        group, patches = self.audio_projector.spec.group, [count // spec.patch for count in frames]
        items = self.audio_encoder(tensors["input_features"], frames).split(patches)
        whole = torch.cat([rows[: len(rows) // group * group] for rows in items])
        del items
        return list(self.audio_projector(whole).split([count // group for count in patches]))

    def _max_frames(self, rows: int) -> int:
        """Return the most frames of an item of `rows` rows: all but one frame of the next row are dropped later."""
        return (rows + 1) * self.audio_projector.spec.group * self.audio_encoder.spec.patch - 1

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._max_frames(rows) * self.audio_encoder.spec.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        spec, projector = self.audio_encoder.spec, self.audio_projector.spec
        return dasheng_bytes(spec, self._max_frames(rows), projector, self.dtype, limits)
