"""Qwen3-Omni's thinker: Qwen3-VL with experts, and the AuT encoder for sounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..mm.errors import ConfigError
from .activations import aut_bytes
from .audio.aut import Encoder, aut_spec, halved
from .interface import Work
from .qwen3_vl import STACK, Qwen3VL
from .thinker import SPEAKING, Thinker, nested, thinker

AUDIO = {  # what the published config.json leaves out
    "d_model": 1280,
    "downsample_hidden_size": 480,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "n_window": 50,
    "n_window_infer": 800,
    "num_mel_bins": 128,
    "output_dim": 3584,
}
TEXT = {"head_dim": None, "rope_theta": 1e6, "norm_topk_prob": True}


class Qwen3Omni(Thinker, Qwen3VL):
    """See `Thinker`."""

    stack = replace(STACK, router={"normalise": True})
    merging = ("ln_q", ("mlp.0", "mlp.2"))
    prefixes = nested(
        (
            ("model.audio_tower.", "audio_tower."),
            ("model.visual.merger_list.", "levels."),
            ("visual.merger_list.", "levels."),
            *Qwen3VL.prefixes,
            ("model.", "language_model."),
        )
    )
    ignored = SPEAKING

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = thinker(config, vision_config={}, text_config=TEXT, audio_config=AUDIO)
        super().__init__(config, dtype, device)
        self.audio_tower = Encoder(replace(aut_spec(config["audio_config"]), filled=False), dtype, device)
        out, self.mels = self.audio_tower.spec.out, self.audio_tower.spec.layer.mels
        if out != self.hidden_size:
            raise ConfigError(f"output_dim {out} of audio_config in config.json is not hidden_size {self.hidden_size}")

    def frames_of(self, rows: int) -> int:
        chunk: int = self.audio_tower.spec.chunk
        return -(-rows * chunk // halved(chunk))

    def audio_bytes(self, frames: int, work: Work) -> int:
        return aut_bytes(self.audio_tower.spec, frames, self.dtype, work)
