"""The models of a server: loaded when a request names them, within a budget of bytes, and put to sleep when they are idle."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from ..callers.errors import InputError, short_repr
from .errors import HttpError
from .eviction import Occupant, choose_victims

State = Literal["not_loaded", "loading", "loaded", "asleep", "unloading"]
M = TypeVar("M")
T = TypeVar("T")
Work = asyncio.Task[Exception | None]
"""Changes the state of a model, and returns the error if that fails."""
_BACKOFF_SECONDS, _MAX_BACKOFF = 1.0, 30.0  # after a load that has failed; the pause doubles
_PATIENCE = 5.0  # seconds after which models that must make room take no new requests
_MAX_NAMES = 8  # in an error message
_log = logging.getLogger(__name__)


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


@dataclass(eq=False)
class PooledModel(Generic[M]):
    """One model of a pool.

    Args:
        names: those that requests may give; the first one is in responses.
        num_bytes: memory that it takes, as its plan says.
        asleep_bytes: what is left of that while it sleeps.
        facts: what is known of it before it is loaded.
    """

    names: Sequence[str]
    num_bytes: int = 0
    asleep_bytes: int = 0
    facts: Any = None
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


class ModelPool(Generic[M]):
    """The models of a server. All methods but `preload` are called in one event loop.

    Args:
        loader: loads models; None: they are loaded, and stay so.
    """

    def __init__(self, models: Sequence[PooledModel[M]], loader: Loader[M] | None = None, limits: Limits | None = None) -> None:
        self.models, self._loader, self._limits = models, loader, limits or Limits(0)
        self._by_name = {name: one for one in models for name in one.names}
        self._turn = asyncio.Lock()  # one load at a time waits for memory, so that they come in order
        self._reserved = 0  # bytes for which models are being unloaded
        self._changed = asyncio.Event()

    @classmethod
    def fixed(cls, model: M, names: Sequence[str]) -> ModelPool[M]:
        """Return the pool of one model that stays loaded."""
        return cls([PooledModel(names, model=model, state="loaded")])

    @property
    def is_fixed(self) -> bool:
        return self._loader is None

    @property
    def loaded(self) -> Iterator[M]:
        """The models that are in memory, those that sleep included."""
        return (one.model for one in self.models if one.model is not None)

    def find(self, name: str | None) -> PooledModel[M]:
        """Return a model by any of its names, or the first one. Raise HttpError if there is none."""
        found = self.models[0] if name is None else self._by_name.get(name)
        if found is None:
            names = [short_repr(one) for one in self._by_name]
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            reason = f"the model {short_repr(name)} does not exist; this server has {', '.join(names[:_MAX_NAMES])}{more}"
            raise HttpError(404, reason, "model_not_found", "model")
        return found

    async def acquire(self, name: str | None) -> ModelLease[M]:
        """Return a model that is loaded and awake, and stays so until the lease is released.

        Cancelling it leaves a load that has begun to others.

        Raises:
            HttpError: there is no such model, it cannot be loaded, or no other one can make room in time.
        """
        one = self.find(name)
        if not self._is_ready(one) and sum(other.waiting for other in self.models) >= self._limits.queue:
            reason = f"{self._limits.queue} requests wait for models (model_queue); try again later"
            raise HttpError(503, reason, "overloaded")
        start = time.monotonic()
        one.waiting += 1
        try:
            while not self._is_ready(one):
                if one.is_retiring and one.task is None:
                    await self._change(self._left(one, start))
                    continue
                self._check_retry(one)
                await self._finish(one, one.task or self._begin(one, self._make_ready(one, start)))
                if self._is_loaded(one):  # also if it is to make room by now
                    break
            return self._lease(one)
        finally:
            one.waiting -= 1
            if not one.waiting and one.is_queued and one.task is not None:
                one.task.cancel()

    async def _finish(self, one: PooledModel[M], task: Work) -> None:
        """Wait for a model's task. Raise its HttpError."""
        one.watching += 1
        try:
            await asyncio.wait({task})
        finally:
            one.watching -= 1
        refusal = None if task.cancelled() else task.result()
        if isinstance(refusal, HttpError):  # each request gets an exception of its own
            raise HttpError(refusal.status, refusal.message, refusal.code, refusal.param)

    def _lease(self, one: PooledModel[M]) -> ModelLease[M]:
        assert one.model is not None
        one.leases += 1
        self._stop_timer(one)
        return ModelLease(one.model, lambda: self._release(one))

    def _release(self, one: PooledModel[M]) -> None:
        one.leases -= 1
        one.last_used = time.monotonic()
        if not one.leases:
            self._watch_idle(one)
            self._notify()

    def _is_ready(self, one: PooledModel[M]) -> bool:
        return self._loader is None or (self._is_loaded(one) and not one.is_retiring)

    def _is_loaded(self, one: PooledModel[M]) -> bool:
        assert self._loader is not None
        is_loaded = one.state == "loaded" and one.task is None
        return is_loaded and one.model is not None and not self._loader.is_dead(one.model)

    def _check_retry(self, one: PooledModel[M]) -> None:
        """Raise HttpError shortly after a load that has failed."""
        if one.failures and one.task is None and time.monotonic() < one.retry_at:
            raise _load_failed(one.name)

    def _begin(self, one: PooledModel[M], work: Coroutine[Any, Any, Exception | None]) -> Work:
        """Start the only task that changes a model's state."""
        task = asyncio.create_task(work)

        def end(_: object) -> None:
            one.task = None
            self._notify()

        one.task = task
        task.add_done_callback(end)
        return task

    async def _make_ready(self, one: PooledModel[M], start: float) -> HttpError | None:
        """Load a model or wake it up, once there is room. Return an error if that fails.

        Args:
            start: time from which the wait for room counts.
        """
        assert self._loader is not None
        if one.model is not None and self._loader.is_dead(one.model):
            await self._unload(one)
        if one.state == "loaded" or not one.waiting:
            return None
        one.is_queued = True
        try:
            if not self._has_room(one):
                async with self._turn:
                    await self._make_room(one, start)
        except HttpError as error:
            return error
        finally:
            one.is_queued = False
        one.state = "loading"  # its memory is taken from here on
        return await self._load(self._loader, one)

    def _has_room(self, one: PooledModel[M]) -> bool:
        """Return whether a model fits beside those in memory and the one for which others are being unloaded."""
        needed = one.num_bytes - one.held_bytes
        return sum(other.held_bytes for other in self.models) + self._reserved + needed <= self._limits.max_bytes

    async def _load(self, loader: Loader[M], one: PooledModel[M]) -> HttpError | None:
        started, model = time.monotonic(), one.model
        try:
            if model is None:
                one.model = await _in_thread(lambda: loader.load(one.name), loader.close)
            else:
                await _in_thread(lambda: loader.wake_up(model))
        except Exception:
            _log.exception("the model %s cannot be loaded", one.name)
            if model is not None:
                await self._unload(one)
            one.state, one.failures = "not_loaded", one.failures + 1
            one.retry_at = time.monotonic() + min(_MAX_BACKOFF, _BACKOFF_SECONDS * 2 ** min(one.failures - 1, 10))
            return _load_failed(one.name)
        one.state, one.failures, one.last_used = "loaded", 0, time.monotonic()
        one.num_loads += model is None
        done = "was loaded" if model is None else "woke up"
        _log.info("the model %s %s in %.1f s", one.name, done, time.monotonic() - started)
        self._watch_idle(one)
        return None

    async def _make_room(self, one: PooledModel[M], start: float) -> None:
        """Unload models until this one fits. Raise HttpError if that takes too long, counted from `start`."""
        needed = one.num_bytes - one.held_bytes
        try:
            while (victims := choose_victims(self._occupants(one), needed, self._limits.max_bytes)) is None:
                left, patience = self._left(one, start), start + _PATIENCE - time.monotonic()
                if patience <= 0:
                    self._retire(one, needed)
                await self._change(left if patience <= 0 else min(patience, left))
            self._reserved = needed
            unloads = [self._begin(other, self._unload(other)) for other in map(self.find, victims)]
            if unloads:
                await asyncio.wait(unloads)  # they go on if this task is cancelled
        finally:
            self._reserved = 0
            if any(other.is_retiring for other in self.models):
                for other in self.models:
                    other.is_retiring = False
                self._notify()

    def _left(self, one: PooledModel[M], start: float) -> float:
        """Return the seconds for which a model may still wait for room. Raise HttpError if there are none."""
        left = start + self._limits.wait_seconds - time.monotonic()
        if left <= 0:
            reason = f"the memory that the model {short_repr(one.name)} needs is in use by models with requests"
            raise HttpError(503, f"{reason} (max_models_bytes); try again later", "overloaded")
        return left

    def _retire(self, one: PooledModel[M], needed: int) -> None:
        """Let the models that would make room take no new requests, so that they become idle. Loads end before."""
        occupants = [
            Occupant(other.name, other.held_bytes, other.last_used, other is one or other.task is not None)
            for other in self.models
        ]
        for name in choose_victims(occupants, needed, self._limits.max_bytes) or ():
            self.find(name).is_retiring = True

    def _occupants(self, one: PooledModel[M]) -> list[Occupant]:
        """Return what is in memory. A model that makes itself ready is not unloaded for its own sake."""
        return [
            Occupant(other.name, other.held_bytes, other.last_used, other is one or self._is_busy(other))
            for other in self.models
        ]

    def _is_busy(self, one: PooledModel[M]) -> bool:
        return bool(one.leases or one.task or one.watching or (one.waiting and not one.is_retiring))

    async def _change(self, seconds: float) -> None:
        """Wait until a model has become idle or its state has changed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _unload(self, one: PooledModel[M]) -> None:
        self._stop_timer(one)
        model, loader = one.model, self._loader
        assert model is not None
        assert loader is not None
        one.model, one.state = None, "unloading"
        try:
            await _in_thread(lambda: loader.close(model))
        except Exception:
            _log.exception("the model %s was not closed in order", one.name)
        except asyncio.CancelledError:  # the server ends, which closes all models
            one.model = model
            raise
        one.state = "not_loaded"
        _log.info("the model %s was unloaded", one.name)

    async def sleep(self, one: PooledModel[M], level: int = 1) -> None:
        """Put a model to sleep until a request names it. One that is not loaded, or sleeps, stays as it is.

        Raises:
            InputError: it has requests.
        """
        while one.task is not None:
            await asyncio.wait({one.task})
        if one.leases:
            raise InputError(f"requests being served: {one.leases}; wait for them or end them, then put the model to sleep")
        if one.state == "loaded":
            error = await asyncio.shield(self._begin(one, self._fall_asleep(one, level)))
            if error is not None:
                raise error

    async def _fall_asleep(self, one: PooledModel[M], level: int) -> Exception | None:
        """Return the error if it stays awake: a request that was cancelled may still be in the engine."""
        self._stop_timer(one)
        model, loader = one.model, self._loader
        assert model is not None
        assert loader is not None
        try:
            await _in_thread(lambda: loader.sleep(model, level))
        except Exception as error:
            _log.debug("the model %s stays awake: %s", one.name, error)
            self._watch_idle(one)
            return error
        one.state = "asleep"
        _log.info("the model %s sleeps", one.name)
        return None

    def watch_idle(self) -> None:
        """Put the models that were loaded before the event loop ran to sleep in time."""
        for one in self.models:
            self._watch_idle(one)

    def _watch_idle(self, one: PooledModel[M]) -> None:
        self._stop_timer(one)
        seconds = self._limits.idle_seconds
        if seconds is not None and one.state == "loaded" and not one.leases:
            one.timer = asyncio.get_running_loop().call_later(seconds, self._idle, one)

    def _stop_timer(self, one: PooledModel[M]) -> None:
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None

    def _idle(self, one: PooledModel[M]) -> None:
        if one.state == "loaded" and one.task is None and not one.leases and not one.waiting:
            self._begin(one, self._fall_asleep(one, 1))

    def preload(self, names: Sequence[str]) -> None:
        """Load models before the event loop runs. Raise what the loader raises."""
        assert self._loader is not None
        for name in names:
            one = self.find(name)
            one.model = self._loader.load(one.name)
            one.state, one.num_loads, one.last_used = "loaded", 1, time.monotonic()


def _load_failed(name: str) -> HttpError:
    reason = f"the model {short_repr(name)} cannot be loaded now, and the server's log has the reason; try again later"
    return HttpError(503, reason, "model_load_failed", "model")


async def _in_thread(work: Callable[[], T], discard: Callable[[T], object] = lambda _: None) -> T:
    """Return the result of work, which may take minutes, and for which the end of the process does not wait.

    If the caller is cancelled, `discard` gets the result.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            else:
                discard(result)

    threading.Thread(target=run, name="sensorium-models", daemon=True).start()
    return await asyncio.wrap_future(future)
