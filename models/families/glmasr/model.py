"""GLM-ASR: transcription with a Whisper-like encoder with rotary positions, four rows joined to one, a Llama-like decoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...audio.mel_encoder import MelEncoderNames, mel_encoder_spec
from ...decoder_model import TEXT_PREFIXES
from ...text.attention_config import rope_spec
from ...text.decoder_config import decoder_spec
from ...text.stack import Stack
from ...text.stacks import STACKS
from ...window_model import AUDIO_PREFIXES, WindowModel, config_sections, joined_projector

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
        tower = replace(tower, attention_dim=audio.get("head_dim"), kv_heads=audio.get("num_key_value_heads"))
        rotated = {"partial_rotary_factor": 0.5, "max_position_embeddings": tower.positions, **audio}
        tower = replace(tower, rope=rope_spec(rotated, Stack(), tower.head_dim, "full_attention"))
        projector = joined_projector(config, tower, decoder.hidden_size, 2 * decoder.hidden_size)
        super().__init__(decoder, tower, projector, dtype, device)
