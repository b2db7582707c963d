"""The worker's copy of a sequence: its tokens, items and positions, and the state of its sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...mm.embeddings import PROMPT_EMBEDS
from ...mm.positions import mrope_positions
from ...mm.types import MultiModalFeature
from ..bidirectional_spans import BidirectionalSpan, find_spans, media_runs
from ..types import CROSS, EngineRequest, Logprob, RequestUpdate, ScheduledRequest
from .grammar import GrammarFactory
from .key_order import KeyOrder, order_keys
from .sampling_state import SamplingState


class SequenceState:
    """One sequence, from its EngineRequest on.

    Args:
        rope_axes: number of axes of a position, as the model declares.
        prompt_attention: as in SchedulerLimits; the tokens of a bidirectional span attend to each other.
        grammars: compiles the grammar if the request asks for one.

    Attributes:
        token_ids: all tokens that are known on the host; the answer begins at `turn_start`.
        prompt_length: tokens that the sequence began with; fewer after a rollback into them.
        positions: int64 `[axes, tokens]`, positions of the tokens that were not sampled; media_end: end of the last item.
        spans: bidirectional spans of the prompt, in order.
        key_order: places of the keys of the prompt's items and of the text before them; None: in the order of the tokens.
        prompt_logprobs: log probabilities of the prompt so far; None once they were returned.
        cross_weights: float32 `[heads, tokens, encoder rows]`, the cross-attention weights of a request that returns them.
        hidden_sums: number of tokens -> sum of their hidden states, before and after the last step of a mean pooling.
        kept_rows: first hidden state, or vectors of all tokens, if the pooling needs them.
        decodings: number of tokens -> state of `SupportsRowDecoding`, before and after the last step.
    """

    def __init__(
        self,
        request: EngineRequest,
        rope_axes: int,
        prompt_attention: str = "causal",
        grammars: GrammarFactory | None = None,
    ) -> None:
        self.request, self.adapter = request, request.adapter
        self.token_ids = list(request.prompt_token_ids)
        self.features = list(request.features)
        self.prompt_length = len(self.token_ids)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = []
        heads = () if request.pooling is None else request.pooling.cross_attention
        self.cross_weights: Tensor | None = None
        self.hidden_sums: dict[int, Tensor] = {}
        self.kept_rows: Tensor | None = None
        self.decodings: dict[int, Any] = {}
        if heads and request.cross is not None:
            self.cross_weights = torch.zeros(len(heads), self.prompt_length, request.cross.range.num_embeds)
        end_ids = tuple(dict.fromkeys((*request.params.stop_ids, *request.eos_token_ids)))
        self.sampling = SamplingState(
            request.params,
            self.token_ids,
            self.prompt_length,
            request.seed,
            end_ids,
            request.bad_word_ids,
            request.eos_token_ids,
            grammars,
            max((item.range.end for item in request.features if item.modality == PROMPT_EMBEDS), default=0),
        )
        self._rope_axes, self.prompt_attention = rope_axes, prompt_attention
        self._forbidden_words: tuple[tuple[int, ...], ...] = ()  # that the rest of the answer must not contain
        self._compute_positions()

    @property
    def turn_start(self) -> int:
        return self.sampling.turn_start

    def item(self, index: int) -> MultiModalFeature:
        """Return an item by index, CROSS for the input of cross-attention."""
        cross = self.request.cross
        return cross if index == CROSS and cross is not None else self.features[index]

    def items_in_step(self, task: ScheduledRequest) -> Iterator[MultiModalFeature]:
        """Yield the items whose encoder rows this step reads."""
        if task.write_cross:
            yield self.item(CROSS)
        start, stop = task.num_computed, task.num_computed + task.num_tokens
        if start < self.media_end:
            yield from (f for f in self.features if f.range.offset < stop and f.range.end > start)

    def update(self, change: RequestUpdate) -> None:
        """Roll back to `change.num_tokens`, then append. Positions become those of a prompt with these tokens and items."""
        turn_start = min(self.turn_start, change.num_tokens)
        del self.token_ids[change.num_tokens :]
        self.prompt_length = min(self.prompt_length, change.num_tokens)
        self.features = [f for f in self.features if f.range.offset < change.num_tokens] + list(change.features)
        self.token_ids += change.token_ids
        self._forbidden_words = () if change.restart else (*self._forbidden_words, *change.forbid)
        self.adapter = self.adapter if change.adapter is None else change.adapter
        self.sampling.rollback(
            change.num_tokens,
            len(self.token_ids) if change.restart else turn_start,
            (*self.request.bad_word_ids, *self._forbidden_words),
        )
        self._compute_positions()

    def _compute_positions(self) -> None:
        """Compute positions, the end of the last item, and bidirectional spans from the tokens and items."""
        placed = [(feature.range, feature.geometry) for feature in self.features]
        # sampled tokens are at their index plus the delta
        positions, self._position_delta = mrope_positions(len(self.token_ids), placed, self._rope_axes)
        self.positions: np.ndarray = positions.numpy()
        self.media_end = max((feature.range.end for feature in self.features), default=0)
        self.spans: list[BidirectionalSpan] = find_spans(self.prompt_attention, self.prompt_length, self.features)
        runs = media_runs(self.features) if self.prompt_attention == "bidirectional_media" else []
        self.key_order: KeyOrder | None = order_keys(runs) if len(runs) > 1 else None

    def fill_positions(self, out: np.ndarray, start: int) -> None:
        """Write the positions of the tokens from `start` on into `[axes, n]`."""
        known = self.positions.shape[1]
        stop = start + out.shape[1]
        if start < known:
            out[:, : known - start] = self.positions[:, start:stop]
        if stop > known:
            first = max(start, known)
            out[:, first - start :] = np.arange(first + self._position_delta, stop + self._position_delta)
