"""Cohere's transcription models and Canary: FastConformer, and a decoder that reads its rows by cross-attention."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ....callers.errors import ConfigError
from ....checkpoints.config import check_activation, positive_int
from ...audio.fastconformer import FastConformer, fastconformer_bytes, fastconformer_spec
from ...interface import StepLimits
from ...layers.linear import Linear, LmHead
from ...text.encoder_decoder import CrossDecoderNames, CrossDecoderSpec
from ..whisper.model import PREFIXES, Whisper
from .config import read_nemo_config

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 16384, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 4096,
    "hidden_act": "relu", "max_position_embeddings": 1024, "attention_bias": True,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 1280, "num_hidden_layers": 48, "intermediate_size": 5120, "num_mel_bins": 128, "scale_input": False,
}  # fmt: skip
_CANARY_ENCODER = {"num_hidden_layers": 32, "num_mel_bins": 128, "scale_input": False}
_NAMES = CrossDecoderNames(
    ("input_layernorm", "post_attention_layernorm", "final_layernorm"), "o_proj", ("mlp.fc1", "mlp.fc2"), "norm"
)
_NEMO = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^encoder\.pre_encode\.conv\.", "model.encoder.subsampling.layers."),
        (r"^encoder\.pre_encode\.out\.", "model.encoder.subsampling.linear."),
        (r"^encoder\.", "model.encoder."),
        (r"^encoder_decoder_proj\.", "model.decoder.proj."),
        (r"^transf_decoder\._embedding\.position_embedding\.pos_enc$", "model.decoder.pos_emb.weight"),
        (r"^transf_decoder\._embedding\.token_embedding\.", "model.decoder.embed_tokens."),
        (r"^transf_decoder\._embedding\.layer_norm\.", "model.decoder.embedding_layernorm."),
        (r"^transf_decoder\._decoder\.final_layer_norm\.", "model.decoder.norm."),
        (r"^transf_decoder\._decoder\.", "model.decoder."),
        (r"^decoder\.", "model.decoder."),
        (r"^log_softmax\.mlp\.layer0\.", "proj_out."),
        (r"\.self_attn\.linear_([qkv])\.", r".self_attn.\1_proj."),
        (r"\.self_attn\.linear_out\.", ".self_attn.o_proj."),
        (r"\.self_attn\.linear_pos\.", ".self_attn.relative_k_proj."),
        (r"\.self_attn\.pos_bias_([uv])$", r".self_attn.bias_\1"),
        (r"\.conv\.batch_norm\.", ".conv.norm."),
        (r"\.first_sub_layer\.", ".self_attn."),
        (r"\.second_sub_layer\.", ".encoder_attn."),
        (r"\.([qkv])(uery|ey|alue)_net\.", r".\1_proj."),
        (r"\.out_projection\.", ".o_proj."),
        (r"\.third_sub_layer\.dense_in\.", ".mlp.fc1."),
        (r"\.third_sub_layer\.dense_out\.", ".mlp.fc2."),
        (r"\.layer_norm_1\.", ".input_layernorm."),
        (r"\.layer_norm_2\.", ".post_attention_layernorm."),
        (r"\.layer_norm_3\.", ".final_layernorm."),
    )
)


class CohereAsr(Whisper):
    """A model of audio. Its rows are projected to the width of the decoder."""

    prefixes = (
        ("model.decoder.proj.", "proj."),
        ("model.decoder.pos_emb.", "decoder.embed_positions."),
        ("model.decoder.embedding_layernorm.", "decoder.layernorm_embedding."),
        *PREFIXES,
    )
    defaults = _DEFAULTS
    encoder: FastConformer  # type: ignore[assignment]

    def _build_encoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CrossDecoderSpec:
        config = read_nemo_config(config)
        decoder = _decoder_spec(config)
        self._build_fastconformer(config, _ENCODER, dtype, device)
        self.proj: Linear | nn.Identity = Linear(self.encoder.spec.width, {"proj": decoder.hidden_size}, True, dtype, device)
        return decoder

    def _build_fastconformer(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.encoder = FastConformer(fastconformer_spec(config.get("encoder_config") or {}, defaults), dtype, device)
        self.unused = frozenset(f"model.encoder.{name}" for name in self.encoder.unused)

    def _build_head(self, tied: bool) -> None:
        """Build a head of its own. It has a bias, also where the checkpoint stores the embeddings as its weight."""
        weight = self.decoder.embed_tokens.weight
        self.head = LmHead(self.hidden_size, self.vocab_size, None, weight.dtype, weight.device, bias=True)

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: `convert_weights` copies a tied head."""

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        frames = tensors["audio_frames"].tolist()
        rows = self.proj(self.encoder(tensors["input_features"], frames))
        return list(rows.split([self.encoder.spec.num_rows(n) for n in frames]))

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.encoder.spec.factor * self.encoder.spec.mels * self.encoder.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return fastconformer_bytes(self.encoder.spec, rows, self.encoder.dtype, limits)

    def is_unused(self, name: str) -> bool:
        return _own_name(name) in self.unused or name.removeprefix("model.").startswith("preprocessor.")

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Rename the tensors of NeMo's layout. If no head is stored, the embeddings are its weight."""
        embedding, has_head = None, False
        for stored, tensor in weights:
            name = _own_name(stored)
            if self.is_unused(stored):
                continue
            if name == "model.decoder.embed_tokens.weight":
                embedding = tensor
            has_head = has_head or name == "proj_out.weight"
            yield name, tensor
        if embedding is not None and not has_head:
            yield "proj_out.weight", embedding


class Canary(CohereAsr):
    """A model of audio. Positions are sines, and the rows have the width of the decoder."""

    def _build_encoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> CrossDecoderSpec:
        decoder = _decoder_spec({**config, **(config.get("decoder_config") or {})})
        # transformers' defaults of a Canary hold for a missing section; a section is completed with those of its own class
        self._build_fastconformer(config, {} if config.get("encoder_config") else _CANARY_ENCODER, dtype, device)
        self.proj = nn.Identity()
        if self.encoder.spec.width != decoder.hidden_size:
            sizes = f"{self.encoder.spec.width} in encoder_config and {decoder.hidden_size} in decoder_config"
            raise ConfigError(f"hidden_size is {sizes}; they must be equal")
        return decoder

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Add the positions, which are not stored."""
        yield from super().convert_weights(weights)
        yield "model.decoder.pos_emb.weight", _sines(self.max_positions, self.hidden_size)


def _own_name(name: str) -> str:
    """Return the name in transformers' layout."""
    name = name.removeprefix("model.")
    for pattern, new in _NEMO:
        name = pattern.sub(new, name)
    return name


def _decoder_spec(config: Mapping[str, Any]) -> CrossDecoderSpec:
    """Read the decoder's sizes; ConfigError for a missing key, or for sizes that do not divide."""
    width, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    kv_heads = positive_int({"num_key_value_heads": config.get("num_key_value_heads") or heads}, "num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if width % heads and not config.get("head_dim"):
        raise ConfigError(f"hidden_size {width} is not a multiple of num_attention_heads {heads}")
    return CrossDecoderSpec(
        vocab_size=positive_int(config, "vocab_size"),
        hidden_size=width,
        inner=positive_int(config, "intermediate_size"),
        heads=heads,
        layers=positive_int(config, "num_hidden_layers"),
        positions=positive_int(config, "max_position_embeddings"),
        act=check_activation("hidden_act", config["hidden_act"]),
        embed_norm=True,
        attention_dim=config.get("head_dim"),
        kv_heads=kv_heads,
        attention_bias=bool(config["attention_bias"]),
        names=_NAMES,
    )


def _sines(positions: int, width: int) -> Tensor:
    """Return the sines, then the cosines of each position, divided by the root of the width: float32 `[positions, width]`."""
    rates = torch.exp(-2 * math.log(10_000.0) / width * torch.arange(width // 2).float())
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), 1) / math.sqrt(width)
