"""Stores of KV blocks around the toy engine: connectors with faults, and random histories of sessions."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, replace
from typing import Any

from sensorium.engine.connectors.interface import Connector
from sensorium.engine.connectors.memory import MemoryConnector
from sensorium.engine.connectors.tensor_store import TensorStore
from sensorium.engine.core.engine_core import EngineCore
from sensorium.engine.stats import TransferStats
from sensorium.engine.types import EngineRequest
from sensorium.mm.hashing import digest


def make_store(*connectors: Connector, name: str = "toy") -> TensorStore:
    return TensorStore("KV blocks", digest(name), connectors or [MemoryConnector(1 << 24)])


def stats_of(store: TensorStore, name: str = "memory") -> TransferStats:
    return next(stats for stats in store.stats if stats.connector == name)


def run(toy: Any, core: EngineCore, message: EngineRequest) -> tuple[list[int], int]:
    """Return the answer of a request and its cached tokens."""
    core.add(message)
    limit = time.monotonic() + 60
    outputs: list[Any] = []
    while not outputs or outputs[-1].finish_reason is None:
        assert time.monotonic() < limit
        outputs += [output for output in core.step().outputs if output.request_id == message.request_id]
    return toy.tokens_of(outputs), outputs[-1].stats.cached_tokens


class Faulty(MemoryConnector):
    """A connector that does one thing wrong, its `fault`."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(1 << 24)
        self.fault = fault

    def get(self, key: str, limit: int) -> bytes | None:
        data = super().get(key, limit)
        if data is None:
            return None
        if self.fault == "unreachable":
            raise TimeoutError("no answer")
        if self.fault == "flipped":
            return data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
        if self.fault == "truncated":
            return data[: len(data) // 2]
        if self.fault == "another":
            others = [other for other in self._entries if other != key]
            return self._entries[others[0]]
        if self.fault == "gone":
            return None
        if self.fault == "slow":
            time.sleep(0.05)
        return data


@dataclass(frozen=True)
class History:
    """A session: its first prompt, the tokens of its further turns, and whether it is cut back to the prompt before each."""

    message: EngineRequest
    turns: tuple[tuple[int, ...], ...]
    is_cut: bool


def random_histories(toy: Any, seed: int) -> list[History]:
    """Return 8 sessions whose prompts share prefixes."""
    rng = random.Random(seed)
    prefixes = [toy.random_prompt("", 30, seed=i).prompt_token_ids for i in range(3)]
    histories = []
    for i in range(8):
        tail = tuple(rng.randrange(4, 101) for _ in range(rng.randint(1, 20)))
        prompt = rng.choice(prefixes)[: rng.randint(0, 30)] + tail
        temperature = rng.choice([0.0, 1.0])
        message = toy.random_prompt(str(i), 1, max_tokens=rng.randint(1, 6))
        message = replace(message, prompt_token_ids=prompt, hold_open=True, seed=i)
        message = replace(message, params=replace(message.params, temperature=temperature))
        turns = tuple(tuple(rng.randrange(4, 101) for _ in range(rng.randint(1, 9))) for _ in range(rng.randint(0, 2)))
        histories.append(History(message, turns, rng.randint(0, 5) > 0))
    return histories


def play_histories(toy: Any, core: EngineCore, histories: list[History]) -> dict[str, list[int]]:
    """Play the turns of all sessions at the same time. Return the tokens of their answers."""
    tokens: dict[str, list[int]] = {}
    for round_ in range(3):
        for history in histories:
            name = history.message.request_id
            if round_ == 0:
                core.add(history.message)
            elif len(history.turns) >= round_:
                if history.is_cut:
                    core.truncate(name, len(history.message.prompt_token_ids))
                core.append(name, history.turns[round_ - 1])
        for name, outputs in toy.drain(core, 50_000).items():
            tokens.setdefault(name, []).extend(toy.tokens_of(outputs))
    for history in histories:
        core.abort(history.message.request_id)
    toy.assert_empty(core)
    return tokens
