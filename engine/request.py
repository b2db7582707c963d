"""The live state of one sequence in the scheduler. Knows no pool and no other sequence."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..mm.errors import InputError
from ..mm.types import MultiModalFeature
from .encoder_cache import User
from .kv import Blocks
from .types import EngineRequest


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
    state: State = State.WAITING
    num_computed: int = 0
    turn_start: int = 0  # tokens before the answer being generated
    next_feature: int = 0  # items before this one are computed and released
    times: dict[str, float] = field(default_factory=dict)
    encode_seconds: float = 0.0

    @classmethod
    def new(cls, message: EngineRequest, arrival: int, empty: Blocks) -> Request:
        tokens = list(message.prompt_token_ids)
        request = cls(message, (message.priority, arrival), empty, tokens, list(message.features), turn_start=len(tokens))
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
    def open_features(self) -> range:
        return range(self.next_feature, len(self.features))

    def user(self, index: int) -> User:
        return self.request_id, index

    def append(self, token_ids: Sequence[int], features: Sequence[MultiModalFeature]) -> None:
        """Continue with these tokens; a new answer starts after them."""
        check_features(features, len(self.token_ids), len(self.token_ids) + len(token_ids))
        self.token_ids += token_ids
        self.features += features
        self.turn_start = len(self.token_ids)
        self.num_computed = min(self.num_computed, len(self.token_ids) - 1)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and the items among them; InputError when an item would be cut."""
        if not 1 <= num_tokens <= len(self.token_ids):
            raise InputError(f"truncate to {num_tokens} tokens: the sequence has {len(self.token_ids)}, keep 1 or more")
        kept = [feature for feature in self.features if feature.range.offset < num_tokens]
        check_features(kept, 0, num_tokens)
        del self.token_ids[num_tokens:]
        self.features = kept
        self.next_feature = min(self.next_feature, len(kept))
        self.turn_start = min(self.turn_start, num_tokens)
        self.num_computed = min(self.num_computed, num_tokens - 1)

    def finish_reason(self, limit: int) -> tuple[str, int | None] | None:
        """(reason, stop token) if the last token ends the answer; `limit` is the longest sequence there can be."""
        params, last = self.message.params, self.token_ids[-1]
        if self.num_generated >= params.min_tokens:
            if not params.ignore_eos and last in self.message.eos_token_ids:
                return "stop", None
            if params.stop_token_ids and last in params.stop_token_ids:
                return "stop", last
        if len(self.token_ids) >= limit or (params.max_tokens is not None and self.num_generated >= params.max_tokens):
            return "length", None
        return None

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


def check_features(features: Sequence[MultiModalFeature], start: int, stop: int) -> None:
    """InputError unless the items lie in order, apart, inside the tokens `[start, stop)`, as long as their grids say."""
    for index, feature in enumerate(features):
        if feature.range.offset < start or feature.range.end > stop:
            where = f"[{feature.range.offset}, {feature.range.end})"
            raise InputError(f"{feature.modality} {index}: its tokens {where} are not inside [{start}, {stop})")
        rows, slots = feature.geometry.num_embeds, feature.range.num_embeds
        if rows != slots:
            raise InputError(f"{feature.modality} {index}: {slots} placeholder tokens stand for {rows} encoder rows")
        start = feature.range.end
