"""BART (arXiv 1910.13461): a text encoder and a decoder with cross-attention, with norms after each part."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ....checkpoints.config import positive_int
from ....kernels.activation import activation
from ...audio.mel_encoder import EPS, MelEncoderLayer, MelEncoderSpec, layer_sizes, mel_encoder_bytes
from ...interface import StepLimits
from ...layers.basic import EmbeddingTable, Norm
from ...layers.builder import StoredTensor
from ...text.encoder_decoder import CrossDecoderSpec
from ..whisper.model import Whisper

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
    "decoder_layers": 12, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "activation_function": "gelu",
    "max_position_embeddings": 1024, "scale_embedding": False,
}  # fmt: skip
_FIRST_POSITION = 2  # row of position 0 in the tables of positions
_SHARED = "model.shared."
_TABLES = ("model.encoder.embed_tokens.", "model.decoder.embed_tokens.")
_INT64 = 8  # bytes


class BartEncoderLayer(MelEncoderLayer):
    """Attention and MLP; the residual stream is normed after each."""

    def forward(self, x: Tensor, lengths: Sequence[int], cos_sin: Any = None, trailing: Sequence[int | None] = ()) -> Tensor:
        x = self.self_attn_layer_norm(x, self.self_attn(x, lengths, cos_sin, trailing))
        return self.final_layer_norm(x, self.second(activation(self.act, self.first(x))))


class BartEncoder(nn.Module):
    """Embeddings of texts `[rows, width]`, one after another, to encoder rows `[rows, width]`."""

    def __init__(self, c: MelEncoderSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.config, self.dtype = c, dtype
        self.embed_positions = EmbeddingTable(c.positions + _FIRST_POSITION, c.width, dtype, device)
        self.layernorm_embedding = Norm(c.width, EPS, True, dtype, device)
        self.layers = nn.ModuleList(BartEncoderLayer(c, dtype, device) for _ in range(c.layers))

    def encode(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        places = torch.cat([torch.arange(length) for length in lengths]).to(x.device)
        x = self.layernorm_embedding(x, self.embed_positions(places + _FIRST_POSITION))
        for layer in self.layers:
            x = layer(x, lengths)
        return x


class Bart(Whisper):
    """A model of texts. Encoder, decoder and head have the same token embeddings."""

    recordable = False  # places of rows are made on the host
    ignored = ("encoder.embed_tokens.", "lm_head.")
    defaults: Mapping[str, Any] = _DEFAULTS
    encoder: BartEncoder  # type: ignore[assignment]

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self.final_logits_bias = StoredTensor((1, self.vocab_size), torch.float32, device)

    def _build_encoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CrossDecoderSpec:
        width, positions = positive_int(config, "d_model"), positive_int(config, "max_position_embeddings")
        sizes = layer_sizes(config, "encoder")
        self.encoder = BartEncoder(MelEncoderSpec(1, width=width, positions=positions, key_bias=True, **sizes), dtype, device)
        return CrossDecoderSpec(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=width,
            positions=positions,
            first_position=_FIRST_POSITION,
            embed_scale=math.sqrt(width) if config["scale_embedding"] else 1.0,
            embed_norm=True,
            post_norm=True,
            **layer_sizes(config, "decoder"),
        )

    @property
    def head_parts(self) -> Iterable[tuple[str, nn.Module]]:
        return [("head", self.head), ("final_logits_bias", self.final_logits_bias)]

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        lengths = torch.as_tensor(tensors["lengths"]).tolist()
        x = self.decoder.embed_tokens.read_rows(tensors["input_ids"]) * self.decoder.config.embed_scale
        return list(self.encoder.encode(x, lengths).split(lengths))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head(hidden).add_(self.final_logits_bias.weight)

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * _INT64

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return mel_encoder_bytes(self.encoder.config, 2 * rows, 0, self.encoder.dtype, limits)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names. Copies of the shared token embeddings are not read."""
        for name, tensor in weights:
            if not name.startswith(_TABLES):
                yield name.replace(_SHARED, "decoder.embed_tokens.", 1), tensor
