"""The worker's copy of a sequence: its tokens, items and positions, and the state of its sampler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...mm.embeddings import PROMPT_EMBEDS
from ...mm.positions import mrope_positions
from ...mm.rules import CAUSAL, KeyOrder, PromptAttention
from ...mm.types import MultiModalFeature
from ..bidirectional_spans import BidirectionalSpan, find_spans
from ..pooling_requests import CrossAttentionWeights
from ..sequence_data import SequenceData
from ..types import EngineRequest, Logprob, RequestUpdate, ScheduledRequest
from .grammar import GrammarFactory
from .sampling_state import SamplingState, TokenRules


class PlacedSequence(SequenceData):
    """A sequence whose tokens have positions: what a batch of any model needs to know of it.

    Args:
        rope_axes: number of axes of a position, as the model declares.
        prompt_attention: as in SchedulerLimits; the tokens of a bidirectional span attend to each other.

    Attributes:
        positions: int64 `[axes, tokens]`, positions of the tokens that were not sampled; media_end: end of the last item.
        spans: bidirectional spans of the prompt, in order.
        key_order: places of the keys of the prompt's items and of the text before them; None: in the order of the tokens.
        cross_weights: float32 `[heads, tokens, encoder rows]`, the cross-attention weights of a request that returns them.
        kept_rows: vectors of all tokens, if the pooling needs them.
    """

    def __init__(self, request: EngineRequest, rope_axes: int, prompt_attention: PromptAttention = CAUSAL) -> None:
        super().__init__(request)
        self.adapter = request.adapter
        self.cross_weights: Tensor | None = None
        self.kept_rows: Tensor | None = None
        self._rope_axes, self.prompt_attention = rope_axes, prompt_attention
        self._compute_positions()

    @property
    def turn_start(self) -> int:
        """Tokens before its answer."""
        return self.prompt_length

    def items_in_step(self, task: ScheduledRequest) -> Iterator[MultiModalFeature]:
        """Yield the items whose encoder rows this step reads."""
        if task.write_cross:
            yield from self.message.cross
        start, stop = task.num_computed, task.num_computed + task.num_tokens
        if start < self.media_end:
            yield from (f for f in self.features if f.range.offset < stop and f.range.end > start)

    def _compute_positions(self) -> None:
        """Compute positions, the end of the last item, and bidirectional spans from the tokens and items."""
        placed = [(feature.range, feature.geometry) for feature in self.features]
        # sampled tokens are at their index plus the delta
        positions, self._position_delta = mrope_positions(len(self.token_ids), placed, self._rope_axes)
        self.positions: np.ndarray = positions.numpy()
        self.media_end = max((feature.range.end for feature in self.features), default=0)
        self.spans: list[BidirectionalSpan] = find_spans(self.prompt_attention, self.prompt_length, self.features)
        order = self.prompt_attention.key_order
        self.key_order: KeyOrder | None = None if order is None else order(self.features)

    def fill_positions(self, out: np.ndarray, start: int) -> None:
        """Write the positions of the tokens from `start` on into `[axes, n]`."""
        num_positions = self.positions.shape[1]
        stop = start + out.shape[1]
        if start < num_positions:
            out[:, : num_positions - start] = self.positions[:, start:stop]
        if stop > num_positions:
            first = max(start, num_positions)
            out[:, first - start :] = np.arange(first + self._position_delta, stop + self._position_delta)


class SequenceState(PlacedSequence):
    """One sequence of the model that answers. Its answer begins at `turn_start`.

    Args:
        rope_axes, prompt_attention: as in PlacedSequence.
        grammars: compiles the grammar if the request asks for one.

    Attributes:
        prompt_logprobs: log probabilities of the prompt so far; None once they were returned.
        pooled_rows: number of tokens -> float32 `[modes, hidden]`, states of the poolings before and after the last step.
        decodings: number of tokens -> state of `SupportsRowDecoding`, before and after the last step.
    """

    def __init__(
        self,
        request: EngineRequest,
        rope_axes: int,
        prompt_attention: PromptAttention = CAUSAL,
        grammars: GrammarFactory | None = None,
    ) -> None:
        super().__init__(request, rope_axes, prompt_attention)
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = []
        heads = request.pooling.heads if isinstance(request.pooling, CrossAttentionWeights) else ()
        self.pooled_rows: dict[int, Tensor] = {}
        self.decodings: dict[int, Any] = {}
        self.predicts = True  # False after its Predictor failed
        if heads and request.cross:
            self.cross_weights = torch.zeros(len(heads), self.prompt_length, self.cross_rows)
        end_ids = tuple(dict.fromkeys((*request.params.stop_ids, *request.eos_token_ids)))
        num_embeds = max((item.range.end for item in request.features if item.modality == PROMPT_EMBEDS), default=0)
        rules = TokenRules(end_ids, request.bad_word_ids, request.eos_token_ids, num_embeds)
        self.sampling = SamplingState(request.params, self.token_ids, self.prompt_length, request.seed, rules, grammars)
        self._forbidden_words: tuple[tuple[int, ...], ...] = ()  # that the rest of the answer must not contain

    @property
    def turn_start(self) -> int:
        return self.sampling.turn_start

    def update(self, change: RequestUpdate) -> None:
        """Roll back to `change.num_tokens`, then append. Positions become those of a prompt with these tokens and items."""
        turn_start = min(self.turn_start, change.num_tokens)
        self.cut(change.num_tokens)
        self.features += change.features
        self.token_ids += change.token_ids
        self._forbidden_words = () if change.restart else (*self._forbidden_words, *change.forbid)
        self.adapter = self.adapter if change.adapter is None else change.adapter
        self.sampling.rollback(
            change.num_tokens,
            len(self.token_ids) if change.restart else turn_start,
            (*self.message.bad_word_ids, *self._forbidden_words),
        )
        self._compute_positions()

    def begin_again(self) -> None:
        """Collect the log probabilities of the prompt anew, because all its tokens are computed again, with other weights.

        In a session, those of its first answer are final.
        """
        if self.prompt_logprobs is not None or not self.message.hold_open:
            self.prompt_logprobs = []

    def forget(self, num_tokens: int) -> None:
        """Drop the tokens after the first `num_tokens`: the core has not taken them."""
        del self.token_ids[num_tokens:]
        self.sampling.rollback(num_tokens, self.turn_start, (*self.message.bad_word_ids, *self._forbidden_words))
