"""Voxtral (arXiv 2507.13264): a Whisper encoder over windows of 30 s, four rows joined to one, a Llama-like decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.consolidated import hub_names
from ...audio.mel_encoder import MelEncoderSpec, mel_encoder_spec, sinusoids
from ...decoder_model import TEXT_PREFIXES
from ...layers.connectors import ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.spec import DecoderSpec
from ...text.stacks import STACKS
from ...window_model import AUDIO_PREFIXES, WindowModel, config_sections, joined_projector

# defaults that the published config.json leaves out
TEXT = {
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e8,
}  # fmt: skip
_PREFIXES = (*AUDIO_PREFIXES, *TEXT_PREFIXES)


class Voxtral(WindowModel):
    """Voxtral in the Hub's layout."""

    prefixes = _PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*_specs(config, interleaved=False), dtype, device)


class VoxtralConsolidated(WindowModel):
    """Voxtral in its publisher's own layout: rotated pairs are adjacent numbers, the encoder's positions are not stored."""

    prefixes = _PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(*_specs(config, interleaved=True), dtype, device)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        audio = self.audio_tower.config
        table = ("model.audio_tower.embed_positions.weight", sinusoids(audio.positions, audio.width))
        return chain(hub_names(weights), [table])


def _specs(config: Mapping[str, Any], interleaved: bool) -> tuple[DecoderSpec, MelEncoderSpec, ProjectorSpec]:
    text, audio = config_sections(config, TEXT)
    tower = mel_encoder_spec(audio)
    decoder = decoder_spec({**config, "text_config": text}, replace(STACKS["llama"], interleaved=interleaved), tied=False)
    return decoder, tower, joined_projector(config, tower, decoder.hidden_size, decoder.hidden_size, bias=False)
