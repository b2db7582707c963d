"""The models of a server: loaded when a request names them, within a budget of bytes, and put to sleep when they are idle."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

from ..callers.errors import InputError, short_repr
from .errors import HttpError
from .eviction import Occupant, choose_victims
from .pooled_model import Limits, Loader, ModelLease, PooledAdapter, PooledModel, Work

M = TypeVar("M")
T = TypeVar("T")
_BACKOFF_SECONDS, _MAX_BACKOFF = 1.0, 30.0  # after a load that has failed; the pause doubles
_PATIENCE = 5.0  # seconds after which models that must make room take no new requests
_MAX_NAMES = 8  # in an error message
_log = logging.getLogger(__name__)


class ModelPool(Generic[M]):
    """The models of a server. All methods but `preload` are called in one event loop.

    Args:
        loader: loads models; None: they are loaded, and stay so.
    """

    def __init__(self, models: Sequence[PooledModel[M]], loader: Loader[M] | None = None, limits: Limits | None = None) -> None:
        self.models, self._loader, self._limits = models, loader, limits or Limits(0)
        self._by_name = {name: entry for entry in models for name in entry.names}
        self._turn = asyncio.Lock()  # one load at a time waits for memory, so that they come in order
        self._reserved = 0  # bytes for which models are being unloaded
        self._changed = asyncio.Event()

    @classmethod
    def fixed(cls, model: M, names: Sequence[str], adapters: dict[str, PooledAdapter]) -> ModelPool[M]:
        """Return the pool of one model that stays loaded."""
        return cls([PooledModel(names, adapters=adapters, model=model, state="loaded")])

    @property
    def is_fixed(self) -> bool:
        return self._loader is None

    @property
    def loaded(self) -> Iterator[M]:
        """The models that are in memory, those that sleep included."""
        return (entry.model for entry in self.models if entry.model is not None)

    def find(self, name: str | None) -> PooledModel[M]:
        """Return a model by any of its names or adapters, or the first one. Raise HttpError if there is none."""
        entry = self.models[0] if name is None else self.owner(name)
        if entry is None:
            names = [short_repr(other) for entry in self.models for other in (*entry.names, *entry.adapters)]
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            reason = f"the model {short_repr(name)} does not exist; this server has {', '.join(names[:_MAX_NAMES])}{more}"
            raise HttpError(404, reason, "model_not_found", "model")
        return entry

    def owner(self, name: str) -> PooledModel[M] | None:
        """Return the model that has this name or an adapter of this name, or None."""
        return self._by_name.get(name) or next((entry for entry in self.models if name in entry.adapters), None)

    async def acquire(self, name: str | None) -> ModelLease[M]:
        """Return a model that is loaded and awake, and stays so until the lease is released.

        Cancelling it leaves a load that has begun to others.

        Raises:
            HttpError: there is no such model, it cannot be loaded, or no other one can make room in time.
        """
        entry = self.find(name)
        if not self._is_ready(entry) and sum(other.waiting for other in self.models) >= self._limits.queue:
            reason = f"{self._limits.queue} requests wait for models (model_queue); try again later"
            raise HttpError(503, reason, "overloaded")
        start = time.monotonic()
        entry.waiting += 1
        try:
            while not self._is_ready(entry):
                if entry.is_retiring and entry.task is None:
                    await self._change(self._left(entry, start))
                    continue
                self._check_retry(entry)
                await self._finish(entry, entry.task or self._begin(entry, self._make_ready(entry, start)))
                if self._is_loaded(entry):  # also if it is to make room by now
                    break
            return self._lease(entry)
        finally:
            entry.waiting -= 1
            if not entry.waiting and entry.is_queued and entry.task is not None:
                entry.task.cancel()

    async def _finish(self, entry: PooledModel[M], task: Work) -> None:
        """Wait for a model's task. Raise its HttpError."""
        entry.watching += 1
        try:
            await asyncio.wait({task})
        finally:
            entry.watching -= 1
        refusal = None if task.cancelled() else task.result()
        if isinstance(refusal, HttpError):  # each request gets an exception of its own
            raise HttpError(refusal.status, refusal.message, refusal.code, refusal.param)

    def _lease(self, entry: PooledModel[M]) -> ModelLease[M]:
        assert entry.model is not None
        entry.leases += 1
        self._stop_timer(entry)
        return ModelLease(entry.model, lambda: self._release(entry))

    def _release(self, entry: PooledModel[M]) -> None:
        entry.leases -= 1
        entry.last_used = time.monotonic()
        if not entry.leases:
            self._watch_idle(entry)
            self._notify()

    def _is_ready(self, entry: PooledModel[M]) -> bool:
        return self._loader is None or (self._is_loaded(entry) and not entry.is_retiring)

    def _is_loaded(self, entry: PooledModel[M]) -> bool:
        assert self._loader is not None
        is_loaded = entry.state == "loaded" and entry.task is None
        return is_loaded and entry.model is not None and not self._loader.is_dead(entry.model)

    def _check_retry(self, entry: PooledModel[M]) -> None:
        """Raise HttpError shortly after a load that has failed."""
        if entry.failures and entry.task is None and time.monotonic() < entry.retry_at:
            raise _load_failed(entry.name)

    def _begin(self, entry: PooledModel[M], work: Coroutine[Any, Any, Exception | None]) -> Work:
        """Start the only task that changes a model's state."""
        task = asyncio.create_task(work)

        def end(_: object) -> None:
            entry.task = None
            self._notify()

        entry.task = task
        task.add_done_callback(end)
        return task

    async def _make_ready(self, entry: PooledModel[M], start: float) -> HttpError | None:
        """Load a model or wake it up, once there is room. Return an error if that fails.

        Args:
            start: time from which the wait for room counts.
        """
        assert self._loader is not None
        if entry.model is not None and self._loader.is_dead(entry.model):
            await self._unload(entry)
        if entry.state == "loaded" or not entry.waiting:
            return None
        entry.is_queued = True
        try:
            if not self._has_room(entry):
                async with self._turn:
                    await self._make_room(entry, start)
        except HttpError as error:
            return error
        finally:
            entry.is_queued = False
        entry.state = "loading"  # its memory is taken from here on
        return await self._load(self._loader, entry)

    def _has_room(self, entry: PooledModel[M]) -> bool:
        """Return whether a model fits beside those in memory and the one for which others are being unloaded."""
        needed = entry.num_bytes - entry.held_bytes
        return sum(other.held_bytes for other in self.models) + self._reserved + needed <= self._limits.max_bytes

    async def _load(self, loader: Loader[M], entry: PooledModel[M]) -> HttpError | None:
        started, model = time.monotonic(), entry.model
        try:
            if model is None:
                entry.model = await _in_thread(lambda: loader.load(entry.name), loader.close)
            else:
                await _in_thread(lambda: loader.wake_up(model))
        except Exception:
            _log.exception("the model %s cannot be loaded", entry.name)
            if model is not None:
                await self._unload(entry)
            entry.state, entry.failures = "not_loaded", entry.failures + 1
            entry.retry_at = time.monotonic() + min(_MAX_BACKOFF, _BACKOFF_SECONDS * 2 ** min(entry.failures - 1, 10))
            return _load_failed(entry.name)
        entry.state, entry.failures, entry.last_used = "loaded", 0, time.monotonic()
        entry.num_loads += model is None
        done = "was loaded" if model is None else "woke up"
        _log.info("the model %s %s in %.1f s", entry.name, done, time.monotonic() - started)
        self._watch_idle(entry)
        return None

    async def _make_room(self, entry: PooledModel[M], start: float) -> None:
        """Unload models until this one fits. Raise HttpError if that takes too long, counted from `start`."""
        needed = entry.num_bytes - entry.held_bytes
        try:
            while (victims := choose_victims(self._occupants(entry), needed, self._limits.max_bytes)) is None:
                left, patience = self._left(entry, start), start + _PATIENCE - time.monotonic()
                if patience <= 0:
                    self._retire(entry, needed)
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

    def _left(self, entry: PooledModel[M], start: float) -> float:
        """Return the seconds for which a model may still wait for room. Raise HttpError if there are none."""
        left = start + self._limits.wait_seconds - time.monotonic()
        if left <= 0:
            reason = f"the memory that the model {short_repr(entry.name)} needs is in use by models with requests"
            raise HttpError(503, f"{reason} (max_models_bytes); try again later", "overloaded")
        return left

    def _retire(self, entry: PooledModel[M], needed: int) -> None:
        """Let the models that would make room take no new requests, so that they become idle. Loads end before."""
        occupants = [
            Occupant(other.name, other.held_bytes, other.last_used, other is entry or other.task is not None)
            for other in self.models
        ]
        for name in choose_victims(occupants, needed, self._limits.max_bytes) or ():
            self.find(name).is_retiring = True

    def _occupants(self, entry: PooledModel[M]) -> list[Occupant]:
        """Return what is in memory. A model that makes itself ready is not unloaded for its own sake."""
        return [
            Occupant(other.name, other.held_bytes, other.last_used, other is entry or self._is_busy(other))
            for other in self.models
        ]

    def _is_busy(self, entry: PooledModel[M]) -> bool:
        return bool(entry.leases or entry.task or entry.watching or (entry.waiting and not entry.is_retiring))

    async def _change(self, seconds: float) -> None:
        """Wait until a model has become idle or its state has changed."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _unload(self, entry: PooledModel[M]) -> None:
        self._stop_timer(entry)
        model, loader = entry.model, self._loader
        assert model is not None
        assert loader is not None
        entry.model, entry.state = None, "unloading"
        try:
            await _in_thread(lambda: loader.close(model))
        except Exception:
            _log.exception("the model %s was not closed in order", entry.name)
        except asyncio.CancelledError:  # the server ends, which closes all models
            entry.model = model
            raise
        entry.state = "not_loaded"
        _log.info("the model %s was unloaded", entry.name)

    async def sleep(self, entry: PooledModel[M], level: int = 1) -> None:
        """Put a model to sleep until a request names it. One that is not loaded, or sleeps, stays as it is.

        Raises:
            InputError: it has requests.
        """
        while entry.task is not None:
            await asyncio.wait({entry.task})
        if entry.leases:
            raise InputError(f"requests being served: {entry.leases}; wait for them or end them, then put the model to sleep")
        if entry.state == "loaded":
            error = await asyncio.shield(self._begin(entry, self._fall_asleep(entry, level)))
            if error is not None:
                raise error

    async def _fall_asleep(self, entry: PooledModel[M], level: int) -> Exception | None:
        """Return the error if it stays awake: a request that was cancelled may still be in the engine."""
        self._stop_timer(entry)
        model, loader = entry.model, self._loader
        assert model is not None
        assert loader is not None
        try:
            await _in_thread(lambda: loader.sleep(model, level))
        except Exception as error:
            _log.debug("the model %s stays awake: %s", entry.name, error)
            self._watch_idle(entry)
            return error
        entry.state = "asleep"
        _log.info("the model %s sleeps", entry.name)
        return None

    def watch_idle(self) -> None:
        """Put the models that were loaded before the event loop ran to sleep in time."""
        for entry in self.models:
            self._watch_idle(entry)

    def _watch_idle(self, entry: PooledModel[M]) -> None:
        self._stop_timer(entry)
        seconds = self._limits.idle_seconds
        if seconds is not None and entry.state == "loaded" and not entry.leases:
            entry.timer = asyncio.get_running_loop().call_later(seconds, self._idle, entry)

    def _stop_timer(self, entry: PooledModel[M]) -> None:
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None

    def _idle(self, entry: PooledModel[M]) -> None:
        if entry.state == "loaded" and entry.task is None and not entry.leases and not entry.waiting:
            self._begin(entry, self._fall_asleep(entry, 1))

    def preload(self, names: Sequence[str]) -> None:
        """Load models before the event loop runs. Raise what the loader raises."""
        assert self._loader is not None
        for name in names:
            entry = self.find(name)
            entry.model = self._loader.load(entry.name)
            entry.state, entry.num_loads, entry.last_used = "loaded", 1, time.monotonic()


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
