"""Voxtral: rows of an encoder of log-mel frames, joined by four and projected, take the place of placeholders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from .audio.mel_encoder import encoder_config, sinusoids
from .config import decoder_spec
from .consolidated import hub_names
from .decoder_model import TEXT_PREFIXES
from .text.stacks import STACKS
from .window_model import AUDIO_PREFIXES, WindowModel, joining, sections

AUDIO = {  # what the published config.json leaves out
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "max_source_positions": 1500,
    "num_mel_bins": 128,
}
TEXT = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e8,
}


class Voxtral(WindowModel):
    """See `DecoderModel`."""

    prefixes = (*AUDIO_PREFIXES, *TEXT_PREFIXES)
    neighbours: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, audio = sections(config, TEXT, AUDIO)
        stack, tower = replace(STACKS["llama"], neighbours=self.neighbours), encoder_config(audio)
        decoder = decoder_spec({**config, "text_config": text}, stack, tied=False)
        out = decoder.hidden_size
        projector = joining(config, tower, out, out, bias=False)
        super().__init__(decoder, tower, projector, dtype, device)


class VoxtralFormat(Voxtral):
    """Voxtral in its publisher's own layout: pairs of rotary positions are neighbours, the tower's are not stored."""

    neighbours = True

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        audio = self.audio_tower.config
        table = ("model.audio_tower.embed_positions.weight", sinusoids(audio.positions, audio.width))
        super().load_weights(chain(hub_names(weights), [table]))
