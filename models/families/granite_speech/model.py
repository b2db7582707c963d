"""Granite Speech (arXiv 2505.08699): a conformer, a Q-Former that turns 15 rows into 3, a Granite decoder with LoRA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ....callers.errors import ConfigError
from ....checkpoints.config import positive_int
from ...audio.conformer import Conformer, ConformerSpec, conformer_bytes, conformer_spec
from ...decoder_model import TEXT_PREFIXES, DecoderModel
from ...interface import StepLimits
from ...layers.basic import TensorModule
from ...layers.builder import Builder
from ...layers.qformer import QFormer, QFormerSpec, qformer_spec
from ...text.decoder_config import decoder_spec
from ...text.stacks import STACKS

# defaults that the published config.json leaves out
ENCODER = {
    "input_dim": 160, "num_layers": 10, "hidden_dim": 1024, "feedforward_mult": 4, "num_heads": 8, "output_dim": 42,
    "context_size": 200, "max_pos_emb": 512, "conv_kernel_size": 15, "conv_expansion_factor": 2,
}  # fmt: skip
PROJECTOR = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "encoder_hidden_size": 1408, "cross_attention_frequency": 2,
}  # fmt: skip
STACK = replace(STACKS["granite"], defaults={**STACKS["granite"].defaults, "attention_multiplier": 1.0})


class WindowProjector(TensorModule):
    """`[windows, rows, width]` -> `[windows * queries, out]`: a Q-Former over each window."""

    def __init__(self, spec: QFormerSpec, queries: int, out: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        build = Builder(self, dtype, device)
        self.query = build.stored("query", 1, queries, spec.width)
        self.last = (build.linear(["linear"], spec.width, [out], True),)  # in a tuple: its only name is the checkpoint's
        self.qformer = QFormer(spec, dtype, device)

    def forward(self, windows: Tensor) -> Tensor:
        rows = self.qformer(self.query.weight.expand(len(windows), -1, -1), windows)
        return self.last[0](rows.flatten(0, 1))


class GraniteSpeech(DecoderModel):
    """A model of audio."""

    prefixes = (("model.encoder.", "encoder."), ("model.projector.", "projector."), *TEXT_PREFIXES)

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        config = {"tie_word_embeddings": True, "window_size": 15, "downsample_rate": 5, **config}
        # the published model ignores the config's logits_scaling
        super().__init__(decoder_spec(config, STACK, logit_scale=1.0), dtype, device)
        audio = self.encoder_spec(ENCODER | dict(config.get("encoder_config") or {}))
        self.window = positive_int(config, "window_size")
        self.queries = self.window // positive_int(config, "downsample_rate")
        self.qformer_spec = qformer_spec(PROJECTOR | dict(config.get("projector_config") or {}))
        width = self.qformer_spec.encoder_width
        if width != audio.row_width:
            raise ConfigError(f"encoder_hidden_size of projector_config is {width}; the encoder has {audio.row_width}")
        self.encoder = Conformer(audio, dtype, device)
        self.projector = WindowProjector(self.qformer_spec, self.queries, self.hidden_size, dtype, device)
        self.ignored = tuple(f"encoder.{name}" for name in self.encoder.unused)

    def encoder_spec(self, audio: Mapping[str, Any]) -> ConformerSpec:
        """Hook: read `encoder_config`."""
        return conformer_spec(audio)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        lengths = tensors["audio_frames"].tolist()
        rows = self.encoder(tensors["input_features"].to(self.dtype), lengths)
        items = [
            F.pad(item, (0, 0, 0, -len(item) % self.window)).view(-1, self.window, rows.shape[1])
            for item in rows.split(lengths)
        ]
        # per item, since the bits of torch's attention depend on the number of windows; scaled like token embeddings
        return [self.projector(windows).mul_(self.spec.embed_scale) for windows in items]

    def input_bytes(self, modality: str, rows: int) -> int:
        return self._encoder_rows(rows) * self.encoder.spec.inputs * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        spec, size = self.qformer_spec, self.dtype.itemsize
        encoder = conformer_bytes(self.encoder.spec, self._encoder_rows(rows), self.dtype, limits)
        qformer = self._encoder_rows(rows) * (2 * spec.encoder_width + 2 * spec.width) + rows * (3 * spec.width + spec.inner)
        return max(encoder, self.input_bytes(modality, rows) + qformer * size)

    def _encoder_rows(self, rows: int) -> int:
        """Return an upper bound of the conformer's rows for `rows` result rows."""
        return -(-rows // self.queries) * self.window
