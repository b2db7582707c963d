"""Whisper (arXiv 2212.04356): an encoder for 30 s of audio, and a decoder that reads its rows by cross-attention."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....checkpoints.config import positive_int
from ....checkpoints.weight_files import rename
from ...audio.mel_encoder import MelEncoder, layer_sizes, mel_encoder_bytes, mel_encoder_spec
from ...interface import ForwardBatch, StepLimits
from ...layers.linear import LmHead
from ...stored_formats import Formats
from ...text.encoder_decoder import CrossDecoder, CrossDecoderSpec, cross_decoder_bytes, with_key_biases
from ...weights import check, fill

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 51865, "num_mel_bins": 80, "d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536, "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536,
    "activation_function": "gelu", "max_source_positions": 1500, "max_target_positions": 448,
}  # fmt: skip
PREFIXES = (("model.encoder.", "encoder."), ("model.decoder.", "decoder."), ("proj_out.", "head.lm_head."))


def decoder_spec(config: Mapping[str, Any]) -> CrossDecoderSpec:
    """Read config.json; ConfigError for a missing key, an unknown activation, or heads that do not divide the width."""
    return CrossDecoderSpec(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=positive_int(config, "d_model"),
        positions=positive_int(config, "max_target_positions"),
        **layer_sizes(config, "decoder"),
    )


class Whisper(nn.Module):
    """Implements `models.interface.Model` without DecoderModel, since the decoder has cross-attention."""

    rope_axes = 1
    routes_by_modality: Mapping[str, int] = {}
    adapters: Sequence[str] = ()
    can_generate = recordable = True
    prefixes: tuple[tuple[str, str], ...] = PREFIXES
    ignored: tuple[str, ...] = ()
    absent: Collection[str] = ()
    defaults: Mapping[str, Any] = _DEFAULTS
    formats: Formats | None = None
    request_adapters: object | None = None  # see DecoderModel

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        config = {**self.defaults, **config}
        spec = self._build_encoder(config, dtype, device)
        self.decoder = CrossDecoder(spec, dtype, device)
        self.vocab_size, self.hidden_size, self.max_positions = spec.vocab_size, spec.hidden_size, spec.positions
        self.row_size, self.cache_specs = spec.hidden_size, self.decoder.cache_specs
        self._build_head(tied=bool(config.get("tie_word_embeddings", True)))

    def _build_encoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CrossDecoderSpec:
        """Set `encoder`, and return the decoder's spec."""
        self.encoder = MelEncoder(mel_encoder_spec(config), dtype, device)
        return decoder_spec(config)

    def _build_head(self, tied: bool) -> None:
        embedding = self.decoder.embed_tokens
        dtype, device = embedding.weight.dtype, embedding.weight.device
        self.head = LmHead(self.hidden_size, self.vocab_size, embedding if tied else None, dtype, device)

    @property
    def decoder_parts(self) -> Iterable[tuple[str, nn.Module]]:
        return [("decoder", self.decoder)]

    @property
    def head_parts(self) -> Iterable[tuple[str, nn.Module]]:
        return [("head", self.head)]

    @property
    def encoder_parts(self) -> Iterable[tuple[str, nn.Module]]:
        return [(name, module) for name, module in self.named_children() if name not in ("decoder", "head")]

    def remove_encoder(self) -> None:
        """See SupportsEncoderRemoval."""
        del self.encoder
        self.ignored = (*self.ignored, "encoder.")

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        features: Tensor = tensors["input_features"]
        window = 2 * self.encoder.config.positions
        return self.encoder(features, [window] * (len(features) // window))

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.decoder(batch)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden)

    def forward_bytes(self, limits: StepLimits) -> int:
        return cross_decoder_bytes(self.decoder.config, limits, self.cache_specs[0].dtype)

    def input_bytes(self, modality: str, rows: int) -> int:
        return 2 * rows * self.encoder.config.mels * self.encoder.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return mel_encoder_bytes(self.encoder.config, 2 * rows, 0, self.encoder.dtype, limits)

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        if headers:
            self._build_head(tied=not any(rename(name, self.prefixes).startswith("head.") for name in headers))

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        check(self, self.convert_weights(headers.items()), self.prefixes, self.ignored)

    def is_unused(self, name: str) -> bool:
        return rename(name, self.prefixes).startswith(self.ignored)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fill(self, self.convert_weights(weights), self.prefixes, self.ignored)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return with_key_biases(weights, "model.decoder.")
