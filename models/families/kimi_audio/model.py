"""Kimi-Audio (arXiv 2504.18425), answers in text: Whisper's encoder, four rows joined and projected, Qwen2.

A token's embedding is the sum of those of two streams, audio and text. All tokens but those of audio are in one stream while
the other has the blank, whose embedding is therefore added to the whole table when weights are loaded. A row of audio
is the sum of its code's embedding and the projected rows, times the root of 2, plus the blank's embedding. Codes come from
another checkpoint, the tokenizer of GLM-4-Voice. They are left out: all are the blank, as in vLLM.

Source: the publisher's modelling and inference code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...audio.mel_encoder import LARGE, mel_encoder_spec
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...window_model import WindowModel, joined_projector

_BLANK = 151666
_TABLE = "model.embed_tokens.weight"
_EPS = 1e-6
_PROJECTOR = (("0", "linear_1"), ("3", "linear_2"), ("4", "last_norm"))


class BlankProjector(Projector):
    """A Projector with a norm after it, whose result is added to the embedding of the blank in both streams."""

    def __init__(self, spec: ProjectorSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        build = Builder(self, dtype, device)
        self.ends = build.norm("last_norm", spec.out, spec.eps, True), build.stored("blank", spec.out)
        self.root = float(torch.tensor(2.0, dtype=dtype).sqrt())  # rounded to the model's dtype, as published

    def forward(self, x: Tensor) -> Tensor:
        norm, blank = self.ends
        return norm(super().forward(x)).add_(blank.weight).mul_(self.root).add_(blank.weight)


class KimiAudio(WindowModel):
    """A model of audio. The layers that make speech are not used."""

    prefixes = (
        *((f"model.vq_adaptor.layers.{number}.", f"multi_modal_projector.{name}.") for number, name in _PROJECTOR),
        ("model.", "language_model."),
        ("lm_head.", "head.lm_head."),
    )
    ignored = ("language_model.mimo_layers.", "language_model.mimo_norm.", "mimo_output.")
    projector_class = BlankProjector

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        if config.get("tie_word_embeddings"):
            raise ConfigError("tie_word_embeddings in config.json must be false; a tied head is not supported for this model")
        text = decoder_spec({**config, "tie_word_embeddings": False}, STACKS["qwen2"])
        audio = mel_encoder_spec({**LARGE, **(config.get("audio_config") or {})})
        settings = {"projector_hidden_act": "silu"}
        projector = joined_projector(settings, audio, text.hidden_size, text.hidden_size, eps=config.get("rms_norm_eps", _EPS))
        super().__init__(text, audio, projector, dtype, device)
        self.blank = positive_int({"kimia_text_blank_token_id": _BLANK, **config}, "kimia_text_blank_token_id")

    def is_unused(self, name: str) -> bool:
        return name != _TABLE and super().is_unused(name)  # without a decoder, too, the projector needs the blank's embedding

    def convert_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Add the embedding of the blank to the table, and yield it for the projector."""
        for name, tensor in weights:
            if name == _TABLE and self.blank < len(tensor):
                blank = tensor[self.blank].to(self.dtype)
                yield "multi_modal_projector.blank", blank
                if self.language_model is not None:
                    yield name, tensor.to(self.dtype) + blank
            else:
                yield name, tensor
