"""The live state of one sequence in the scheduler. Knows no pool and no other sequence."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..mm.errors import InputError
from ..mm.types import MultiModalFeature
from .admission import check_features
from .encoder_cache import User
from .kv import Blocks
from .prefix_cache import extend_keys, root_key
from .types import EngineRequest, ScheduledRequest, SequenceStats

CROSS = -1  # index of the encoder side among a sequence's items


class State(Enum):
    WAITING = "waiting"  # has tokens to compute, no memory
    RUNNING = "running"  # has tokens to compute, and blocks for all known ones
    IDLE = "idle"  # answered and held open


@dataclass(eq=False)
class Request:
    """Tokens known so far, how many of them are in the cache, and where.

    `num_computed <= len(token_ids)`; a sequence that is to be sampled has at least one token to compute.
    """

    message: EngineRequest
    order: tuple[int, int]  # priority, arrival
    block_ids: Blocks
    token_ids: list[int]
    features: list[MultiModalFeature]
    root: bytes  # what its chain of block keys starts from
    hold_open: bool
    state: State = State.WAITING
    num_computed: int = 0
    num_named: int = 0  # blocks whose content is known to the prefix cache
    cross_done: bool = True  # the encoder side's keys and values are in the cache
    prompt_length: int = 0  # tokens it began with, less what was taken back of them
    turn_start: int = 0  # tokens before the answer being generated
    next_feature: int = 0  # items before this one are computed and not read any more
    keys: list[bytes] = field(default_factory=list)  # of full blocks, as far as they were asked for
    times: dict[str, float] = field(default_factory=dict)
    encode_seconds: float = 0.0
    cached_tokens: int | None = None  # of the prompt, when first admitted
    epoch: int = 0  # grows whenever a row that is being computed would not be its next one any more
    preemptions: int = 0
    repairs: int = 0  # loops taken back in this answer
    sources: dict[int, str] = field(default_factory=dict)  # item -> how its rows came to be

    @classmethod
    def new(cls, message: EngineRequest, arrival: int, empty: Blocks) -> Request:
        tokens = list(message.prompt_token_ids)
        root = _root(message, message.adapter)
        order = (message.priority, arrival)
        request = cls(message, order, empty, tokens, list(message.features), root, message.hold_open)
        request.prompt_length = request.turn_start = len(tokens)
        request.cross_done = message.cross is None
        request.times["arrival"] = time.perf_counter()
        return request

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def remaining(self) -> int:
        """Tokens known but not computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.turn_start

    @property
    def cross_rows(self) -> int:
        """Rows of the encoder side."""
        return 0 if self.message.cross is None else self.message.cross.range.num_embeds

    def item(self, index: int) -> MultiModalFeature:
        """By index, CROSS for the encoder side."""
        cross = self.message.cross
        return cross if index == CROSS and cross is not None else self.features[index]

    def items(self) -> Iterator[tuple[int, MultiModalFeature]]:
        """All items by index, the encoder side included."""
        if self.message.cross is not None:
            yield CROSS, self.message.cross
        yield from enumerate(self.features)

    def user(self, index: int) -> User:
        return self.request_id, index

    def block_keys(self, block_size: int) -> list[bytes]:
        """Of all full blocks of known tokens."""
        extend_keys(self.keys, self.root, self.token_ids, self.features, block_size)
        return self.keys

    def append(self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> None:
        """Continue with these tokens; a new answer starts after them."""
        check_features(features, len(self.token_ids), len(self.token_ids) + len(token_ids))
        self.token_ids += token_ids
        self.features += features
        self.turn_start = len(self.token_ids)
        self.num_computed = min(self.num_computed, len(self.token_ids) - 1)

    def adapt(self, adapter: str) -> bool:
        """From now on it is what that adapter makes of its tokens; False if it was."""
        known, self.root = self.root, _root(self.message, adapter)
        if self.root != known:
            self.keys.clear()
        return self.root != known

    def truncate(self, num_tokens: int, block_size: int) -> None:
        """Keep the first `num_tokens` tokens and the items among them; InputError when an item would be cut."""
        if not 1 <= num_tokens <= len(self.token_ids):
            raise InputError(f"truncate to {num_tokens} tokens: the sequence has {len(self.token_ids)}, keep 1 or more")
        kept = [feature for feature in self.features if feature.range.offset < num_tokens]
        check_features(kept, 0, num_tokens)
        self.epoch += 1
        del self.token_ids[num_tokens:]
        del self.keys[num_tokens // block_size :]
        self.features = kept
        self.turn_start = min(self.turn_start, num_tokens)
        self.prompt_length = min(self.prompt_length, num_tokens)
        self.rewind(min(self.num_computed, num_tokens - 1))

    def rewind(self, num_computed: int) -> None:
        """Tokens from here on are computed again, with the items among them."""
        self.num_computed = num_computed
        self.next_feature = sum(feature.range.end <= num_computed for feature in self.features)

    def finish_reason(self, limit: int) -> tuple[str, int | None] | None:
        """(reason, stop token) if the last token ends the answer; `limit` is the longest sequence there can be."""
        params, last = self.message.params, self.token_ids[-1]
        if params.structured_outputs is not None and last in self.message.eos_token_ids:
            return "stop", None  # which the grammar allowed, or nothing else
        if self.num_generated >= params.min_tokens:
            if not params.ignore_eos and last in self.message.eos_token_ids:
                return "stop", None
            if params.stop_token_ids and last in params.stop_token_ids:
                return "stop", last
        if len(self.token_ids) >= limit or (params.max_tokens is not None and self.num_generated >= params.max_tokens):
            return "length", None
        return None

    def outlasts(self, limit: int) -> bool:
        """Whether the next token, whichever it is, leaves room for one after it; `limit` as in `finish_reason`."""
        most = self.message.params.max_tokens
        return len(self.token_ids) + 1 < limit and (most is None or self.num_generated + 1 < most)

    def task(self, count: int) -> ScheduledRequest:
        """Its next `count` rows."""
        sample, cross = count == self.remaining, not self.cross_done
        return ScheduledRequest(self.request_id, self.num_computed, count, self.block_ids, sample, cross)

    def timings(self) -> dict[str, float]:
        """Seconds of each stage up to now."""
        now = time.perf_counter()
        scheduled = self.times.get("scheduled", now)
        first = self.times.get("first_token", now)
        return {
            "queue": scheduled - self.times["arrival"],
            "encode": self.encode_seconds,
            "prefill": max(0.0, first - scheduled - self.encode_seconds),
            "decode_steps": now - first,
        }

    def stats(self) -> SequenceStats:
        sources = tuple(self.sources.get(index, "prefix") for index in range(len(self.features)))
        return SequenceStats(self.cached_tokens or 0, self.preemptions, sources)


def _root(message: EngineRequest, adapter: str) -> bytes:
    return root_key(message.salt, adapter, message.cross.hash if message.cross else "")
