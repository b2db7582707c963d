"""Qwen3-ASR: transcription with the AuT encoder and a Qwen3 decoder; its forced aligner, which times the words of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...audio.aut import AutEncoder, aut_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.classification import ClassificationHead
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS
from ...thinker import TALKER_PREFIXES, check_output_dim, thinker_config
from ..text_only.model import ClassificationModel

# defaults that the published config.json leaves out
AUDIO = {
    "num_mel_bins": 128, "encoder_layers": 24, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096, "d_model": 1024,
    "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480, "output_dim": 3584,
}  # fmt: skip


class Qwen3ASR(DecoderModel):
    """A model of audio. If positions have several axes, an item advances on all of them."""

    prefixes: Sequence[tuple[str, str]] = (
        ("thinker.audio_tower.", "audio_tower."),
        ("thinker.model.", "language_model."),
        ("thinker.lm_head.", "head.lm_head."),
        ("model.audio_tower.", "audio_tower."),
        ("model.multi_modal_projector.linear_1.", "audio_tower.proj1."),
        ("model.multi_modal_projector.linear_2.", "audio_tower.proj2."),
        *TEXT_PREFIXES,
    )
    ignored = TALKER_PREFIXES

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = thinker_config(config, tied=True, text_config={}, audio_config=AUDIO)
        super().__init__(decoder_spec(config, STACKS["qwen3"]), dtype, device)
        audio = aut_spec(config["audio_config"])
        check_output_dim(audio.out, self.hidden_size)
        self.audio_tower = AutEncoder(audio, dtype, device)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        return self.audio_tower(tensors["input_features"], tensors["audio_frames"].tolist())

    def input_bytes(self, modality: str, rows: int) -> int:
        return self.audio_tower.input_bytes(rows)

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return self.audio_tower.encoder_bytes(rows, limits)


class Qwen3ForcedAligner(ClassificationModel, Qwen3ASR):
    """Classifies each token of a prompt. The classes of the tokens `<timestamp>` after a word are times, in steps of 80 ms."""

    labels_tokens = True
    prefixes = (
        ("thinker.lm_head.", "classifier.out_proj."),
        ("score.", "classifier.out_proj."),
        *Qwen3ASR.prefixes,
    )
    keep_encoders = Qwen3ASR.keep_encoders

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        part = config.get("thinker_config", config)
        labels = {} if part.get("classify_num") is None else {"num_labels": part["classify_num"]}
        bias = bool(part.get("token_classification_bias", False))
        self.head = None
        self.classifier = ClassificationHead({**config, **labels}, self.hidden_size, bias, dtype, device)
