"""Qwen2.5-Omni's thinker (arXiv 2503.20215): Qwen2.5-VL with a Whisper-like audio tower that attends within two seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..audio.chunked_encoder import ChunkedEncoder
from ..audio.mel_encoder import LARGE, mel_encoder_spec
from ..config import decoder_spec, positive_int, require
from ..native_model import NativeModel
from ..thinker import TALKER_PREFIXES, check_output_dim, thinker_config, with_thinker_prefix
from ..vision.spec import GATED_BLOCKS
from .qwen2_vl import PREFIXES, STACK, qwen25_tower

# defaults that the published config.json leaves out
AUDIO = {**LARGE, "n_window": 100, "output_dim": 3584}
TEXT = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
_NAMES = replace(GATED_BLOCKS, qkv=("attn.q", "attn.k", "attn.v"))


class Qwen25Omni(NativeModel):
    """A model of images, videos and audio."""

    prefixes = with_thinker_prefix((("model.audio_tower.", "audio_tower."), *PREFIXES))
    ignored = (*TALKER_PREFIXES, "audio_tower.audio_bos_eos_token.")  # the published model does not use the latter either

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = thinker_config(config, vision_config={}, text_config=TEXT, audio_config=AUDIO)
        decoder, audio = decoder_spec(config, STACK), config["audio_config"]
        tower, merger = qwen25_tower(require(config, "vision_config"), _NAMES)
        check_output_dim(positive_int(audio, "output_dim"), decoder.hidden_size)
        encoder = replace(mel_encoder_spec(audio), positions=positive_int(audio, "n_window"))
        super().__init__(decoder, tower, (merger,), dtype, device, ChunkedEncoder(encoder, decoder.hidden_size, dtype, device))
