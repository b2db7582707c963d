"""Whisper: its encoder's rows of one sound of 30 s are what a small decoder reads through cross-attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .activations import cross_decoder_bytes, mel_encoder_bytes
from .audio.mel_encoder import Encoder, encoder_config, layer_sizes
from .config import count
from .interface import ForwardBatch, Work
from .layers.linear import Head
from .text.encoder_decoder import CrossDecoder, CrossDecoderSpec, with_key_biases
from .weights import fill

PREFIXES = (("model.encoder.", "encoder."), ("model.decoder.", "decoder."), ("proj_out.", "head.lm_head."))


def decoder_spec(config: Mapping[str, Any]) -> CrossDecoderSpec:
    """ConfigError for a missing key, an activation that is not known, heads that do not divide the width."""
    return CrossDecoderSpec(
        vocab_size=count(config, "vocab_size"),
        hidden_size=count(config, "d_model"),
        positions=count(config, "max_target_positions"),
        **layer_sizes(config, "decoder"),
    )


class Whisper(nn.Module):
    """See `models.interface.Model`."""

    rope_axes = 1
    routes_by_modality: Mapping[str, int] = {}
    adapters: Sequence[str] = ()
    recordable = True

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        config = {"activation_function": "gelu", "max_source_positions": 1500, "max_target_positions": 448} | dict(config)
        self.encoder = Encoder(encoder_config(config), dtype, device)
        spec = decoder_spec(config)
        self.decoder = CrossDecoder(spec, dtype, device)
        table = self.decoder.embed_tokens.weight if config.get("tie_word_embeddings", True) else None
        self.head = Head(spec.hidden_size, spec.vocab_size, table, dtype, device)
        self.vocab_size, self.hidden_size, self.max_positions = spec.vocab_size, spec.hidden_size, spec.positions
        self.row_size, self.cache_specs = spec.hidden_size, self.decoder.cache_specs

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        features: Tensor = tensors["input_features"]
        window = 2 * self.encoder.config.positions
        return self.encoder(features, [window] * (len(features) // window))  # type: ignore[no-any-return]

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.decoder(batch)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)  # type: ignore[no-any-return]

    def forward_bytes(self, work: Work) -> int:
        return cross_decoder_bytes(self.decoder.config, work, self.encoder.dtype)

    def input_bytes(self, modality: str, rows: int) -> int:
        return 2 * rows * self.encoder.config.mels * self.encoder.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        return mel_encoder_bytes(self.encoder.config, 2 * rows, 0, self.encoder.dtype, work)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        aliases = {} if self.head.proj is not None else {"head.lm_head.weight": "decoder.embed_tokens.weight"}
        decoder_keys = with_key_biases(weights, "model.decoder.")
        fill(self, decoder_keys, PREFIXES, aliases)
