"""Qwen2.5-Omni's thinker: Qwen2.5-VL with a Whisper-like tower for sounds, which sees two seconds at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..mm.errors import ConfigError
from .activations import mel_encoder_bytes
from .audio.chunked_encoder import ChunkedEncoder
from .audio.mel_encoder import LARGE, encoder_config
from .config import count
from .interface import Work
from .qwen2_vl import Qwen25VL
from .thinker import SPEAKING, Thinker, nested, thinker
from .vision.spec import GATED_BLOCKS

AUDIO = {**LARGE, "n_window": 100, "output_dim": 3584}  # what the published config.json leaves out
TEXT = {"rms_norm_eps": 1e-6}


class Qwen25Omni(Thinker, Qwen25VL):
    """See `Thinker`."""

    names = replace(GATED_BLOCKS, qkv=("attn.q", "attn.k", "attn.v"))
    prefixes = nested((("model.audio_tower.", "audio_tower."), *Qwen25VL.prefixes))
    ignored = (*SPEAKING, "audio_tower.audio_bos_eos_token.")  # the latter of no use to the published model either

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = thinker(config, vision_config={}, text_config=TEXT, audio_config=AUDIO)
        super().__init__(config, dtype, device)
        audio = config["audio_config"]
        tower = replace(encoder_config(audio), positions=count(audio, "n_window"))
        out, self.mels = count(audio, "output_dim"), tower.mels
        if out != self.hidden_size:
            raise ConfigError(f"output_dim {out} of audio_config in config.json is not hidden_size {self.hidden_size}")
        self.audio_tower = ChunkedEncoder(tower, out, dtype, device)

    def frames_of(self, rows: int) -> int:
        """The second convolution and the average halve them; up to three are left over."""
        return 4 * rows + 3

    def audio_bytes(self, frames: int, work: Work) -> int:
        return mel_encoder_bytes(self.audio_tower.config, frames, self.hidden_size, self.dtype, work)
