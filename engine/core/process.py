"""Client of a core in a child process, which runs `server`. Each verb is one message and one reply."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import ConfigError, EngineDeadError, InputError
from ...mm.types import MultiModalFeature
from ...models.registry import registered_models
from ..config import EngineConfig
from ..core_info import CoreInfo
from ..logits_processors import import_path
from ..scheduler.quarantine import Quarantine
from ..stats import EngineStats
from ..types import CoreOutputs, EngineRequest, LoadedAdapter, TokenOutput
from .channel import Packed, discard, duplicate, pack
from .child import Standby
from .death_watch import kill_when_stopped, watch
from .errors_as_data import restore_error
from .staged_weights import StagedWeights

_RESTART_SECONDS = 600.0  # time in which the child may die `engine_restarts` times
PACKAGE = __name__.partition(".")[0]
_log = logging.getLogger(__name__)


class ProcessCore:
    """`CoreClient` of a core in a child process. One thread uses the verbs; `close` is thread-safe.

    If the child dies, the current verb and all later ones raise EngineDeadError until `restart`, except `abort` and `close`,
    which do nothing. If this process dies, the child ends at once. Items that were being encoded when the child died are
    refused for `quarantine_seconds`; the child names them in memory that both processes share.

    Raises:
        ConfigError, CheckpointError: see `load_engine`.
        EngineDeadError: the child ended while it loaded the model.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._quarantine, self._restarts = Quarantine(config.quarantine_seconds), deque[float](maxlen=0)
        self._closed, self._standby = False, Standby()
        self._end_standby = weakref.finalize(self, self._standby.close)
        self._on_end: Callable[[], object] | None = None
        self._adapters: dict[str, tuple[str, int]] = {}  # identity -> folder, and how often it was loaded
        self._updates = StagedWeights()
        self._bodies: tuple[str, ...] = ()  # of CoreInfo
        self.info, self.config, self._stats = self._launch(config)
        self._restarts = deque(maxlen=config.engine_restarts)

    def _launch(self, config: EngineConfig) -> tuple[CoreInfo, EngineConfig, EngineStats]:
        """Start a child and load the model there. A new one computes with the bodies of the first."""
        self._child = self._standby.take(self._bodies)
        self._channel, self._activity, self._dead = self._child.channel, self._child.activity, ""
        self._registered: set[str] = set()  # logits processors that are registered in the child
        self._finalizer = weakref.finalize(self, self._child.kill)  # a child that loads would not hear that it shall end
        if config.num_ranks > 1 or config.encoder_listen:  # other ranks, which this child watches, or other engines wait for it
            kill_when_stopped(self.pid)
        _cores.add(self)  # this process may be forked while the child loads
        level = logging.getLogger(PACKAGE).getEffectiveLevel()
        rows = [(name, row.model, row.processing) for name, row in registered_models().items()]
        loaded: tuple[CoreInfo, EngineConfig, EngineStats]
        try:
            loaded = self._ask("load", config, torch.get_num_threads(), level, rows)
        except BaseException:
            if not self._dead:
                self._kill()
            raise
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._child.end)
        self._bodies = self._bodies or loaded[0].bodies
        if config.engine_standby and config.engine_restarts and not self._closed:
            try:
                self._standby.renew(self._bodies)
            except OSError as error:  # too many processes or open files: the engine does without
                _log.warning("no process can stand in reserve for the engine's (%s)", error)
            if self._closed:  # meanwhile
                self._standby.close()
        return loaded

    @property
    def restart(self) -> Callable[[], None] | None:
        """See `CoreClient`. None while the child runs, and after too many restarts in the last 10 minutes."""
        limit = self._restarts.maxlen or 0
        recent = sum(time.monotonic() - started < _RESTART_SECONDS for started in self._restarts)
        return self._restart if self._dead and not self._closed and recent < limit else None

    def _restart(self) -> None:
        """Start a new child after the last one has died. Raise as the constructor does."""
        self._restarts.append(time.monotonic())
        try:
            info, _, self._stats = self._launch(self.config)
            if info != self.info:
                raise ConfigError("the engine's new process has other limits than the last one; make a new engine")
            if self._updates:
                self._update_again()
            if self._adapters:
                self._ask("reload_adapters", self._adapters)
            if self._on_end is not None:
                watch(self.pid, self._on_end)
        except BaseException:
            if not self._dead:
                self._kill()
            raise

    def _update_again(self) -> None:
        """Give a new child the weights that the last one had."""
        for message in self._updates.messages():
            self._exchange(message)
        self._ask("sleep")
        self._ask("wake_up")

    @property
    def pid(self) -> int:
        return self._child.process.pid

    @property
    def stats(self) -> EngineStats:
        if not self._closed:
            self._stats = self._ask("stats")
        return self._stats

    def bind_thread(self, num_threads: int) -> None:
        """Do nothing: the verbs run in the child."""

    def watch(self, on_end: Callable[[], object]) -> None:
        self._on_end = on_end
        watch(self.pid, on_end)

    def check_alive(self) -> None:
        if self._closed:
            return
        if not self._dead and self._child.process.poll() is not None:
            self._kill()
        if self._dead:
            raise EngineDeadError(self._dead)

    def add(self, request: EngineRequest) -> None:
        for name in request.params.processors:
            if name not in self._registered:
                self._ask("register", name, import_path(name))
                self._registered.add(name)
        self._quarantine.check_items((*request.features, *request.cross))
        self._ask("add", request)

    def append(
        self,
        request_id: str,
        token_ids: Sequence[int],
        features: Sequence[MultiModalFeature] = (),
        close: bool = False,
        adapter: str | None = None,
    ) -> None:
        self._quarantine.check_items(features)
        self._ask("append", request_id, tuple(token_ids), tuple(features), close, adapter)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        self._ask("truncate", request_id, num_tokens)

    def pause(self, request_id: str) -> TokenOutput:
        output: TokenOutput = self._ask("pause", request_id)
        return output

    def abort(self, request_id: str) -> TokenOutput | None:
        output: TokenOutput | None = None
        if not (self._closed or self._dead):
            with suppress(EngineDeadError):  # the sequence is gone; the next verb or `check_alive` raises it
                output = self._ask("abort", request_id)
        return output

    def step(self) -> CoreOutputs:
        if self._closed:
            return CoreOutputs((), True, self._stats)
        done: CoreOutputs = self._ask("step")
        self._stats = done.stats
        return done

    def reset_prefix_cache(self) -> bool:
        return bool(self._ask("reset_prefix_cache"))

    def load_adapter(self, folder: str, seconds: float = math.inf, resume: bool = False) -> LoadedAdapter | None:
        loaded: LoadedAdapter | None = self._ask("load_adapter", folder, seconds, resume)
        if loaded is None:
            return None
        self._adapters[loaded.identity] = folder, self._adapters.get(loaded.identity, ("", 0))[1] + 1
        return loaded

    def cancel_loading(self) -> None:
        if not (self._closed or self._dead):
            with suppress(EngineDeadError):  # the next `check_alive` raises it
                self._ask("cancel_loading")

    def unload_adapter(self, identity: str) -> None:
        folder, count = self._adapters.pop(identity, ("", 0))
        if count > 1:
            self._adapters[identity] = folder, count - 1
        if count and not (self._closed or self._dead):
            with suppress(EngineDeadError):  # the next `check_alive` raises it
                self._ask("unload_adapter", identity)

    def stage_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `EngineCore`. A child that replaces this one gets the same weights."""
        message = self._packed("stage_weights", (dict(weights),))
        try:
            kept = duplicate(message)
        except MemoryError:
            discard(message)
            raise
        try:
            self._exchange(message)
        except BaseException:
            discard(kept)
            raise
        self._updates.add(frozenset(weights), kept)

    def restart_answer(self, request_id: str) -> int:
        return int(self._ask("restart_answer", request_id))

    def sleep(self, keep_sequences: bool = False) -> None:
        self._ask("sleep", keep_sequences)

    def wake_up(self) -> None:
        self._ask("wake_up")

    def close(self) -> None:
        """End the child. It is killed if that takes longer than 10 s."""
        self._closed = True
        self._end_standby()
        self._finalizer()
        self._updates.forget()

    def _ask(self, verb: str, *arguments: object) -> Any:
        """Call a verb of the child and return its result. Raise the error that the verb raised there."""
        return self._exchange(self._packed(verb, arguments))

    def _packed(self, verb: str, arguments: Sequence[object]) -> Packed:
        """Return the message of a verb."""
        if self._dead:
            raise EngineDeadError(self._dead)
        if self._closed:
            raise InputError("the engine was closed; make a new one", code="engine_closed")
        try:
            return pack((verb, arguments))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(f"{verb}: {error}; the engine's process takes plain data only") from None

    def _exchange(self, message: Packed) -> Any:
        """Send a message and return the result of its verb, or raise its error."""
        try:
            self._channel.send(*message)
            failed, value, records = self._channel.receive()
        except (EOFError, OSError):
            self._kill()
            raise EngineDeadError(self._dead) from None
        except BaseException:  # an interrupt: the next verb would read this verb's reply
            self._kill()
            raise
        for name, severity, text in records:
            logging.getLogger(name).log(severity, "%s", text)
        if failed:
            raise restore_error(*value)
        return value

    def _kill(self) -> None:
        """Kill and reap the child."""
        self._finalizer.detach()
        status = self._child.kill()
        for key in self._activity.read():
            self._quarantine.add(key)
        self._activity.close()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self._dead = f"the engine's process ended ({how}) and all requests in it are lost"
        self._dead += "; it is being restarted, send the request again" if self.restart else "; make a new engine"


_cores: weakref.WeakSet[ProcessCore] = weakref.WeakSet()


def _forget() -> None:
    """Close the channels in a forked child of this process, which must neither end the cores nor keep their pipes open."""
    for core in list(_cores):
        core._finalizer.detach()
        core._end_standby.detach()
        core._updates.forget()
        core._child.disconnect()
        core._standby.disconnect()
        core._closed = True


os.register_at_fork(after_in_child=_forget)
