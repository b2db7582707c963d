"""The step loop, which runs in its own thread. It takes requests from any thread and hands their outputs back."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from ...mm.errors import EngineDeadError, ErrorInfo, InputError
from ...mm.pacing import releasing_gil
from ...processors.text.tokenizer import Tokenizer
from ..config import MEDIA_BYTES
from ..core_client import ASLEEP, CoreClient
from ..errors import error_info, error_text
from ..sampling_params import SamplingLimits
from ..types import RequestOutput, TokenOutput
from .input_queue import InputQueue, QueueEntry
from .loop_thread import start_loop
from .output_thread import OutputThread
from .processed_prompt import ProcessedPrompt
from .request_handle import Closing, RequestHandle, drop_command, notify
from .trace import Observer

_IDLE_STEP = 0.005  # seconds to sleep after a step that had nothing to compute
_FREE_SECONDS = 10.0  # how long `serve` waits for the memory of aborted requests
_MAX_UNREAD = 64  # outputs in an inbox before the output thread reads them
_MAX_SUBMITTED = 1024  # answers of one `serve` that are in the engine at a time, if that is enough for 4 batches
_log = logging.getLogger(__name__)


class EngineLoop:
    """Steps the core while there are requests. Thread-safe.

    The thread starts with the first request and ends with `close`, or when nothing refers to the loop any more.
    """

    def __init__(
        self,
        core: CoreClient,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        seed: int = 0,
        workers: int = 2,
        limits: SamplingLimits | None = None,
    ) -> None:
        self.core, self.tokenizer, self._eos, self._seed = core, tokenizer, eos_token_ids, seed
        self._limits = limits or SamplingLimits()
        self.input_queue = InputQueue(2 * core.info.max_num_seqs, workers, MEDIA_BYTES)
        self.observers: list[Observer] = []
        self.stats = core.stats  # the last snapshot
        self.asleep = False  # requests are refused until `wake_up`
        self._owners: dict[str, RequestHandle] = {}  # the request of each sequence that is being computed, by sequence id
        self._names: dict[str, RequestHandle] = {}  # unfinished requests by id
        self._numbers = count()
        self._commands: SimpleQueue[Callable[[EngineLoop], None] | None] = SimpleQueue()
        self._lock = threading.RLock()  # guards names, numbers and the thread
        self._thread: threading.Thread | None = None
        self._output = OutputThread(self.observers, self._commands)
        self.closed, self.process, self._num_threads = False, os.getpid(), torch.get_num_threads()
        self._dead: EngineDeadError | None = None  # for good
        self._core_died = False  # and was not restarted yet
        self._to_notify: set[RequestHandle] = set()  # requests with new output
        self._unread: list[RequestHandle] = []
        weakref.finalize(self, self._commands.put, None).atexit = False
        weakref.finalize(self, self._output.stop).atexit = False

    # called from any thread

    def serve(
        self, handles: Iterable[RequestHandle], stream: bool = False
    ) -> Generator[tuple[int, RequestOutput], RequestHandle | Sequence[RequestHandle] | None, None]:
        """Yield (index, output) of each request when it finishes and, with `stream`, whenever its output grows.

        Requests that the caller sends after an output get that output's index. A failed request yields an output with `error`;
        the others go on. Closing the generator, or an exception in it, aborts the unfinished requests and frees their memory.

        Many requests are submitted in blocks, those of a sequence by priority: garbage collection stops all threads for a time
        in proportion to the objects of the requests that are in the engine.
        """
        mail: SimpleQueue[list[RequestHandle]] = SimpleQueue()
        left: dict[RequestHandle, int] = {}
        turn, room = 0, max(_MAX_SUBMITTED, 4 * self.core.info.max_num_seqs)
        waiting, block = self._numbered(handles, room), room // 2
        try:
            while True:
                if room >= block and (more := _take_block(waiting, room)):
                    left.update(more)
                    room -= _num_answers(more)
                    turn = self.submit(list(more), mail.put, stream, turn)
                if not left:
                    return
                for handle in sorted(mail.get(), key=lambda one: one.number):
                    output = handle.take() if handle in left else None
                    if output is not None:
                        index = left.pop(handle) if output.finished else left[handle]
                        room += handle.params.n * output.finished
                        following = yield index, output
                        if following is not None:
                            more = dict.fromkeys([following] if isinstance(following, RequestHandle) else following, index)
                            left.update(more)
                            room -= _num_answers(more)
                            turn = self.submit(list(more), mail.put, stream, turn)
        finally:
            left = {handle: index for handle, index in left.items() if handle.number >= 0}
            if left:
                freed = self.call(lambda engine_loop: engine_loop.drop_now(*left))
                if threading.current_thread() is not self._thread:  # the garbage collector may run this in any thread
                    wait([freed], _FREE_SECONDS)

    def submit(
        self,
        handles: Sequence[RequestHandle],
        post: Callable[[list[RequestHandle]], None],
        stream: bool = False,
        after: int = 0,
    ) -> int:
        """Queue requests in this order, see `InputQueue.add`, and return the turn of the last one.

        `post` is called, in any thread, with requests that have new output for `take`.

        Raises:
            InputError: a request_id is in use, or the engine sleeps, was closed or belongs to another process.
            EngineDeadError: the engine's process has ended.
        """
        self.check_open()  # before the lock, which may be held for ever in a forked process
        with self._lock:
            self._check_ready(handles)
        for handle in releasing_gil(handles):  # without the lock, because 20,000 requests take seconds
            number = next(self._numbers)
            handle.register(number, handle.request_id or str(number), self.tokenizer, post, stream, self._commands)
        with self._lock:
            self._check_ready(handles)
            self._start()
            for handle in handles:
                if handle.name in self._names:  # a caller has given this number as a request_id
                    name = f"{handle.name}-{time.time_ns()}"
                    handle.register(handle.number, name, self.tokenizer, post, stream, self._commands)
                read = partial(handle.read_prompt, self.tokenizer, self._limits)
                done = _admission(self._commands, handle)
                handle.entry = QueueEntry(read, done, handle.priority, handle.has_files, handle.salt)
                self._names[handle.name] = handle
            return self.input_queue.add([handle.entry for handle in handles if handle.entry is not None], after)

    def drop(self, handle: RequestHandle) -> None:
        """Abort a request without further output."""
        self.send(drop_command(handle))

    def drop_with(self, holder: object, handle: RequestHandle) -> None:
        """Drop the request when `holder` is garbage collected. This may happen in any thread, so no lock is taken."""
        weakref.finalize(holder, self._commands.put, drop_command(handle)).atexit = False

    def send(self, command: Callable[[EngineLoop], None]) -> None:
        """Run a command in the loop's thread, between steps; after `close`, in this thread."""
        with self._lock:
            if not self.closed:
                self._start()
                self._commands.put(command)
                return
        self.close()
        command(self)

    def call(self, command: Callable[[EngineLoop], Any]) -> Future[Any]:
        """Run a command in the loop's thread and return its result as a future. Updates `stats`."""
        future: Future[Any] = Future()

        def run(engine_loop: EngineLoop) -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = command(engine_loop)
                engine_loop.stats = engine_loop.stats if engine_loop._core_died else engine_loop.core.stats
                future.set_result(result)
            except EngineDeadError as error:
                future.set_exception(error)
                raise
            except Exception as error:
                future.set_exception(error)

        self.send(run)
        return future

    def sleep(self) -> Future[None]:
        """Call `EngineCore.sleep`. The future raises InputError while there are requests or live sessions."""
        self.check_open()
        return self.call(EngineLoop._sleep)

    def wake_up(self) -> Future[None]:
        """Call `EngineCore.wake_up`."""
        self.check_open()
        return self.call(EngineLoop._wake_up)

    def close(self) -> None:
        """End every request with an error, then the threads and the core."""
        with self._lock:
            self.closed, thread = True, self._thread
        self._commands.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._output.stop()
        self._output.join()
        self.input_queue.close()
        self.core.close()

    @property
    def is_dead(self) -> bool:
        """True if the core's process has died and was not restarted."""
        return self._dead is not None

    def check_open(self) -> None:
        """Raise InputError if the engine was closed or belongs to another process, EngineDeadError if it is dead."""
        if self.closed or os.getpid() != self.process:
            reason = "was closed" if self.closed else "belongs to another process"
            raise InputError(f"the engine {reason}; make a new one", code="engine_closed")
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def _numbered(self, handles: Iterable[RequestHandle], room: int) -> Iterator[tuple[int, RequestHandle]]:
        """Return all requests with their indices, by priority if they are a sequence that is larger than `room`."""
        if not isinstance(handles, Sequence) or len(handles) <= room:
            return enumerate(handles)
        self.check_open()
        with self._lock:
            self._check_ready(handles)  # names that are used twice may be in different blocks
        return iter(sorted(enumerate(handles), key=lambda pair: pair[1].priority))

    def _check_ready(self, handles: Sequence[RequestHandle]) -> None:
        """Raise InputError or EngineDeadError as `submit` does. The caller holds the lock."""
        self.check_open()
        if self.asleep:
            raise InputError(ASLEEP, code="engine_asleep")
        for name, times in Counter(handle.request_id for handle in handles).items():
            if name is not None and (times > 1 or name in self._names):
                reason = f"request_id {name[:80]!r} is in use; give another one, or wait until it is finished"
                raise InputError(reason, param="request_id")

    def _start(self) -> None:
        """Start the thread if it does not run. The caller holds the lock."""
        if self.closed:
            raise InputError("the engine was closed; make a new one", code="engine_closed")
        if self._thread is None:
            self._thread = start_loop(self, self._commands, self._num_threads)

    # called in the loop's thread

    def abort(self, request_id: str) -> None:
        """End a request with the finish reason "abort". Unknown and finished ids are ignored."""
        handle = self._names.get(request_id)
        if handle is not None:
            self.end([handle], "abort")

    def stop(self, handle: RequestHandle, name: str, num_tokens: int) -> None:
        """End a sequence at a stop string, after `num_tokens` of its tokens. The core may have computed more.

        A sequence that is kept is cut there, so that it holds the answer's tokens and no others.
        """
        last, running = None, self._owners.get(name) is handle  # not a later request with the same id
        if handle.keep:
            last = self.core.pause(name)
            self.core.truncate(name, num_tokens)
        elif running:
            last = self.core.abort(name)
        if running:
            if last is not None:
                handle.inbox.append(last)
            del self._owners[name]
            handle.open.discard(name)
            if not handle.open:
                self._close(handle, "stop")
            self._sweep()

    def follow(self, name: str, handle: RequestHandle) -> None:
        """Deliver outputs of this sequence to the request."""
        self._owners[name] = handle

    def _sleep(self) -> None:
        with self._lock:  # no request may be submitted meanwhile
            live = sum(handle.keep for handle in self._names.values())
            if self._names:
                counts = f"requests being served: {len(self._names) - live}, live sessions open: {live}"
                raise InputError(f"{counts}; wait for them or end them, then call sleep()")
            self.asleep = True
        try:
            self.core.sleep()
        except BaseException:
            self.asleep = False
            raise

    def _wake_up(self) -> None:
        self.core.wake_up()
        self.asleep = False

    @property
    def busy(self) -> bool:
        """True if there is something to compute or the loop is closed."""
        return bool(self._owners) or self.closed

    def turn(self, command: Callable[[EngineLoop], None] | None) -> None:
        """Run waiting commands, compute one step, and notify callers. No exception ends the loop."""
        try:
            self._run_commands(command)
            if self._owners:
                self._step()
        except EngineDeadError as error:
            self._die(error)
        except BaseException as error:  # the step is incomplete, so none of its sequences can continue
            _log.exception("the engine's loop was interrupted")
            reason = f"the engine's step was interrupted ({type(error).__name__}); send the request again"
            self.end(set(self._owners.values()), "error", ErrorInfo("interrupted", reason))
        self._notify()

    def _run_commands(self, command: Callable[[EngineLoop], None] | None) -> None:
        while True:
            if command is not None:
                command(self)
            if self._commands.empty():
                return
            command = self._commands.get()

    def _die(self, error: EngineDeadError) -> None:
        """End every request after the core has died. Restart it, again if it dies while it loads, or refuse new requests."""
        self._core_died = True
        self._dead = None if not self.closed and self.core.restart else error
        self.end(tuple(self._names.values()), "error", error.info)
        while not self.closed and (restart := self.core.restart):
            self._notify()
            try:
                restart()
            except EngineDeadError as died:
                error = died
            except Exception as failure:
                _log.exception("the engine's process could not be restarted")
                error = EngineDeadError(f"{error}; that failed: {error_text(failure)}")
                break
            else:
                self._core_died = self.asleep = False
                return
        self._dead = error
        self.end(tuple(self._names.values()), "error", error.info)

    def shut(self) -> None:
        """End every request before the loop ends."""
        closed = ErrorInfo("engine_closed", "the engine was closed; make a new one")
        self.end(tuple(self._names.values()), "error", closed)
        try:
            self._run_commands(None)
        except EngineDeadError as error:
            self._die(error)
        self._notify()

    def _admit(self, handle: RequestHandle, result: ProcessedPrompt | Exception) -> None:
        """Hand a processed prompt to the core. An error ends the request."""
        if handle.closed:
            return
        if isinstance(result, Exception):  # not raised here: the traceback and this frame would form a reference cycle
            self.end([handle], "error", error_info(result, "reading a prompt"))
            return
        try:
            handle.inbox.append(result)
            handle.times.admitted = time.perf_counter()
            for request in handle.sequences(result, self._eos, self._seed):
                self.core.add(request)
                self._owners[request.request_id] = handle
        except EngineDeadError:
            raise
        except Exception as error:
            self.end([handle], "error", error_info(error, "beginning an answer"))

    def _step(self) -> None:
        done = self.core.step()
        self.stats, now = done.stats, time.perf_counter()
        for output in done.outputs:
            handle = self._owners.get(output.request_id)
            if handle is not None:
                self._deliver(handle, output, now)
        if self._unread:
            self._output.put(self._unread)
            self._unread = []
        if done.idle and self._owners:
            time.sleep(_IDLE_STEP)
        self._sweep()

    def _sweep(self) -> None:
        """Step once more if nothing is left to compute, so that the worker frees memory."""
        if self._owners or self._core_died:
            return
        try:
            self.stats = self.core.step().stats
        except EngineDeadError:  # the next verb that somebody waits for raises it again
            return
        except BaseException:  # the next step frees it
            _log.exception("the engine could not free memory")

    def _deliver(self, handle: RequestHandle, output: TokenOutput, now: float) -> None:
        name = output.request_id
        handle.inbox.append(output)
        if output.token_ids:
            handle.times.record_token(name, now, bool(self.observers))
        if output.finish_reason is not None:
            del self._owners[name]
            handle.open.discard(name)
            if output.error is not None:
                handle.keep = False  # the core has dropped the sequence
            if not handle.open:
                self._close(handle, output.finish_reason)
        elif handle.keep and handle.stops_and_repairs:  # find stop strings now: a later repair may remove the tokens
            handle.read()
        elif not handle.unread and (handle.params.stop or len(handle.inbox) >= _MAX_UNREAD):
            handle.unread = True
            self._unread.append(handle)
        if handle.stream and not handle.posted:
            self._to_notify.add(handle)

    def end(self, handles: Collection[RequestHandle], reason: str, error: ErrorInfo | None = None) -> None:
        """End requests, whether they are queued, processed or running."""
        submitted = [handle for handle in handles if handle.number >= 0]
        entries = [handle.entry for handle in submitted if handle.entry is not None]
        self.input_queue.drop(*entries)  # all at once, so that no freed place starts a request that is also dropped
        for handle in submitted:
            handle.entry = None
            self._end(handle, reason, error)
        if submitted:
            self._sweep()

    def _end(self, handle: RequestHandle, reason: str, error: ErrorInfo | None) -> None:
        for name in handle.builder.answers:
            running = self._owners.get(name) is handle
            if running:
                del self._owners[name]
            if (running or handle.keep) and not self._core_died:
                self.core.abort(name)
        handle.keep = False
        if handle.closed:
            self._free_name(handle)
        else:
            self._close(handle, reason, error)

    def _close(self, handle: RequestHandle, reason: str, error: ErrorInfo | None = None) -> None:
        """Finish the answer: free the prompt's place in the queue, and the request's name unless its sequence is kept."""
        handle.times.ended = time.perf_counter()
        handle.inbox.append(Closing(reason, error))
        handle.closed = True
        handle.open.clear()
        if handle.entry is not None:
            self.input_queue.drop(handle.entry)
            handle.entry = None  # the entry refers to the handle: the cycle would keep media until the next collection
        if not handle.keep:
            self._free_name(handle)
        if self.observers:
            self._to_notify.discard(handle)
            self._output.put((), ((handle, handle.builder, handle.times),))
        else:
            self._to_notify.add(handle)

    def _free_name(self, handle: RequestHandle) -> None:
        if self._names.get(handle.name) is handle:  # a later request may have the same id
            del self._names[handle.name]

    def drop_now(self, *handles: RequestHandle) -> None:
        """Abort requests without further output."""
        self.end(handles, "abort")
        self._to_notify.difference_update(handles)

    def _notify(self) -> None:
        if self._to_notify:
            updated, self._to_notify = self._to_notify, set()
            self.drop_now(*notify(updated))


def _take_block(waiting: Iterator[tuple[int, RequestHandle]], room: int) -> dict[RequestHandle, int]:
    """Return the next requests and their indices, with about `room` answers."""
    block = dict[RequestHandle, int]()
    for index, handle in waiting:
        block[handle] = index
        room -= handle.params.n
        if room <= 0:
            break
    return block


def _num_answers(handles: Iterable[RequestHandle]) -> int:
    return sum(handle.params.n for handle in handles)


def _admission(commands: SimpleQueue[Any], handle: RequestHandle) -> Callable[[ProcessedPrompt | Exception], None]:
    """Return the callback of the input queue for a processed prompt. It holds no reference to the loop."""
    return lambda result: commands.put(lambda engine_loop: engine_loop._admit(handle, result))
