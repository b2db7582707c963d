"""The step loop, in a thread of its own: takes requests from any thread and hands outputs back."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from ...mm.errors import EngineDeadError, ErrorInfo, InputError
from ...processors.text.tokenizer import Tokenizer
from ..config import MEDIA_BYTES
from ..core_client import ASLEEP, CoreClient
from ..errors import error_info
from ..types import RequestOutput, TokenOutput
from .input_processor import ProcessedPrompt
from .input_queue import InputQueue, QueueEntry
from .loop_thread import start_loop
from .output_thread import OutputThread
from .request_handle import Closing, RequestHandle, dropping, notify
from .trace import Observer

_IDLE_STEP = 0.005  # seconds until the next try after a step that had nothing to compute
_PATIENCE = 10.0  # seconds that a caller who leaves waits for its memory to be free
_MAX_UNREAD = 64  # outputs in an inbox until the output thread reads them
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
    ) -> None:
        self.core, self.tokenizer, self._eos, self._seed = core, tokenizer, eos_token_ids, seed
        self.input_queue = InputQueue(2 * core.info.max_num_seqs, workers, MEDIA_BYTES)
        self.observers: list[Observer] = []
        self.stats, self.asleep = core.stats, False  # the last snapshot; whether requests are refused until `wake_up`
        self._owners: dict[str, RequestHandle] = {}  # by name of each sequence that computes
        self._names: dict[str, RequestHandle] = {}  # requests that are not finished
        self._numbers = count()
        self._commands: SimpleQueue[Callable[[EngineLoop], None] | None] = SimpleQueue()
        self._lock = threading.RLock()  # of names, numbers and the thread
        self._thread: threading.Thread | None = None
        self._output = OutputThread(self.observers, self._commands)
        self.closed, self.process, self._num_threads = False, os.getpid(), torch.get_num_threads()
        self._dead: EngineDeadError | None = None
        self._news: set[RequestHandle] = set()
        self._unread: list[RequestHandle] = []
        weakref.finalize(self, self._commands.put, None).atexit = False
        weakref.finalize(self, self._output.stop).atexit = False

    # what callers do, in their threads

    def serve(self, handles: Sequence[RequestHandle], stream: bool = False) -> Iterator[tuple[int, RequestOutput]]:
        """Yield (index, output) of each request as it finishes, with `stream` also whenever something was added to it.

        A request that fails yields an output with `error`; the others go on. Closing the generator, or an exception in it,
        aborts the rest and frees its memory.
        """
        mail: SimpleQueue[list[RequestHandle]] = SimpleQueue()
        left = {handle: index for index, handle in enumerate(handles)}
        try:
            self.submit(handles, mail.put, stream)
            while left:
                for handle in mail.get():
                    output = handle.take() if handle in left else None
                    if output is not None:
                        yield (left.pop(handle) if output.finished else left[handle]), output
        finally:
            left = {handle: index for handle, index in left.items() if handle.number >= 0}
            if left:
                freed = self.call(lambda engine_loop: engine_loop._drop(left))
                if threading.current_thread() is not self._thread:  # the garbage collector may close us anywhere
                    wait([freed], _PATIENCE)

    def submit(
        self, handles: Sequence[RequestHandle], post: Callable[[list[RequestHandle]], None], stream: bool = False
    ) -> None:
        """Queue requests, in this order. `post` is called in some thread with those that have news for `take`.

        Raises:
            InputError: a request_id is in use, or the engine sleeps, was closed or belongs to another process.
            EngineDeadError: the engine's process has ended.
        """
        self._check_open()
        with self._lock:
            if self.asleep:
                raise InputError(ASLEEP, code="engine_asleep")
            self._start()
            for handle in handles:
                if handle.request_id in self._names:
                    reason = (
                        f"request_id {handle.request_id[:80]!r} is in use; give another, or wait until that one is finished"
                    )
                    raise InputError(reason, param="request_id")
            for handle in handles:
                number = next(self._numbers)
                name = handle.request_id or str(number)
                if name in self._names:
                    name = f"{number}-{time.time_ns()}"
                handle.register(number, name, self.tokenizer, post, stream, self._commands)
                read = partial(handle.read_prompt, self.tokenizer, self.core.compile_grammar)
                handle.entry = QueueEntry(read, _admission(self._commands, handle), handle.priority)
                self._names[name] = handle
            self.input_queue.add([handle.entry for handle in handles if handle.entry is not None])

    def drop(self, handle: RequestHandle) -> None:
        """Abort a request; its caller hears nothing more."""
        self.send(dropping(handle))

    def drop_with(self, holder: object, handle: RequestHandle) -> None:
        """Drop the request once `holder` is collected, in whichever thread; so nothing is locked for it."""
        weakref.finalize(holder, self._commands.put, dropping(handle)).atexit = False

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
        """`send`, with the result; `stats` are up to date then."""
        future: Future[Any] = Future()

        def run(engine_loop: EngineLoop) -> None:
            try:
                result = command(engine_loop)
                engine_loop.stats = engine_loop.stats if engine_loop._dead else engine_loop.core.stats
                future.set_result(result)
            except EngineDeadError as error:
                future.set_exception(error)
                raise
            except Exception as error:
                future.set_exception(error)

        self.send(run)
        return future

    def sleep(self) -> Future[None]:
        """See EngineCore; InputError also while there are requests or live sessions."""
        self._check_open()
        return self.call(lambda engine_loop: engine_loop._sleep())

    def wake_up(self) -> Future[None]:
        """See EngineCore."""
        self._check_open()
        return self.call(lambda engine_loop: engine_loop._wake_up())

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

    def _check_open(self) -> None:
        if self.closed or os.getpid() != self.process:
            reason = "was closed" if self.closed else "belongs to another process"
            raise InputError(f"the engine {reason}; make a new one", code="engine_closed")
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def _start(self) -> None:
        """Start the thread; called with the lock held."""
        if self.closed:
            raise InputError("the engine was closed; make a new one", code="engine_closed")
        if self._thread is None:
            self._thread = start_loop(self, self._commands, self._num_threads)

    # what the loop's thread does

    def end(self, request_id: str) -> None:
        """End a request with the finish reason "abort"; unknown and finished ids are ignored."""
        handle = self._names.get(request_id)
        if handle is not None:
            self._end(handle, "abort")

    def stop(self, handle: RequestHandle, name: str, num_tokens: int) -> None:
        """A stop string ended the answer after `num_tokens` tokens of the sequence; the core may have computed more.

        A sequence that is kept is cut there, so that it holds the answer's tokens and no others.
        """
        if handle.keep:
            self.core.pause(name)
            self.core.truncate(name, num_tokens)
        elif name in self._owners:
            self.core.abort(name)
        if self._owners.pop(name, None) is not None:
            handle.open.discard(name)
            if not handle.open:
                self._close(handle, "stop")
            self._sweep()

    def fail(self, handle: RequestHandle, error: ErrorInfo) -> None:
        """The outputs of a request cannot be read: end what is left of it."""
        self._end(handle, "error", error)

    def follow(self, name: str, handle: RequestHandle) -> None:
        """Deliver outputs of this sequence to the request."""
        self._owners[name] = handle

    def _sleep(self) -> None:
        with self._lock:  # no request may be submitted meanwhile
            live = sum(handle.keep for handle in self._names.values())
            if self._names:
                there = f"requests being served: {len(self._names) - live}, live sessions open: {live}"
                raise InputError(f"{there}; wait for them or end them, then sleep()")
            self.core.sleep()
            self.asleep = True

    def _wake_up(self) -> None:
        self.core.wake_up()
        self.asleep = False

    @property
    def busy(self) -> bool:
        """There is something to compute, or the loop is to end."""
        return bool(self._owners) or self.closed

    def turn(self, command: Callable[[EngineLoop], None] | None) -> None:
        """Run the commands there are, compute one step, tell callers who have news. No exception ends the loop."""
        try:
            self._run_commands(command)
            if self._owners:
                self._step()
        except EngineDeadError as error:
            self._die(error)
        except BaseException as error:  # the step is half done: no sequence in it can go on
            _log.exception("the engine's loop was interrupted")
            self._interrupt(error)
        self._notify()

    def _run_commands(self, command: Callable[[EngineLoop], None] | None) -> None:
        while True:
            if command is not None:
                command(self)
            if self._commands.empty():
                return
            command = self._commands.get()

    def _interrupt(self, error: BaseException) -> None:
        """End all that computes."""
        reason = ErrorInfo("interrupted", f"the engine's step was interrupted ({type(error).__name__}); ask again")
        for handle in set(self._owners.values()):
            self._end(handle, "error", reason)

    def _die(self, error: EngineDeadError) -> None:
        """The core is gone: end every request, those that are still prepared included, and refuse further ones."""
        self._dead = error
        for handle in tuple(self._names.values()):
            self._end(handle, "error", error.info)

    def shut(self) -> None:
        """End every request; the loop ends after this."""
        for handle in tuple(self._names.values()):
            self._end(handle, "error", ErrorInfo("engine_closed", "the engine was closed; make a new one"))
        try:
            self._run_commands(None)
        except EngineDeadError as error:
            self._die(error)
        self._notify()

    def _admit(self, handle: RequestHandle, result: ProcessedPrompt | Exception) -> None:
        """Hand a prepared prompt to the core; an error ends the request."""
        if handle.closed:
            return
        if isinstance(result, Exception):  # not raised again: its traceback would refer to this frame, and the frame to it
            self._end(handle, "error", error_info(result, "reading a prompt"))
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
            self._end(handle, "error", error_info(error, "beginning an answer"))

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
        """Let the worker free memory when nothing is left to compute."""
        if self._owners or self._dead is not None:
            return
        try:
            self.stats = self.core.step().stats
        except EngineDeadError:
            raise
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
        elif handle.keep and handle.stops_and_repairs:  # what a repair removes could not be restored later
            handle.read()
        elif not handle.unread and (handle.params.stop or len(handle.inbox) >= _MAX_UNREAD):
            handle.unread = True
            self._unread.append(handle)
        if handle.stream and not handle.posted:
            self._news.add(handle)

    def _end(self, handle: RequestHandle, reason: str, error: ErrorInfo | None = None) -> None:
        """Stop a request wherever it is."""
        if handle.number < 0:  # it was never submitted
            return
        for name in handle.builder.answers:
            if (self._owners.pop(name, None) is not None or handle.keep) and self._dead is None:
                self.core.abort(name)
        handle.keep = False
        if handle.closed:
            self._names.pop(handle.name, None)
        else:
            self._close(handle, reason, error)
        self._sweep()

    def _close(self, handle: RequestHandle, reason: str, error: ErrorInfo | None = None) -> None:
        """The answer is finished: free the prompt's place in the queue, and the request's name unless its sequence is kept."""
        handle.times.ended = time.perf_counter()
        handle.inbox.append(Closing(reason, error))
        handle.closed = True
        handle.open.clear()
        if handle.entry is not None:
            self.input_queue.drop(handle.entry)
            handle.entry = None  # it refers to the handle: the circle would keep media until the next collection
        if not handle.keep:
            self._names.pop(handle.name, None)
        if self.observers:
            self._news.discard(handle)
            self._output.put((), (handle,))
        else:
            self._news.add(handle)

    def _drop(self, handles: Iterable[RequestHandle]) -> None:
        for handle in handles:
            self._end(handle, "abort")
            self._news.discard(handle)

    def _notify(self) -> None:
        if self._news:
            news, self._news = self._news, set()
            self._drop(notify(news))


def _admission(commands: SimpleQueue[Any], handle: RequestHandle) -> Callable[[ProcessedPrompt | Exception], None]:
    """What the input queue calls with the prepared prompt; it refers to the handle only, not to the loop."""
    return lambda result: commands.put(lambda engine_loop: engine_loop._admit(handle, result))
