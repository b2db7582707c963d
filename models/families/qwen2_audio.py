"""Qwen2-Audio: rows of a Whisper encoder, averaged by two and projected, take the place of placeholders in a plain decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..mm.errors import ConfigError
from .activations import mel_encoder_bytes
from .audio.mel_encoder import LARGE, Encoder, encoder_config
from .config import decoder_spec, need
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.linear import Linear
from .text.stacks import STACKS


class Qwen2Audio(DecoderModel):
    """See `DecoderModel`."""

    prefixes = (
        ("model.audio_tower.", "audio_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        *TEXT_PREFIXES,
    )

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if not isinstance(need(config, "text_config"), Mapping) or not isinstance(need(config, "audio_config"), Mapping):
            raise ConfigError("text_config and audio_config in config.json must be objects")
        super().__init__(decoder_spec(config, STACKS["qwen2"], tied=False), dtype, device)  # this family never ties its head
        audio = encoder_config({**LARGE, **config["audio_config"]})
        self.audio_tower = Encoder(audio, dtype, device, pool=2)
        projector = Linear(audio.width, {"linear": self.hidden_size}, True, dtype, device)
        self.multi_modal_projector = nn.ModuleDict({"linear": projector})

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        rows = self.audio_tower(tensors["input_features"], tensors["audio_frames"].tolist())
        projected = self.multi_modal_projector["linear"](torch.cat(rows))
        return list(projected.split([len(one) for one in rows]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return _frames(rows) * self.audio_tower.config.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        tower = self.audio_tower
        return mel_encoder_bytes(tower.config, _frames(rows), self.hidden_size, self.dtype, work)


def _frames(rows: int) -> int:
    """The second convolution and the average halve them; up to three are left over and two lie in the silence behind."""
    return 4 * rows + 5
