"""Voxtral-Realtime: a causal encoder with a sliding window, four rows joined to one, a Mistral decoder.

Encoder row i is added to the embedding of token i, also of generated tokens. Source: the modelling file of transformers 5.23
and the config's keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import CheckpointError
from ....checkpoints.config import positive_int
from ....checkpoints.consolidated import hub_names
from ...audio.causal_encoder import (
    CausalEncoder,
    StreamStates,
    causal_encoder_bytes,
    encoder_spec,
    stream_state_bytes,
    with_zero_biases,
)
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.connectors import Projector, ProjectorSpec, projector_bytes
from ...memory_formulas import SMALL
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...window_model import AUDIO_PREFIXES

# defaults that the published config.json leaves out
TEXT = {
    "vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "sliding_window": 8192,
}  # fmt: skip
_ADAPTIVE = re.compile(r"(.*\.)(ada_rms_norm\.linear[12]|post_attention_layernorm)\.weight")
_THETA = 10_000.0  # base of the sinusoidal embedding of the delay


class VoxtralRealtime(DecoderModel):
    """A model of audio in Voxtral-Realtime's layout of the Hub. `interleaved`: rotated pairs are adjacent numbers."""

    prefixes = (*AUDIO_PREFIXES, *TEXT_PREFIXES)
    recordable = False  # the encoder keeps states of streams
    max_streams = 1
    keeps_open_windows = False
    interleaved: ClassVar[bool] = False

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {"tie_word_embeddings": True, **config, "text_config": {**TEXT, **(config.get("text_config") or {})}}
        stack = replace(STACKS["mistral"], interleaved=self.interleaved)
        super().__init__(decoder_spec(config, stack, adds_encoder_rows=True), dtype, device)
        self._delay = positive_int({"default_num_delay_tokens": 6, **config}, "default_num_delay_tokens")
        audio, group = encoder_spec(config.get("audio_config") or {}, self.interleaved), config.get("downsample_factor", 4)
        self.audio_tower = CausalEncoder(audio, dtype, device)
        act, layers = config.get("projector_hidden_act", "gelu"), ("linear_1", "linear_2")
        self._streams, width = StreamStates(), self.hidden_size
        spec = ProjectorSpec(audio.stack.hidden_size, width, layers, group=group, inner=width, act=act, bias=False)
        self.multi_modal_projector = Projector(spec, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        """Return the rows of items, or of chunks of streams, which have `audio_stream` `[items, 2]`: stream and start."""
        items = tensors["input_features"].split(tensors["audio_frames"].tolist())
        if "audio_stream" not in tensors:
            return [self.multi_modal_projector(self.audio_tower(features)) for features in items]
        chunks = zip(items, tensors["audio_stream"].tolist(), strict=True)
        return [self._embed_chunk(features, *chunk) for features, chunk in chunks]

    def _embed_chunk(self, features: Tensor, stream: int, start: int) -> Tensor:
        state = self._streams.get(stream, start, self.audio_tower.new_state)
        rows: Tensor = self.multi_modal_projector(self.audio_tower(features, state, start))
        return rows

    def free_stream(self, stream: int) -> None:
        self._streams.drop(stream)

    def stream_bytes(self, rows: int) -> int:
        return stream_state_bytes(self.audio_tower.spec, self.dtype)

    def forward_bytes(self, limits: StepLimits) -> int:
        return super().forward_bytes(limits) + SMALL  # metadata, which matters in steps of few rows

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * 2 * self.multi_modal_projector.spec.group * self.audio_tower.spec.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        projector, size = self.multi_modal_projector.spec, self.dtype.itemsize
        outputs, result = rows * projector.group, rows * self.hidden_size * size
        tower = causal_encoder_bytes(self.audio_tower.spec, outputs, self.dtype, limits)
        joined = outputs * (projector.width * size + projector_bytes(projector, 1, outputs, self.dtype, limits))
        return self.input_bytes(modality, rows) + result + max(tower, joined)

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Multiply the norms before the MLPs by the factors that `ada_rms_norm` computes from the delay, which is constant."""
        return self._merge_delay(with_zero_biases(weights))

    def _merge_delay(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights:
            match = _ADAPTIVE.fullmatch(name)
            if match is None:
                yield name, tensor
                continue
            layer, part = match.groups()
            tensors = parts.setdefault(layer, {})
            tensors[part.rsplit(".", 1)[-1]] = tensor
            if len(tensors) == 3:
                del parts[layer]
                yield f"{layer}post_attention_layernorm.weight", self._scaled_norm(**tensors)
        for layer, tensors in parts.items():  # a norm alone would load, unscaled
            for part in ("ada_rms_norm.linear1", "ada_rms_norm.linear2", "post_attention_layernorm"):
                if part.rsplit(".", 1)[-1] not in tensors:
                    raise CheckpointError(f"the checkpoint lacks {layer}{part}.weight; download it again")

    def _scaled_norm(self, linear1: Tensor, linear2: Tensor, post_attention_layernorm: Tensor) -> Tensor:
        half = self.hidden_size // 2
        angles = self._delay * _THETA ** (-torch.arange(half, device=linear1.device) / half)
        delay = torch.cat((angles.cos(), angles.sin()))
        scale = 1 + F.gelu(delay @ linear1.float().T) @ linear2.float().T
        return (post_attention_layernorm.float() * scale).to(post_attention_layernorm.dtype)


class VoxtralRealtimeConsolidated(VoxtralRealtime):
    """Voxtral-Realtime in its publisher's own layout: rotated pairs of decoder and encoder are adjacent numbers."""

    interleaved = True

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return super().convert_weights(hub_names(weights, causal=True))
