"""Kokoro (StyleTTS 2, arXiv 2306.07691): an ALBERT encoder of phonemes (PL-BERT, arXiv 2301.08810), prosody, an iSTFTNet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import InputError
from ...audio.adain import ChannelFactors
from ...audio.styletts2 import PhonemeEncoder, ProsodyPredictor, StyleDecoder, styletts2_spec
from ...encoder_only import EncoderOnlyModel
from ...interface import ForwardBatch, StepLimits
from ...layers.basic import EmbeddingTable, Norm, TensorModule
from ...layers.linear import Linear
from ...text.attention import DecoderAttention
from ...text.decoder import decoder_bytes
from ...text.spec import DecoderSpec
from ...weights import check, fill
from ..bert.encoder import BertLayer
from ..text_only.model import TakesNoItems
from .config import albert_spec, read_albert

_SPEAKABLE_FRAMES = 3600  # of one request, 90 s
_NAMES = (
    ("embeddings.word_embeddings.", "embed_tokens."),
    ("embeddings.position_embeddings.", "embed_positions."),
    ("embeddings.token_type_embeddings.", "embed_types."),
    ("embeddings.LayerNorm.", "embed_norm."),
    ("encoder.embedding_hidden_mapping_in.", "embed_projection."),
    ("encoder.albert_layer_groups.0.albert_layers.0.", "layer."),
    ("layer.attention.query.", "layer.self_attn.q_proj."),
    ("layer.attention.key.", "layer.self_attn.k_proj."),
    ("layer.attention.value.", "layer.self_attn.v_proj."),
    ("layer.attention.dense.", "layer.self_attn.o_proj."),
    ("layer.attention.LayerNorm.", "layer.after_attention."),
    ("layer.ffn.", "layer.mlp.fc1."),
    ("layer.ffn_output.", "layer.mlp.fc2."),
    ("layer.full_layer_layer_norm.", "layer.after_mlp."),
)
_IGNORED = ("bert.pooler.", "bert.embeddings.position_ids")


class AlbertEncoder(TensorModule):
    """ForwardBatch -> hidden states `[rows, hidden]` (arXiv 1909.11942): one layer, applied many times."""

    def __init__(self, spec: DecoderSpec, text: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        narrow, width = int(text["embedding_size"]), spec.hidden_size
        self.embed_tokens = EmbeddingTable(spec.vocab_size, narrow, dtype, device)
        self.embed_positions = EmbeddingTable(spec.max_positions, narrow, dtype, device)
        self.embed_types = EmbeddingTable(int(text["type_vocab_size"]), narrow, dtype, device)
        self.embed_norm = Norm(narrow, spec.eps, True, dtype, device)
        self.embed_projection = Linear(narrow, {"embed_projection": width}, True, dtype, device)
        self.layer = BertLayer(spec, DecoderAttention, dtype, device)
        self.cache_specs = [self.layer.self_attn.cache_spec] * len(spec.layers)

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids) + self.embed_types.weight[0]
        x = self.embed_projection(self.embed_norm(x, self.embed_positions(batch.positions[0])))
        for cache, attn in zip(batch.kv_caches, batch.attn, strict=True):
            x = self.layer(x, None, cache, attn)
        return x


class Kokoro(TakesNoItems, EncoderOnlyModel):
    """The hidden states of a prompt are those of its phonemes, and `speak` makes samples of them.

    Implements `models.interface.SupportsSpeech`. All but the encoder of phonemes computes in float32.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        text, self.sizes = read_albert(config), styletts2_spec(config)
        self.spec = albert_spec(text, self.sizes.phonemes)
        super().__init__(self.spec.hidden_size, self.spec.vocab_size, self.spec.max_positions, dtype)
        self.bert = AlbertEncoder(self.spec, text, dtype, device)
        self.cache_specs = self.bert.cache_specs
        self.bert_encoder = Linear(self.hidden_size, {"bert_encoder": self.sizes.width}, True, torch.float32, device)
        self.predictor = ProsodyPredictor(self.sizes, device)
        self.text_encoder = PhonemeEncoder(self.sizes, device)
        self.decoder = StyleDecoder(self.sizes, device)

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self.bert(batch)

    def speak(self, ids: Tensor, hidden: Tensor, style: Tensor, speed: float, seed: int) -> tuple[Tensor, Tensor]:
        """See `models.interface.SupportsSpeech`. `style`: for the sound, then for the prosody."""
        sound, prosody = style[None].split((self.sizes.style, self.sizes.style), 1)
        encoded = self.predictor.text_encoder(self.bert_encoder(hidden.float()), prosody)
        durations = self.predictor.durations(encoded) / speed
        if not durations.isfinite().all():
            raise InputError("the durations of phonemes are not finite; give another voice", code="not_finite")
        frames = durations.round().clamp(min=1).long()
        count = int(frames.sum())
        if count > _SPEAKABLE_FRAMES:
            reason = f"a sentence takes {count} frames of {self.sizes.samples_per_frame} samples, at most {_SPEAKABLE_FRAMES}"
            how = "shorten it, or speak faster"
            raise InputError(f"{reason} are possible; {how}", code="over_limit", limit=_SPEAKABLE_FRAMES, value=count)
        pitch, energy = self.predictor.curves(encoded.repeat_interleave(frames, 0), prosody)
        features = self.text_encoder(ids).repeat_interleave(frames, 0)
        return frames, self.decoder(features, pitch, energy, sound, torch.Generator().manual_seed(seed))

    def forward_bytes(self, limits: StepLimits) -> int:
        speech = self.sizes.peak_bytes(min(limits.longest, self.max_positions), _SPEAKABLE_FRAMES)
        return decoder_bytes(self.spec, limits, self.dtype, encoders=False) + speech

    def is_unused(self, name: str) -> bool:
        return _renamed(name).startswith(_IGNORED)

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        check(self, self._with_factors(headers.items()), (), _IGNORED)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fill(self, self._with_factors(weights), (), _IGNORED)

    def _with_factors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors under our names, and ones and zeros for factors of adaptive norms that a checkpoint does not store."""
        modules = ((path, module) for path, module in self.named_modules() if isinstance(module, ChannelFactors))
        absent = {name: factors for path, module in modules for name, factors in module.tensors(path)}
        for stored, tensor in weights:
            name = _renamed(stored)
            absent.pop(name, None)
            yield name, tensor
        for name, factors in absent.items():
            yield name, torch.full(factors.shape, float(name.endswith(".weight")))


def _renamed(stored: str) -> str:
    """Return our name of a tensor. The published checkpoint has the name of a class for training after that of the part."""
    part, _, name = stored.partition(".")
    name = name.removeprefix("module.")
    if part == "bert":
        for old, new in _NAMES:
            name = name.replace(old, new, 1)
    return f"{part}.{name}"
