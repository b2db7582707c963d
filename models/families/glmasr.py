"""GLM-ASR: transcription with a Whisper-like encoder with rotary positions, four rows joined to one, a Llama-like decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...mm.errors import ConfigError
from ..audio.mel_encoder import MelEncoderNames, mel_encoder_spec
from ..decoder_model import TEXT_PREFIXES
from ..text.decoder_config import decoder_spec
from ..text.stacks import STACKS
from ..window_model import AUDIO_PREFIXES, WindowModel, config_sections, joined_projector

# defaults that the published config.json leaves out
TEXT = {
    "vocab_size": 59264, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
_NAMES = MelEncoderNames(("input_layernorm", "post_attention_layernorm"), "o_proj", ("mlp.fc1", "mlp.fc2"), "norm")


class GlmAsr(WindowModel):
    """A model of audio."""

    prefixes = (*AUDIO_PREFIXES, *TEXT_PREFIXES)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, audio = config_sections(config, TEXT)
        decoder = decoder_spec({"tie_word_embeddings": True, **config, "text_config": text}, STACKS["llama"])
        tower = replace(mel_encoder_spec(audio), names=_NAMES)
        rope: Mapping[str, Any] = audio.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default" or (audio.get("num_key_value_heads") or tower.heads) != tower.heads:
            raise ConfigError("audio_config has rope scaling or grouped key/value heads; neither is supported")
        factor = rope.get("partial_rotary_factor", audio.get("partial_rotary_factor", 0.5))
        rotary_dim = int(tower.width // tower.heads * factor)
        tower = replace(tower, rotary_dim=rotary_dim, theta=float(rope.get("rope_theta", tower.theta)))
        projector = joined_projector(config, tower, decoder.hidden_size, 2 * decoder.hidden_size)
        super().__init__(decoder, tower, projector, dtype, device)
