"""The scheduler's state of one sequence."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum
from sys import maxsize

from ...callers.errors import InputError
from ...mm.rules import PromptAttention
from ...mm.types import MultiModalFeature, item_index
from ..bidirectional_spans import BidirectionalSpan, find_spans
from ..drafts.drafter import SequenceDrafts
from ..kv_cache.block_hash import extend_block_hashes, hash_root, hash_span, items_in_block
from ..kv_cache.block_pool import BlockIds
from ..pooling_requests import CrossAttentionWeights, keeps_rows
from ..sequence_data import SequenceData
from ..stats import SequenceStats
from ..types import CROSS, EngineRequest, ScheduledRequest, TokenOutput
from .encoder_cache import ItemUser
from .limits import check_features


class State(Enum):
    WAITING = "waiting"  # has tokens to compute, may have no blocks
    LOADING = "loading"  # has no blocks, and waits for a lookup in the connectors
    RUNNING = "running"  # has tokens to compute, and blocks for all of them
    IDLE = "idle"  # answered and held open


class Request(SequenceData):
    """A sequence: how many of the tokens are computed, and in which blocks.

    `num_computed <= len(token_ids)`; a waiting or running sequence has at least one token to compute.
    """

    def __init__(self, message: EngineRequest, arrival: int, block_ids: BlockIds) -> None:
        super().__init__(message)
        self.priority, self.arrival = message.priority, arrival
        self.block_ids = block_ids
        self.adapter = message.adapter
        self.root_hash = _root_hash(message, message.adapter)  # start of its chain of block hashes
        self.hold_open = message.hold_open
        self.state = State.WAITING
        self.num_computed = 0
        self.num_hashed_blocks = 0  # blocks whose hash the prefix cache has
        self.cross_written = not message.cross  # the keys and values of the encoder input are in the cache
        self.state_tokens = 0  # number of tokens that its states cover
        self.saved_states: list[tuple[int, bytes]] = []  # (blocks before it, hash) of the states that it cached, ascending
        self.turn_start = len(self.token_ids)  # tokens before the answer being generated
        self.next_feature = 0  # items before this one are computed and need no encoder rows any more
        self.times = {"arrival": time.perf_counter()}
        self.encode_seconds = 0.0
        self.cached_tokens: int | None = None  # prompt tokens found in the prefix cache when first admitted
        self.epoch = 0  # see ScheduledRequest
        self.looked_up = -1, 0  # epoch in which connectors were asked for its blocks, and how many were missing
        self.preemptions = 0
        self.repairs = 0  # repetition loops rolled back in this answer
        self.may_draft = True  # False after a step with guesses failed
        self.predicted: tuple[int, tuple[int, ...]] = (0, ())  # see `DraftedSequence`
        self.drafts: SequenceDrafts | None = None  # its proposers, see `Drafter`
        self.item_sources: dict[int, str] = {}  # item -> where its rows came from, as in SequenceStats
        self._block_hashes: list[bytes] = []  # of full blocks; extended by `block_hashes`
        self._span_hash = b""  # see `bind_hashes`

    @property
    def remaining(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def last_row(self) -> int:
        """Number of tokens that have encoder rows, if generated tokens take rows, too; else a large number."""
        last = self.features[-1] if self.features else None
        return maxsize if last is None or not last.geometry.ahead else last.range.end

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.turn_start

    @property
    def needs_all_rows(self) -> bool:
        """True if every prompt token has to be computed, cached or not.

        Its log probabilities, weights or hidden states are requested, or its items are chunks of a live stream, which are
        encoded in order.
        """
        if self.features and self.features[0].stream is not None:
            return True
        pooling = self.message.pooling
        if keeps_rows(pooling) or isinstance(pooling, CrossAttentionWeights):
            return True
        return self.message.params.prompt_logprobs is not None

    def items(self) -> Iterator[tuple[int, MultiModalFeature]]:
        """Yield (index, item) of all items, the encoder input first."""
        yield from self.cross_items()
        yield from enumerate(self.features)

    def cross_items(self) -> Iterator[tuple[int, MultiModalFeature]]:
        """Yield (index, item) of the encoder input."""
        yield from ((CROSS - number, item) for number, item in enumerate(self.message.cross))

    def item_user(self, index: int) -> ItemUser:
        return self.request_id, index

    def spans(self, attention: PromptAttention) -> Sequence[BidirectionalSpan]:
        """Return its bidirectional spans in order. `attention`: how the tokens of a prompt attend to each other."""
        return find_spans(attention, self.prompt_length, self.features)

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of all full blocks of its tokens."""
        root = self.root_hash + self._span_hash
        extend_block_hashes(self._block_hashes, root, self.token_ids, self.features, block_size)
        return self._block_hashes

    def bind_hashes(self, count: int) -> None:
        """Let all block hashes depend on the first `count` tokens and their items: earlier ones attend to later ones."""
        span = hash_span(self.token_ids[:count], items_in_block(self.features, 0, count)) if count else b""
        if span != self._span_hash:
            self._span_hash = span
            self._block_hashes.clear()

    def append(self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> None:
        """Add tokens and items; a new answer starts after them."""
        check_features(features, min(len(self.token_ids), self.last_row), len(self.token_ids) + len(token_ids))
        self.token_ids += token_ids
        self.features += features
        self.turn_start = len(self.token_ids)
        self.num_computed = min(self.num_computed, len(self.token_ids) - 1)

    def set_adapter(self, adapter: str) -> bool:
        """Switch the sequence to this adapter. Return False if it already had the adapter."""
        self.adapter = adapter
        before, self.root_hash = self.root_hash, _root_hash(self.message, adapter)
        if self.root_hash != before:
            self._block_hashes.clear()
        return self.root_hash != before

    def truncate(self, num_tokens: int, block_size: int) -> None:
        """Keep the first `num_tokens` tokens and the items among them.

        Raises:
            InputError: this cuts an item, or removes the token of the input of cross-attention.
        """
        if not 1 <= num_tokens <= len(self.token_ids):
            raise InputError(
                f"cannot truncate to {num_tokens} tokens; the sequence has {len(self.token_ids)} and must keep 1 or more"
            )
        last = self.message.cross[-1] if self.message.cross else None
        if last is not None and num_tokens <= last.range.offset:
            removed = "the " if len(self.message.cross) == 1 else "an "
            least = f"truncate to {last.range.offset + 1} or more, or begin a new session"
            raise InputError(f"cannot truncate to {num_tokens} tokens: that removes {removed}{last.modality}; {least}")
        kept = [feature for feature in self.features if feature.range.offset < num_tokens]
        for index, feature in enumerate(kept):
            start, end = feature.range.offset, feature.range.end - feature.geometry.ahead  # rows ahead go with generated tokens
            if end > num_tokens:
                modality, number = item_index(kept, index)
                valid = f"truncate to {start} or fewer, or to {end} or more" if start else f"truncate to {end} or more"
                raise InputError(f"cannot truncate to {num_tokens} tokens: that is inside {modality} {number}; {valid}")
        self.cut(num_tokens)
        del self._block_hashes[num_tokens // block_size :]
        self.turn_start = min(self.turn_start, num_tokens)
        self.rewind(min(self.num_computed, num_tokens - 1))

    def rewind(self, num_computed: int) -> None:
        """Mark the tokens from `num_computed` on, and the items among them, as not computed."""
        self.num_computed = num_computed
        self.next_feature = sum(feature.range.end <= num_computed for feature in self.features)

    def finish_reason(self, limit: int) -> tuple[str, int | None] | None:
        """Return (reason, stop token) if the last token ends the answer. `limit`: maximum length of the sequence in tokens."""
        params, last = self.message.params, self.token_ids[-1]
        if len(self.token_ids) >= self.last_row + self.hold_open:  # an open sequence uses its last row, too
            return "stop", last
        if params.structured_outputs is not None and last in self.message.eos_token_ids:
            return "stop", None  # the grammar allows EOS only where the answer may end
        if self.num_generated >= params.min_tokens:
            if not params.ignore_eos and last in self.message.eos_token_ids:
                return "stop", None
            if params.stop_token_ids and last in params.stop_token_ids:
                return "stop", last
        if len(self.token_ids) >= limit or (params.max_tokens is not None and self.num_generated >= params.max_tokens):
            return "length", None
        return None

    def room(self, limit: int) -> int:
        """Return how many more tokens the answer has room for. `limit` as in `finish_reason`."""
        max_tokens, room = self.message.params.max_tokens, min(limit, self.last_row + self.hold_open) - len(self.token_ids)
        return room if max_tokens is None else min(room, max_tokens - self.num_generated)

    def schedule(self, count: int, drafts: tuple[int, ...] = (), predict: bool = True) -> ScheduledRequest:
        """Return the message that computes the next `count` tokens, of which the last ones are `drafts`."""
        return ScheduledRequest(
            self.request_id,
            self.num_computed,
            count,
            self.block_ids,
            sample=count == self.remaining + len(drafts),
            write_cross=not self.cross_written,
            epoch=self.epoch,
            draft_token_ids=drafts,
            predict=predict,
        )

    def final_output(self, output: TokenOutput) -> TokenOutput:
        """Add the seconds of each stage and the statistics to the last output of an answer."""
        now = time.perf_counter()
        scheduled = self.times.get("scheduled", now)
        first = self.times.get("first_token", now)
        timings = {
            "queue": scheduled - self.times["arrival"],
            "encode": self.encode_seconds,
            "prefill": max(0.0, first - scheduled - self.encode_seconds),
            "decode_steps": now - first,
        }
        sources = tuple(self.item_sources.get(index, "prefix") for index in range(len(self.features)))
        drafts = () if self.drafts is None else self.drafts.stats()
        stats = SequenceStats(self.cached_tokens or 0, self.preemptions, sources, drafts)
        return replace(output, timings=timings, stats=stats)


def _root_hash(message: EngineRequest, adapter: str) -> bytes:
    return hash_root(message.salt, adapter, [item.hash for item in message.cross])
