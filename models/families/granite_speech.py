"""Granite Speech: rows of a conformer, three for each window of fifteen by a Q-Former, take the place of placeholders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..mm.errors import ConfigError
from .activations import conformer_bytes
from .audio.conformer import Conformer, conformer_spec
from .config import count, decoder_spec
from .decoder_model import TEXT_PREFIXES, DecoderModel
from .interface import Work
from .layers.qformer import QFormer, QFormerSpec
from .layers.tree import Maker
from .text.stacks import STACKS

ENCODER = {  # what the published config.json leaves out
    "input_dim": 160,
    "num_layers": 10,
    "hidden_dim": 1024,
    "feedforward_mult": 4,
    "num_heads": 8,
    "output_dim": 42,
    "context_size": 200,
    "max_pos_emb": 512,
    "conv_kernel_size": 15,
    "conv_expansion_factor": 2,
}
PROJECTOR = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "encoder_hidden_size": 1408,
    "cross_attention_frequency": 2,
}
STACK = replace(STACKS["granite"], defaults={**STACKS["granite"].defaults, "attention_multiplier": 1.0})


class Windows(nn.Module):
    """`[windows, rows, width]` -> `[windows * made, out]`: a Q-Former of `made` queries over each window."""

    def __init__(self, spec: QFormerSpec, made: int, out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        make = Maker(self, dtype, device)
        self.query, self.last = make.stored("query", 1, made, spec.width), (make.linear(["linear"], spec.width, [out], True),)
        self.qformer = QFormer(spec, dtype, device)

    def forward(self, seen: Tensor) -> Tensor:
        rows = self.qformer(self.query.weight.expand(len(seen), -1, -1), seen)
        return self.last[0](rows.flatten(0, 1))  # type: ignore[no-any-return]


class GraniteSpeech(DecoderModel):
    """See `DecoderModel`."""

    prefixes = (("model.encoder.", "encoder."), ("model.projector.", "projector."), *TEXT_PREFIXES)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {"tie_word_embeddings": True, "window_size": 15, "downsample_rate": 5, **config}
        super().__init__(decoder_spec(config, STACK, logit_scale=1.0), dtype, device)  # published without its factor
        audio = conformer_spec(ENCODER | dict(config.get("encoder_config") or {}))
        self.seen = count(config, "window_size")
        self.made = self.seen // count(config, "downsample_rate")
        projector = _qformer_spec(PROJECTOR | dict(config.get("projector_config") or {}))
        if projector.seen_width != audio.width:
            raise ConfigError(
                f"encoder_hidden_size of projector_config is {projector.seen_width}, the encoder has {audio.width}"
            )
        self.encoder = Conformer(audio, dtype, device)
        self.looking = projector
        self.projector = Windows(projector, self.made, self.hidden_size, dtype, device)
        self.ignored = tuple(f"encoder.{name}" for name in self.encoder.unused)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        lengths = tensors["audio_frames"].tolist()
        rows = self.encoder(tensors["input_features"].to(self.dtype), lengths)
        windows = [
            F.pad(one, (0, 0, 0, -len(one) % self.seen)).view(-1, self.seen, rows.shape[1]) for one in rows.split(lengths)
        ]
        # sound by sound: the bits of torch's attention depend on how many windows there are
        return [self.projector(one).mul_(self.spec.embed_scale) for one in windows]  # a factor of all that the decoder is given

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._rows(rows) * self.encoder.spec.inputs * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, work: Work) -> int:
        spec, size = self.looking, self.dtype.itemsize
        encoder = conformer_bytes(self.encoder.spec, self._rows(rows), self.dtype, work)
        looking = self._rows(rows) * (2 * spec.seen_width + 2 * spec.width) + rows * (3 * spec.width + spec.inner)
        return max(encoder, self.input_bytes(modality, rows) + looking * size)

    def _rows(self, rows: int) -> int:
        """Of the encoder, at most, that make so many."""
        return -(-rows // self.made) * self.seen


def _qformer_spec(q: Mapping[str, Any]) -> QFormerSpec:
    return QFormerSpec(
        width=count(q, "hidden_size"),
        heads=count(q, "num_attention_heads"),
        inner=count(q, "intermediate_size"),
        layers=count(q, "num_hidden_layers"),
        seen_width=count(q, "encoder_hidden_size"),
        act=q.get("hidden_act", "gelu"),
        eps=q.get("layer_norm_eps", 1e-12),
        every=count(q, "cross_attention_frequency"),
    )
