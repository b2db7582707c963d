"""Runs an EAGLE-3 head after each step, on hidden states of three layers of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...models.decoder_model import DecoderModel
from ...models.interface import ForwardBatch, HiddenCapture, Model
from ...models.text.eagle3 import Eagle3Head
from .draft_cache import DraftCache
from .mtp_runner import MtpRunner


class Eagle3Drafting:
    """The head as a `DraftLayer`."""

    def __init__(self, head: Eagle3Head) -> None:
        self.head = head

    def combine(self, model: DecoderModel, states: Tensor) -> Tensor:
        return self.head.combine(states)

    def draft(self, model: DecoderModel, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        return self.head.draft(batch, hidden)

    def next_token(self, model: DecoderModel, state: Tensor) -> int:
        return self.head.next_token(state)

    def masks(self, count: int) -> tuple[list[int], Tensor] | None:
        token = self.head.spec.mask_token
        return None if token is None else ([token] * count, self.head.mask_states(count))


class Eagle3Runner(MtpRunner):
    """See MtpRunner. `load_head`: returns the head with its weights for a model."""

    def __init__(
        self,
        count: int,
        cache: DraftCache,
        device: torch.device,
        empty: Eagle3Head,
        width: int,
        load_head: Callable[[DecoderModel], Eagle3Head],
    ) -> None:
        """`empty`: the head on the meta device. `width`: of the model's hidden states."""
        super().__init__(count, cache, device)
        self._empty, self._width, self._load_head = empty, width, load_head
        self._kept: Tensor | None = None

    def watch(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch of a step, which also keeps the hidden states of the head's layers."""
        layers, width, rows = self._empty.spec.layers, self._width, len(batch.input_ids)
        kept = self._kept = torch.empty(rows, len(layers) * width, dtype=self._empty.fc.dtype, device=self._device)
        parts = kept.split(width, 1)
        captures = [HiddenCapture(0, layer, part) for layer, part in zip(layers, parts, strict=True)]
        return replace(batch, hidden_captures=(*batch.hidden_captures, *captures))

    def states(self, hidden: Tensor) -> Tensor:
        assert self._kept is not None
        kept, self._kept = self._kept, None
        return kept

    def load(self, model: Model) -> None:
        assert isinstance(model, DecoderModel)
        self._layer = Eagle3Drafting(self._load_head(model))

    def sleep(self) -> None:
        super().sleep()
        self._layer, self._kept = Eagle3Drafting(self._empty), None

    def wake_up(self, model: Model) -> None:
        super().wake_up(model)
        self.load(model)
