"""Client of a core in a child process, which runs `core_server`. Each verb is one message and one reply."""

from __future__ import annotations

import builtins
import logging
import os
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..mm import errors as mm_errors
from ..mm.errors import ConfigError, EngineDeadError, InputError
from ..mm.registry import registered_models
from ..mm.types import MultiModalFeature
from .channel import Activity, Channel, pack
from .config import EngineConfig
from .logits_processors import import_path
from .scheduler.quarantine import Quarantine
from .types import CoreInfo, CoreOutputs, EngineRequest, EngineStats, TokenOutput

_RESTART_SECONDS = 600.0  # time in which the child may die `engine_restarts` times
_CLOSE_SECONDS = 10.0  # how long `close` waits for the child to end before it is killed
PACKAGE = __name__.partition(".")[0]


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
        self._closed = False
        self.info, self.config, self._stats = self._launch(config)
        self._restarts = deque(maxlen=config.engine_restarts)

    def _launch(self, config: EngineConfig) -> tuple[CoreInfo, EngineConfig, EngineStats]:
        """Start a child and load the model there."""
        connection, child_end = Pipe()
        self._activity = Activity()
        with child_end:
            self._process = _start(child_end, self._activity)
        self._channel, self._dead = Channel(connection), ""
        self._registered: set[str] = set()  # logits processors that are registered in the child
        self._finalizer = weakref.finalize(self, _end, self._process, self._channel, self._activity)
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
        reason = self._dead
        try:
            info, _, self._stats = self._launch(self.config)
            if info != self.info:
                self._kill()
                raise ConfigError("the engine's new process has other limits than the last one; make a new engine")
        except BaseException:
            self._dead = self._dead or reason
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stats(self) -> EngineStats:
        if not self._closed:
            self._stats = self._ask("stats")
        return self._stats

    def bind_thread(self, num_threads: int) -> None:
        """Do nothing: the verbs run in the child."""

    def add(self, request: EngineRequest) -> None:
        for name in request.params.processors:
            if name not in self._registered:
                self._ask("register", name, import_path(name))
                self._registered.add(name)
        self._quarantine.check_items(request.features if request.cross is None else (*request.features, request.cross))
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
            with suppress(EngineDeadError):  # the sequence is gone; another verb raises it
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

    def sleep(self) -> None:
        self._ask("sleep")

    def wake_up(self) -> None:
        self._ask("wake_up")

    def close(self) -> None:
        """End the child. It is killed if that takes longer than 10 s."""
        self._closed = True
        self._finalizer()

    def _ask(self, verb: str, *arguments: object) -> Any:
        """Call a verb of the child and return its result. Raise the error that the verb raised there."""
        if self._dead:
            raise EngineDeadError(self._dead)
        if self._closed:
            raise InputError("the engine was closed; make a new one", code="engine_closed")
        try:
            packed = pack((verb, arguments))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(f"{verb}: {error}; the engine's process takes plain data only") from None
        try:
            self._channel.send(*packed)
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
            raise _exception(*value)
        return value

    def _kill(self) -> None:
        """Kill and reap the child."""
        self._finalizer.detach()
        self._process.kill()
        status = self._process.wait()
        self._channel.close()
        for key in self._activity.read():
            self._quarantine.add(key)
        self._activity.close()
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self._dead = f"the engine's process ended ({how}) and all requests in it are lost"
        self._dead += "; it is being restarted, send the request again" if self.restart else "; make a new engine"


def _start(connection: Connection[Any, Any], activity: Activity) -> subprocess.Popen[bytes]:
    """Start the child, in a session of its own so that Ctrl-C in a terminal reaches this process only."""
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)  # the child imports from the same places
    options = [part for option in sys.warnoptions for part in ("-W", option)]
    shared = connection.fileno(), activity.fileno
    command = [sys.executable, "-P", *options, "-m", f"{__package__}.core_server", *map(str, shared)]
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        pass_fds=shared,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes], channel: Channel, activity: Activity) -> None:
    """Ask the child to end and wait for it."""
    try:
        channel.send(*pack(("close", ())))
        process.wait(_CLOSE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait()
    channel.close()
    activity.close()


def _exception(name: str, arguments: Sequence[Any], state: dict[str, Any]) -> BaseException:
    """Return the exception that the server described. Unknown classes become RuntimeErrors."""
    kind = getattr(mm_errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {' '.join(map(str, arguments))}")
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


_cores: weakref.WeakSet[ProcessCore] = weakref.WeakSet()


def _forget() -> None:
    """Close the channels in a forked child of this process, which must neither end the cores nor keep their pipes open."""
    for core in list(_cores):
        core._finalizer.detach()
        core._channel.close()
        core._activity.close()
        core._closed = True


os.register_at_fork(after_in_child=_forget)
