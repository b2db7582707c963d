"""Qwen2-Audio (arXiv 2407.10759): a Whisper encoder whose rows are averaged in pairs, one linear projection, Qwen2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import require
from ...audio.mel_encoder import LARGE, MelEncoder, mel_encoder_bytes, mel_encoder_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS


class Qwen2Audio(DecoderModel):
    """A model of audio of at most 30 s per item."""

    prefixes = (
        ("model.audio_tower.", "audio_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if not isinstance(require(config, "text_config"), Mapping) or not isinstance(require(config, "audio_config"), Mapping):
            raise ConfigError("text_config and audio_config in config.json must be objects")
        # the head of this family is never tied
        super().__init__(decoder_spec(config, STACKS["qwen2"], tied=False), dtype, device)
        audio = mel_encoder_spec({**LARGE, **config["audio_config"]})
        self.audio_tower = MelEncoder(audio, dtype, device, pool=2)
        self.multi_modal_projector = Projector(ProjectorSpec(audio.width, self.hidden_size, ("linear",)), dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        rows = self.audio_tower(tensors["input_features"], tensors["audio_frames"].tolist())
        projected = self.multi_modal_projector(torch.cat(rows))
        return list(projected.split([len(item) for item in rows]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return _max_frames(rows) * self.audio_tower.config.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        tower = self.audio_tower
        return mel_encoder_bytes(tower.config, _max_frames(rows), self.hidden_size, self.dtype, limits)


def _max_frames(rows: int) -> int:
    """Return the most frames of `rows` rows: they are divided by 4, up to 3 are dropped, and 2 frames of silence are read."""
    return 4 * rows + 5
