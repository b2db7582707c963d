"""MOSS-Transcribe-Diarize: a Whisper encoder over windows of 30 s, four rows joined to one and normed, Qwen3.

Sources: the class of transformers 5.23; vLLM's moss_transcribe_diarize.py (the publisher's names).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ....checkpoints.config import positive_int
from ...audio.mel_encoder import mel_encoder_spec
from ...decoder_model import TEXT_PREFIXES
from ...layers.builder import Builder
from ...layers.connectors import Projector, ProjectorSpec
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...window_model import AUDIO_PREFIXES, WindowModel, config_sections

# a config.json without text_config, and values that audio_config leaves out
TEXT = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
AUDIO = {
    "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24, "num_mel_bins": 80,
}  # fmt: skip


class NormedProjector(Projector):
    """A projector with a LayerNorm of its result."""

    def __init__(self, spec: ProjectorSpec, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, dtype, device)
        self.after = (Builder(self, dtype, device).norm("norm", spec.out, spec.eps, True),)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.after[0](super().forward(x))
        return rows


class MossTranscribe(WindowModel):
    """A model of audio."""

    prefixes = (
        *AUDIO_PREFIXES,
        ("model.whisper_encoder.", "audio_tower."),
        ("model.vq_adaptor.layers.0.", "multi_modal_projector.linear_1."),
        ("model.vq_adaptor.layers.2.", "multi_modal_projector.linear_2."),
        ("model.vq_adaptor.layers.3.", "multi_modal_projector.norm."),
        *TEXT_PREFIXES,
    )
    projector_class = NormedProjector

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        audio = {**AUDIO, **(config.get("audio_config") or {})}
        text, audio = config_sections({**config, "audio_config": audio}, {} if config.get("text_config") else TEXT)
        decoder = decoder_spec({"tie_word_embeddings": True, **config, "text_config": text}, STACKS["qwen3"])
        tower, width = mel_encoder_spec(audio), decoder.hidden_size
        projector = ProjectorSpec(
            tower.width,
            width,
            ("linear_1", "linear_2"),
            group=positive_int({"audio_merge_size": 4, **config}, "audio_merge_size"),
            inner=width,
            act=config.get("projector_hidden_act", "silu"),
            bias=bool(config.get("projector_bias", True)),
            eps=float(text.get("rms_norm_eps", 1e-6)),
        )
        super().__init__(decoder, tower, projector, dtype, device)
