"""Runs a layer that drafts from hidden states after a step, and returns the tokens that it predicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.metadata import AttentionMetadata
from ...models.decoder_model import DecoderModel
from ...models.interface import ForwardBatch, Model
from .draft_cache import DraftCache
from .predictor import ComputedPart
from .sequence_state import SequenceState


class DraftLayer(Protocol):
    """A layer that drafts tokens from hidden states."""

    def combine(self, model: DecoderModel, states: Tensor) -> Tensor:
        """Return hidden states `[rows, hidden]` for `draft`, from what a step kept of each row."""

    def draft(self, model: DecoderModel, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """Return what `DecoderModel.draft` returns."""

    def next_token(self, model: DecoderModel, state: Tensor) -> int:
        """Return the likeliest token after a row of `draft`."""

    def masks(self, count: int) -> tuple[list[int], Tensor] | None:
        """Return `count` mask tokens and hidden states `[count, hidden]`; None for a layer that has no mask token."""


class MtpDrafting:
    """The first layer for multi-token prediction, which is a part of the model."""

    def combine(self, model: DecoderModel, states: Tensor) -> Tensor:
        return states

    def draft(self, model: DecoderModel, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        return model.draft(batch, hidden)

    def next_token(self, model: DecoderModel, state: Tensor) -> int:
        return int(model.compute_logits(state)[0].float().cpu().numpy().argmax())

    def masks(self, count: int) -> None:
        return None


class MtpRunner:
    """Predicts `count` tokens after the known tokens. See `Predictor`.

    The first token is predicted from the step's hidden states, and each other one from the layer's result for the token before
    it. A layer with mask tokens predicts the others from mask tokens, in the same forward pass as the first.

    The layer's KV cache does not have rows that were never computed here, because the prefix cache had their
    keys; it does not attend to them.
    """

    def __init__(self, count: int, cache: DraftCache, device: torch.device) -> None:
        self._count, self.cache, self._device = count, cache, device
        self._layer: DraftLayer = MtpDrafting()

    def watch(self, batch: ForwardBatch) -> ForwardBatch:
        return batch

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def predict(self, model: Model, parts: Sequence[ComputedPart]) -> list[tuple[int, ...]]:
        assert isinstance(model, DecoderModel)
        keep = {part.sequence.request_id for part in parts}
        return [self._predict(model, part, keep) for part in parts]

    def free(self, request_id: str) -> None:
        self.cache.free(request_id)

    def load(self, model: Model) -> None:
        """Do nothing: the layer is a part of the model."""

    def sleep(self) -> None:
        self.cache.clear()

    def wake_up(self, model: Model) -> None:
        self.cache.allocate()

    def _predict(self, model: DecoderModel, part: ComputedPart, keep: set[str]) -> tuple[int, ...]:
        """Compute the layer for the rows of a step whose next token is known. Return predictions if a token was sampled."""
        sequence, task = part.sequence, part.task
        first = task.num_computed
        tokens = sequence.token_ids[first + 1 : first + 1 + task.num_tokens]
        if not tokens:
            return ()
        if self.cache.grow(sequence.request_id, first + len(tokens) + self._count, keep) is None:
            return ()
        hidden = self._layer.combine(model, part.states[: len(tokens)])
        masks = self._layer.masks(self._count - 1) if task.sample else None
        if masks is not None:
            states = self._run(model, sequence, [*tokens, *masks[0]], first, torch.cat((hidden, masks[1])))
            return self._predict_at_once(model, sequence, first + len(tokens), states[len(tokens) - 1 :])
        states = self._run(model, sequence, tokens, first, hidden)
        if not task.sample:
            return ()
        position, row, predicted = first + len(tokens), states[-1:], list[int]()
        while True:
            predicted.append(self._layer.next_token(model, row))
            if len(predicted) == self._count:
                return tuple(predicted)
            row = self._run(model, sequence, predicted[-1:], position, row)
            position += 1

    def _predict_at_once(self, model: DecoderModel, sequence: SequenceState, stop: int, states: Tensor) -> tuple[int, ...]:
        """Return the predictions after the known rows, which end at `stop`. `states`: of the last one and the mask tokens."""
        rows = self.cache.get(sequence.request_id)
        assert rows is not None
        rows.stop = stop  # drops the keys of mask tokens, which later tokens must not read
        return tuple(self._layer.next_token(model, row) for row in states.split(1))

    def _run(self, model: DecoderModel, sequence: SequenceState, tokens: Sequence[int], first: int, hidden: Tensor) -> Tensor:
        """Return the layer's hidden states `[rows, hidden]` for these tokens, whose hidden states are at `first` and after."""
        size, stop, rows = self.cache.block_size, first + len(tokens), self.cache.get(sequence.request_id)
        assert rows is not None
        if first > rows.stop:
            rows.start = first
        rows.start, rows.stop = min(rows.start, first), stop
        table, indices = torch.tensor(rows.blocks[: -(-stop // size)], dtype=torch.int32), torch.arange(first, stop)
        positions = np.empty((len(sequence.positions), len(tokens)), dtype=np.int64)
        sequence.fill_positions(positions, first)
        key_range = None
        if rows.start:
            key_range = torch.stack((torch.full_like(indices, rows.start), indices + 1)).to(self._device)
        meta = AttentionMetadata(
            query_start_loc=(0, len(tokens)),
            seq_lens=(stop,),
            block_tables=table[None].to(self._device),
            slot_mapping=(table.long()[indices // size] * size + indices % size).to(self._device),
            block_size=size,
            key_range=key_range,
        )
        ids, axes = torch.tensor(tokens, device=self._device), torch.from_numpy(positions).to(self._device)
        return self._layer.draft(model, ForwardBatch(ids, axes, [meta], self.cache.tensors), hidden)
