"""One model of a server's pool: its state, who loads it, and the lease that keeps it loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

State = Literal["not_loaded", "loading", "loaded", "asleep", "unloading"]
M = TypeVar("M")
Work = asyncio.Task[Exception | None]
"""Changes the state of a model, and returns the error if that fails."""


class Loader(Protocol[M]):
    """Loads models. The pool calls it in threads, for one model by one thread at a time."""

    def load(self, name: str) -> M: ...

    def close(self, model: M) -> None: ...

    def sleep(self, model: M, level: int) -> None: ...

    def wake_up(self, model: M) -> None: ...

    def is_dead(self, model: M) -> bool: ...


@dataclass(frozen=True)
class Limits:
    """Limits of a pool.

    Args:
        max_bytes: of all models in memory, as their plans say.
        idle_seconds: time without requests after which a model is put to sleep; None: never.
        wait_seconds: how long a load waits until busy models make room.
        queue: maximum number of requests that wait for models.
    """

    max_bytes: int
    idle_seconds: float | None = None
    wait_seconds: float = 60.0
    queue: int = 256


@dataclass(frozen=True)
class PooledAdapter:
    """An adapter of a pooled model.

    Args:
        folder: its files.
        is_pinned: it never makes room for other adapters.
        was_added: it is not of the configuration, but was loaded while the server runs.
    """

    folder: str
    is_pinned: bool = False
    was_added: bool = False


def as_pooled(folders: Mapping[str, str]) -> dict[str, PooledAdapter]:
    """Return the adapters of the configuration, of which the folders are given by name."""
    return {name: PooledAdapter(folder) for name, folder in folders.items()}


@dataclass(eq=False)
class PooledModel(Generic[M]):
    """One model of a pool.

    Args:
        names: those that requests may give; the first one is in responses.
        num_bytes: memory that it takes, as its plan says.
        asleep_bytes: what is left of that while it sleeps.
        facts: what is known of it before it is loaded.
        adapters: those that requests may name instead of the model, by name.
    """

    names: Sequence[str]
    num_bytes: int = 0
    asleep_bytes: int = 0
    facts: Any = None
    adapters: dict[str, PooledAdapter] = field(default_factory=dict)
    model: M | None = None
    state: State = "not_loaded"
    leases: int = 0
    waiting: int = 0  # requests that wait until it is loaded
    watching: int = 0  # those of them that wait for its task; they get the model that this loads, before it makes room
    last_used: float = 0.0
    task: Work | None = None  # loads, unloads, or puts it to sleep
    is_queued: bool = False  # its task waits for memory, and has not begun to load
    is_retiring: bool = False  # it takes no new requests, because another model needs its memory
    num_loads: int = 0
    failures: int = 0  # since the last successful load
    retry_at: float = 0.0
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def held_bytes(self) -> int:
        """Bytes that count in the budget now."""
        return {"not_loaded": 0, "asleep": self.asleep_bytes}.get(self.state, self.num_bytes)


class ModelLease(Generic[M]):
    """A model that stays loaded until `release`."""

    def __init__(self, model: M, release: Callable[[], None]) -> None:
        self.model, self._release = model, release
        self._is_released = False

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._release()
