"""Qwen2-Audio: rows of a Whisper encoder, averaged by two and projected, take the place of placeholders in a plain decoder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..mm.errors import ConfigError
from .activations import decoder_bytes, gathered_bytes, whisper_bytes
from .audio.whisper_encoder import Encoder, encoder_config
from .config import need, text_config
from .interface import ForwardBatch, Work
from .layers.linear import Head, Linear
from .text.decoder import Decoder
from .weights import fill

PREFIXES = (  # as stored -> canonical; new names first
    ("model.audio_tower.", "audio_tower."),
    ("model.multi_modal_projector.", "multi_modal_projector."),
    ("model.language_model.", "language_model."),
    ("language_model.model.", "language_model."),
    ("language_model.lm_head.", "head.lm_head."),
    ("lm_head.", "head.lm_head."),
)
AUDIO = {  # what the published config.json leaves out
    "d_model": 1280,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "max_source_positions": 1500,
    "num_mel_bins": 128,
}
TEXT = {
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "vocab_size": 151936,
}


class Qwen2Audio(nn.Module):
    """See `models.interface.Model`."""

    rope_axes = 1

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        if not isinstance(need(config, "text_config"), Mapping) or not isinstance(need(config, "audio_config"), Mapping):
            raise ConfigError("text_config and audio_config in config.json must be objects")
        text = text_config({**config, "text_config": TEXT | dict(config["text_config"])}, axes=1)
        audio = encoder_config(AUDIO | dict(config["audio_config"]))
        self.vocab_size, self.hidden_size, self.max_positions = text.vocab_size, text.hidden_size, text.max_positions
        self.audio_tower = Encoder(audio, dtype, device, pool=2)
        projector = Linear(audio.width, {"linear": text.hidden_size}, True, dtype, device)
        self.multi_modal_projector = nn.ModuleDict({"linear": projector})
        self.language_model = Decoder(text, dtype, device)
        self.head = Head(text.hidden_size, text.vocab_size, None, dtype, device)  # this family never ties it
        self.cache_specs = self.language_model.cache_specs

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        rows = self.audio_tower(tensors["input_features"], tensors["audio_frames"].tolist())
        projected = self.multi_modal_projector["linear"](torch.cat(rows))
        return list(projected.split([len(one) for one in rows]))

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.language_model(batch)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # type: ignore[no-any-return]

    def forward_bytes(self, work: Work) -> int:
        text, dtype = self.language_model.config, self.audio_tower.dtype
        return decoder_bytes(text, work, dtype) + gathered_bytes(text, work, dtype)

    def input_bytes(self, modality: str, rows: int) -> int:
        return _frames(rows) * self.audio_tower.config.mels * self.audio_tower.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        tower = self.audio_tower
        return whisper_bytes(tower.config, _frames(rows), self.hidden_size, tower.dtype, work)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fill(self, weights, PREFIXES, {})


def _frames(rows: int) -> int:
    """The second convolution and the average halve them; up to three are left over and two lie in the silence behind."""
    return 4 * rows + 5
