"""Run codec functions in worker processes, which may crash without harm to the engine.

A worker serves one item at a time, so there are as many as there are concurrent calls; idle workers are reused by the tenant
that they have served, the most recently used first. Messages are msgpack followed by tensors as raw bytes: nothing that comes
back is ever executed.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from ...callers.errors import BusyError, InputError
from .policy import MediaPolicy, slow_error
from .worker_messages import WorkerReply, WorkerRequest, receive, send

_log = logging.getLogger("sensorium")
START_SECONDS = 120.0  # time limit of a new worker's imports, on a busy machine
FOREVER = 365 * 86400.0  # seconds: system timers do not take infinity
LEAK = 512 << 20  # bytes of address space that a worker may keep after its items
_LACKS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # the machine or a process has reached a limit
_KILLED = (signal.SIGKILL, signal.SIGTERM)  # sent from outside: a worker cannot send signals
_END_SECONDS = 1.0  # time limit from when a worker's socket is closed until its process has ended
_COUNTED_SECONDS = 1.0  # in a shorter time, the start of an item counts too much
_MAX_OTHERS = 4  # idle workers of other tenants
_INHERITED = ("LD_LIBRARY_PATH", "LANG", "LC_ALL", "PATH", "SYSTEMROOT", "TMPDIR", "TZ")  # variables of the worker; no secrets
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
T = TypeVar("T")


class CodecRunner(Protocol):
    """Calls a function with arguments, in this process or in a worker, there for `seconds` at most (the policy's if None)."""

    def __call__(self, function: Callable[..., T], data: Any, /, *args: object, seconds: float | None = None) -> T: ...


def codec_runner(policy: MediaPolicy, data: object, slow: bool = False, tenant: str | None = None) -> CodecRunner:
    """Return `run_isolated` for encoded bytes that are `slow` or if the policy isolates codecs, else `run_inline`."""
    isolated = (slow or policy.decode_isolation == "process") and isinstance(data, bytes)
    return partial(run_isolated, tenant=tenant) if isolated else run_inline


def run_inline(function: Callable[..., T], data: Any, /, *args: object, seconds: float | None = None) -> T:
    return function(data, *args)


def run_isolated(
    function: Callable[..., T], data: bytes, /, *args: object, tenant: str | None = None, seconds: float | None = None
) -> T:
    """Run `function(data, *args)` in a worker, within the limits of the MediaPolicy among its arguments.

    The function must be a module's function with type hints. Arguments and result are numbers, strings, tensors, and
    dataclasses of these. `worker_memory_bytes` is address space for the item, on top of what an idle worker has with its
    libraries (0.9 GB). `worker_seconds`, or `seconds` if given, starts when `data` is sent; a worker's start (about a second)
    is not included. A worker that has served one tenant serves no other.

    Raises:
        InputError: raised by the function, with the same text, or the function crashed, took too long or needed too much.
        BusyError: the worker got too little processor time to start, or to use its seconds.
        RuntimeError: no worker can be started, or the function raised another error (a bug, with its traceback).
    """
    policy = next((arg for arg in args if isinstance(arg, MediaPolicy)), None)
    if policy is None:
        raise TypeError(f"{function.__name__} is called without a MediaPolicy")
    limit = min(float(policy.worker_seconds if seconds is None else seconds), FOREVER)
    memory = int(min(policy.worker_memory_bytes, 1 << 62))
    request = WorkerRequest(function.__module__, function.__name__, list(args), limit)
    reply, buffers = _ask(request, data, memory, tenant, policy.worker_sandbox == "require")
    if reply.kind == "value":
        hint = typing.get_type_hints(function)["return"]
        result: T = msgspec.convert(reply.value, hint, dec_hook=lambda _, header: _shaped(buffers, header))
        return result
    if reply.kind == "memory":
        raise InputError(
            f"decoding it needed more than {memory:,} bytes of memory; give a smaller one, or raise worker_memory_bytes",
            code="over_limit",
            limit=memory,
        )
    if reply.kind == "input":
        raise InputError(**msgspec.convert(reply.value, dict[str, Any]))
    raise RuntimeError(f"{function.__name__} failed in the codec worker:\n{reply.text}")


def call_worker(
    function: Callable[[bytes], object],
    data: bytes,
    seconds: float,
    memory: int,
    tenant: str | None = None,
    require_sandbox: bool = False,
) -> WorkerReply:
    """Call a module's function in a worker and return its reply.

    Raise InputError if it crashed or took too long, BusyError if the machine gave it too little time.

    `require_sandbox`: raise RuntimeError if the worker's system calls cannot be filtered.
    """
    return _ask(WorkerRequest(function.__module__, function.__name__, [], seconds), data, memory, tenant, require_sandbox)[0]


def close_workers() -> None:
    """Stop idle workers, and busy ones once they are done. A later call starts new ones."""
    global _closes
    with _lock:
        _closes += 1
        workers = _idle[:]
        _idle.clear()
    for worker in workers:
        worker.stop()


def keep_workers(owner: object) -> Callable[[], object]:
    """Keep idle workers until the returned function is called or `owner` is gone. They stop with the last owner."""
    global _owners
    with _lock:
        _owners += 1
    release = weakref.finalize(owner, _release, os.getpid())
    release.atexit = False
    return release


def _release(process: int) -> None:
    global _owners
    if process != os.getpid():  # a forked child counts its own owners
        return
    with _lock:
        _owners -= 1
        last = not _owners
    if last:
        close_workers()


class CodecWorker:
    """A worker process and the socket to it. Used by one thread at a time.

    Args:
        module: imported before the worker is cut off, with its `WORKER_IMPORTS` or, if it has none, torch and the codecs of
            this package.
        tenant: whose items it serves.
    """

    def __init__(self, module: str, tenant: str | None) -> None:
        self.pool = _pool(module, tenant)
        # the import paths of this process, without the worker's current folder
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        command = [sys.executable, "-P", "-m", f"{__package__}.worker", module]
        env = (
            {name: os.environ[name] for name in _INHERITED if name in os.environ}
            | dict.fromkeys(_THREADS, "1")
            | {"PYTHONPATH": paths, "MALLOC_ARENA_MAX": "2"}
        )
        try:
            with ExitStack() as opened:
                self._channel, child_end = map(opened.enter_context, socket.socketpair())
                self._process = subprocess.Popen(command, env=env, stdin=child_end.fileno(), stdout=subprocess.DEVNULL)
                child_end.close()
                opened.pop_all()  # the channel stays open with the process
        except OSError as error:
            if error.errno in _LACKS:
                raise _busy_error(f"no codec worker can be started ({error.strerror})") from None
            raise
        try:
            message, _ = receive(self._channel, time.monotonic() + START_SECONDS)
        except TimeoutError:
            self.stop()
            raise _busy_error(f"a codec worker did not start within {START_SECONDS:g} s") from None
        except (OSError, EOFError):
            killed = self.is_killed()
            self.stop()
            if killed:
                raise _killed_error() from None
            raise RuntimeError(f"the codec worker did not start (exit status {self._process.returncode})") from None
        self.problem = msgspec.msgpack.decode(message, type=str)
        self._most_idle = self.address_space() + LEAK

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def leaks(self) -> bool:
        """True if it has kept too much memory."""
        return self.address_space() > self._most_idle

    def address_space(self) -> int:
        """Return the bytes of address space that the process has mapped."""
        with open(f"/proc/{self.pid}/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")

    def processor_time(self) -> tuple[float, float]:
        """Return the seconds for which the main thread has run, and has waited for a processor (proc_pid_schedstat(5))."""
        try:
            with open(f"/proc/{self.pid}/schedstat") as file:
                ran, waited, _ = file.read().split()
        except OSError:  # a kernel that does not count them
            return 0.0, 0.0
        return int(ran) / 1e9, int(waited) / 1e9

    def is_starved(self, seconds: float) -> bool:
        """Return whether the last request has not ended after its `seconds` because of the machine, not because of the item.

        So it is if the worker is stopped, waits for the disk, or has waited for a processor for more than half of the time.
        The kernel counts a wait only when it ends; a worker that is ready to run has therefore waited since it last ran. A
        worker that sleeps is not starved: its codec waits for something that does not come.
        """
        with open(f"/proc/{self.pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
        ran, waited = (now - before for now, before in zip(self.processor_time(), self._time_before, strict=True))
        if state == "R" and seconds >= _COUNTED_SECONDS:
            waited = max(waited, seconds - ran)
        return state in "TtD" or waited > seconds / 2

    def is_killed(self) -> bool:
        """Return whether a process that has closed its socket was ended from outside."""
        try:
            return -self._process.wait(_END_SECONDS) in _KILLED
        except subprocess.TimeoutExpired:  # it lives on
            return False

    def ask(self, request: WorkerRequest, data: bytes, memory: int) -> tuple[WorkerReply, list[memoryview]]:
        """Return the reply and its buffers. TimeoutError if it is late, EOFError or OSError if the worker died."""
        self._time_before = self.processor_time()
        deadline = time.monotonic() + request.seconds
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        allowed = self.address_space() + 2 * len(data) + memory  # it holds the data twice when it receives them
        resource.prlimit(self.pid, resource.RLIMIT_AS, (allowed if hard < 0 else min(allowed, hard), hard))
        self._channel.settimeout(request.seconds)
        send(self._channel, request, [memoryview(data)])
        message, buffers = receive(self._channel, deadline, memory)
        return msgspec.msgpack.decode(message, type=WorkerReply), buffers

    def kill(self) -> None:
        """End the process. The thread that waits for its reply gets EOFError or OSError."""
        self._process.kill()

    def stop(self) -> int:
        """Kill the worker and return its exit status."""
        self.kill()
        self._channel.close()
        return self._process.wait()


class Interrupt:
    """Ends a function's calls in workers, and its downloads. `stop` may be called in any thread and at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: list[Callable[[], object]] = []
        self._stopped = False

    def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. After `stop`, this and its calls in workers raise InputError."""
        self.check()
        token = _interrupt.set(self)
        try:
            return work()
        finally:
            _interrupt.reset(token)

    @contextmanager
    def watching(self, end: Callable[[], object]) -> Iterator[None]:
        """Call `end` if `stop` is called inside the context. Raise InputError if it was called inside or before."""
        with self._lock:
            self.check()
            self._ends.append(end)
        try:
            yield
        finally:
            with self._lock:
                self._ends.remove(end)
        self.check()  # a worker may have been killed after its reply; it serves nobody again

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for end in self._ends:
                end()

    def check(self) -> None:
        """Raise InputError after `stop`."""
        if self._stopped:
            raise InputError("the request was aborted")


def watching(end: Callable[[], object]) -> AbstractContextManager[None]:
    """Return a context in which the current Interrupt calls `end`; without an Interrupt it does nothing."""
    interrupt = _interrupt.get()
    return nullcontext() if interrupt is None else interrupt.watching(end)


_interrupt: ContextVar[Interrupt | None] = ContextVar("interrupt", default=None)
_idle: list[CodecWorker] = []
_lock = threading.RLock()  # owners may be garbage collected, and so released, anywhere
_owners = _closes = 0
_warned = False


def _ask(
    request: WorkerRequest, data: bytes, memory: int, tenant: str | None = None, require: bool = False
) -> tuple[WorkerReply, list[memoryview]]:
    began, interrupt = _closes, _interrupt.get()
    if interrupt is not None:
        interrupt.check()  # before a worker starts
    worker = _take(request.module, tenant, require)
    asked = time.monotonic()
    try:
        with watching(worker.kill):
            reply, buffers = worker.ask(request, data, memory)
    except TimeoutError:
        starved = worker.is_starved(request.seconds)
        worker.stop()
        if starved:
            raise _busy_error(f"a codec worker got too little processor time in its {request.seconds:g} s") from None
        raise slow_error(request.seconds) from None
    except (OSError, EOFError, msgspec.MsgspecError):
        killed = worker.is_killed()
        status = worker.stop()
        if interrupt is not None:
            interrupt.check()
        if killed:
            raise _killed_error() from None
        if status == -signal.SIGALRM and time.monotonic() - asked > request.seconds:  # this thread got no processor in time
            raise _busy_error(f"a codec worker's reply was not read within its {request.seconds:g} s") from None
        if status == -signal.SIGALRM:
            raise slow_error(request.seconds) from None
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        raise InputError(f"decoding it crashed the codec ({name}); the file is broken or hostile") from None
    except BaseException:  # interrupted between request and reply: the next caller would get this reply
        worker.stop()
        raise
    with _lock:
        ended = [worker] if worker.leaks or _closes != began else []
        if not ended:
            _idle.append(worker)
            ended = [other for other in _idle if other.pool != worker.pool][:-_MAX_OTHERS]
            _idle[:] = [other for other in _idle if other not in ended]
    for other in ended:
        other.stop()
    return reply, buffers


def _busy_error(reason: str) -> BusyError:
    return BusyError(f"the machine is busy: {reason}; send the request again later, or send fewer at once")


def _killed_error() -> InputError:
    reason = "its codec worker was killed from outside, probably because the machine has too little memory"
    return InputError(f"{reason}; send it again later, or send a smaller one", code="out_of_memory")


def _take(module: str, tenant: str | None, require: bool) -> CodecWorker:
    """Return an idle worker of the tenant that is alive, or a new one."""
    global _warned
    while True:
        with _lock:
            worker = next((idle for idle in reversed(_idle) if idle.pool == _pool(module, tenant)), None)
            if worker is not None:
                _idle.remove(worker)
        worker = worker or CodecWorker(module, tenant)
        if not worker.alive:
            worker.stop()
            continue
        if worker.problem and require:
            worker.stop()
            raise RuntimeError(
                f'system calls of codec workers cannot be filtered ({worker.problem}); set worker_sandbox="auto"'
            )
        if worker.problem and not _warned:
            _warned = True
            _log.warning("system calls of codec workers are not filtered (%s); see docs/security.md", worker.problem)
        return worker


def _pool(module: str, tenant: str | None) -> tuple[str, str | None]:
    """Return what the calls that may share a worker have in common: the package and the tenant."""
    return module.rpartition(".")[0], tenant


def _shaped(buffers: list[memoryview], header: Any) -> Tensor:
    """Return the tensor whose buffer `header` refers to by number, with its dtype and shape."""
    buffer, dtype = buffers[header["at"]], getattr(torch, header["dtype"])
    flat = torch.frombuffer(buffer, dtype=dtype) if len(buffer) else torch.empty(0, dtype=dtype)
    return flat.view(header["shape"])


def _forget() -> None:
    """Forget the parent's workers in a forked child."""
    global _lock, _owners
    _lock, _owners = threading.RLock(), 0
    _idle.clear()


atexit.register(close_workers)
os.register_at_fork(after_in_child=_forget)
