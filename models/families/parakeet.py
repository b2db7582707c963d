"""Parakeet with a CTC head (arXiv 2305.05084): FastConformer, and the likeliest token of each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..audio.fastconformer import FastConformer, fastconformer_bytes, fastconformer_spec
from ..config import positive_int
from ..encoder_only import EncoderOnlyModel
from ..interface import StepLimits
from ..layers.linear import LmHead
from ..weights import check, fill

_PREFIXES = (("ctc_head.", "head.lm_head."),)
_ROWS = 256  # whose logits are computed at a time


class ParakeetCtc(EncoderOnlyModel):
    """A model of audio. The vector of a row is its likeliest token and the log probability of that."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        spec = fastconformer_spec(config.get("encoder_config") or {})
        vocab = positive_int({"vocab_size": 1025, **config}, "vocab_size")
        super().__init__(spec.width, vocab, spec.positions, dtype)
        self.encoder = FastConformer(spec, dtype, device)
        self.head = LmHead(spec.width, vocab, None, dtype, device, bias=True)
        self.vector_size = self.token_size = 2
        self.ignored = tuple(f"encoder.{name}" for name in self.encoder.unused)

    def embed_multimodal(self, modality: str, tensors: Mapping[str, Any]) -> list[Tensor]:
        frames = tensors["audio_frames"].tolist()
        return list(self.encoder(tensors["input_features"], frames).split([self.encoder.spec.num_rows(n) for n in frames]))

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        """Return float32 `[n, 2]`: token and log probability."""
        parts = []
        for rows in hidden.split(_ROWS):
            logprob, token = self.head(rows).log_softmax(-1).max(-1)
            parts.append(torch.stack((token.float(), logprob), 1))
        return torch.cat(parts)

    def input_bytes(self, modality: str, rows: int) -> int:
        return rows * self.encoder.spec.factor * self.encoder.spec.mels * self.dtype.itemsize

    def encoder_bytes(self, modality: str, rows: int, limits: StepLimits) -> int:
        return fastconformer_bytes(self.encoder.spec, rows, self.dtype, limits)

    def is_unused(self, name: str) -> bool:
        return name in self.ignored

    def check_weights(self, headers: Mapping[str, Tensor]) -> None:
        check(self, headers.items(), _PREFIXES, self.ignored)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        fill(self, weights, _PREFIXES, self.ignored)
