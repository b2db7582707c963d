"""The base of models without a decoder: the vector of a token is its encoder row, unchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..callers.errors import InputError
from .interface import CacheSpec, ForwardBatch, StepLimits


class EncoderOnlyModel(nn.Module):
    """Implements `models.interface.Model` without `embed_multimodal`, the memory of the encoder, and weights.

    The declared KV cache is required by the engine and not used.
    """

    rope_axes = 1
    routes_by_modality: Mapping[str, int] = {}
    adapters: Sequence[str] = ()
    can_generate = recordable = normalizes = pools_items = False
    pooling = "tokens"
    vector_head = None

    def __init__(self, row_size: int, vocab_size: int, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.vocab_size, self.max_positions = dtype, vocab_size, max_positions
        self.hidden_size = self.row_size = self.vector_size = self.token_size = row_size
        self.cache_specs: Sequence[CacheSpec] = (CacheSpec("full", 1, 8, dtype),)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden = torch.zeros(len(batch.input_ids), self.row_size, dtype=self.dtype, device=batch.input_ids.device)
        if batch.embed_index is not None and batch.embed_rows is not None:
            hidden[batch.embed_index] = batch.embed_rows
        return hidden

    def project_hidden(self, hidden: Tensor, tokens: bool) -> Tensor:
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise InputError("this model has no vocabulary; <<use_encode>>", code="unsupported")

    def forward_bytes(self, limits: StepLimits) -> int:
        return 3 * limits.rows * self.row_size * self.dtype.itemsize

    def keep_encoders(self, modalities: Collection[str]) -> None:
        """Do nothing: the encoder is the whole model."""

    def choose_head(self, headers: Mapping[str, Tensor]) -> None:
        """Do nothing: there is no head."""

    def is_unused(self, name: str) -> bool:
        return False
