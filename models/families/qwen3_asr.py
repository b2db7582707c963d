"""Qwen3-ASR: rows of the AuT encoder take the place of placeholders in a Qwen3 decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..mm.errors import ConfigError
from .activations import aut_bytes
from .audio.aut import Encoder, aut_spec, halved
from .config import decoder_spec
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .text.stacks import STACKS
from .thinker import SPEAKING, thinker

AUDIO = {  # what the published config.json leaves out
    "num_mel_bins": 128,
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "d_model": 1024,
    "n_window": 50,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
    "output_dim": 3584,
}
TEXT = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 65536,
}


class Qwen3ASR(DecoderModel):
    """See `DecoderModel`. Where its positions have axes, sound advances on all of them together."""

    prefixes = (
        ("thinker.audio_tower.", "audio_tower."),
        ("thinker.model.", "language_model."),
        ("thinker.lm_head.", "head.lm_head."),
        ("model.audio_tower.", "audio_tower."),
        ("model.multi_modal_projector.linear_1.", "audio_tower.proj1."),
        ("model.multi_modal_projector.linear_2.", "audio_tower.proj2."),
        *TEXT_PREFIXES,
    )
    ignored = SPEAKING

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = thinker(config, tied=True, text_config=TEXT, audio_config=AUDIO)
        super().__init__(decoder_spec(config, STACKS["qwen3"]), dtype, device)
        self.audio_tower = Encoder(aut_spec(config["audio_config"]), dtype, device)
        out = self.audio_tower.spec.out
        if out != self.hidden_size:
            raise ConfigError(f"output_dim {out} of audio_config in config.json is not hidden_size {self.hidden_size}")

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        return self.audio_tower(tensors["input_features"], tensors["audio_frames"].tolist())  # type: ignore[no-any-return]

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._frames(rows) * self.audio_tower.spec.layer.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        return aut_bytes(self.audio_tower.spec, self._frames(rows), self.dtype, work)

    def _frames(self, rows: int) -> int:
        """At most, of so many rows."""
        chunk = self.audio_tower.spec.chunk
        return -(-rows * chunk // halved(chunk))
