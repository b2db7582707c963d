"""The step loop, which runs in its own thread. It takes requests from any thread and hands their outputs back."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from ...callers.errors import EngineDeadError, ErrorInfo, InputError
from ...callers.pacing import releasing_gil
from ...processors.text.tokenizer import Tokenizer
from ..config import MEDIA_BYTES
from ..core.client import ASLEEP, CoreClient
from ..errors import error_info, error_text
from ..sampling_params import SamplingLimits
from ..scheduler.policy import make_policy
from ..types import TokenOutput
from .input_queue import InputQueue, QueueEntry
from .loop_thread import start_loop
from .output_thread import OutputThread
from .processed_prompt import ProcessedPrompt
from .request import Answer
from .request_handle import Append, AwaitedMessage, CheckCore, Drop, Message, RequestHandle, Sleep, WakeUp, notify
from .trace import Observer
from .weights import KEEPS_REQUESTS, UpdateMode

_IDLE_STEP = 0.005  # seconds to sleep after a step that had nothing to compute
_MAX_UNREAD = 64  # outputs in an inbox before the output thread reads them
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
        self.policy = make_policy(core.info.scheduling_policy)
        self.input_queue = InputQueue(2 * core.info.max_num_seqs, workers, MEDIA_BYTES, self.policy)
        self.observers: list[Observer] = []
        self.stats = core.stats  # the last snapshot
        self.asleep = False  # requests are refused until `wake_up`
        self.updating = False  # requests are refused until the weights are replaced
        self.weights_version = 0  # that of the checkpoint; each update adds 1
        self._owners: dict[str, RequestHandle] = {}  # the request of each sequence that is being computed, by sequence id
        self._names: dict[str, RequestHandle] = {}  # unfinished requests by id
        self._numbers = count()
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._lock = threading.RLock()  # guards names, numbers and the thread
        self._thread: threading.Thread | None = None
        self._output = OutputThread(self.observers, self._messages)
        self.closed, self.process, self._num_threads = False, os.getpid(), torch.get_num_threads()
        self._dead: EngineDeadError | None = None  # for good
        self._core_died = False  # and was not restarted yet
        self.num_deaths = self.num_restarts = 0  # of the core's process
        self._when_dead: Callable[[], object] = lambda: None
        self._to_notify: set[RequestHandle] = set()  # requests with new output
        self._unread: list[RequestHandle] = []
        weakref.finalize(self, self._messages.put, None).atexit = False
        weakref.finalize(self, self._output.stop).atexit = False
        core.watch(partial(_check_core, weakref.ref(self)))

    # called from any thread

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
        self.check_ready(handles)
        for handle in releasing_gil(handles):  # without the lock, because 20,000 requests take seconds
            number = next(self._numbers)
            handle.register(number, handle.input.request_id or str(number), self.tokenizer, post, stream, self._messages)
        with self._lock:
            self.check_ready(handles)
            self._start()
            for handle in handles:
                if handle.name in self._names:  # a caller has given this number as a request_id
                    name = f"{handle.name}-{time.time_ns()}"
                    handle.register(handle.number, name, self.tokenizer, post, stream, self._messages)
                read, submitted = partial(handle.read_prompt, self.tokenizer, self._limits), handle.input
                handle.entry = QueueEntry(read, handle.admit, submitted.priority, submitted.has_files, submitted.salt)
                self._names[handle.name] = handle
            return self.input_queue.add([handle.entry for handle in handles if handle.entry is not None], after)

    def drop(self, handle: RequestHandle) -> None:
        """Abort a request without further output."""
        self.send(Drop((handle,)))

    def drop_with(self, holder: object, handle: RequestHandle) -> None:
        """Drop the request when `holder` is garbage collected. This may happen in any thread, so no lock is taken."""
        self.send_after(holder, Drop((handle,)))

    def send_after(self, holder: object, message: Message) -> None:
        """Send a message when `holder` is garbage collected, as `drop_with` does."""
        weakref.finalize(holder, self._messages.put, message).atexit = False

    def send(self, message: Message) -> None:
        """Give the loop's thread a message, which it reads between steps; after `close`, this thread reads it."""
        with self._lock:
            if not self.closed:
                self._start()
                self._messages.put(message)
                return
        self.close()
        message(self)

    def call(self, message: Message) -> Future[Any]:
        """Send a message and return its result as a future. Updates `stats`."""
        result: Future[Any] = Future()
        self.send(AwaitedMessage(message, result))
        return result

    def sleep(self) -> Future[None]:
        """Call `EngineCore.sleep`. The future raises InputError while there are requests or live sessions."""
        self.check_open()
        return self.call(Sleep())

    def wake_up(self) -> Future[None]:
        """Call `EngineCore.wake_up`."""
        self.check_open()
        return self.call(WakeUp())

    def close(self) -> None:
        """End every request with an error, then the threads and the core."""
        with self._lock:
            self.closed, thread = True, self._thread
        self._messages.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self._output.stop()
        self._output.join()
        self.input_queue.close()
        self.core.close()

    @property
    def is_dead(self) -> bool:
        """True if the core's process has died and will not be restarted."""
        return self._dead is not None

    @property
    def is_restarting(self) -> bool:
        """True from the death of the core's process until the next one takes requests."""
        return self._core_died and not self.is_dead

    def when_dead(self, call: Callable[[], object]) -> None:
        """Call this, in any thread, once the core's process has died for good."""
        self._when_dead = call
        if self.is_dead:
            call()

    def check_open(self) -> None:
        """Raise InputError if the engine was closed or belongs to another process, EngineDeadError if it is dead."""
        if self.closed or os.getpid() != self.process:
            reason = "was closed" if self.closed else "belongs to another process"
            raise InputError(f"the engine {reason}; make a new one", code="engine_closed")
        if self._dead is not None:
            raise EngineDeadError(str(self._dead))

    def check_ready(self, handles: Sequence[RequestHandle]) -> None:
        """Raise InputError or EngineDeadError as `submit` does."""
        self.check_open()  # before the lock, which may be held for ever in a forked process
        with self._lock:
            self.check_open()
            if self.asleep:
                raise InputError(ASLEEP, code="engine_asleep")
            if self.updating:
                reason = "the engine's weights are being replaced; send the request again"
                raise InputError(reason, code="engine_asleep")
            for name, times in Counter(handle.input.request_id for handle in handles).items():
                if name is not None and (times > 1 or name in self._names):
                    reason = f"<<param>> {name[:80]!r} is in use; give another one, or wait until it is finished"
                    raise InputError(reason, param="request_id")

    @property
    def is_current_thread(self) -> bool:
        """True in the loop's thread."""
        return threading.current_thread() is self._thread

    def _start(self) -> None:
        """Start the thread if it does not run. The caller holds the lock."""
        if self.closed:
            raise InputError("the engine was closed; make a new one", code="engine_closed")
        if self._thread is None:
            self._thread = start_loop(self, self._messages, self._num_threads)

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
                handle.answer.inbox.append(last)
            del self._owners[name]
            handle.answer.open.discard(name)
            if not handle.answer.open:
                self._close(handle, "stop")
            self._sweep()

    def append(self, message: Append) -> None:
        """Continue a sequence that is held open. Raise InputError if it has ended."""
        handle, name = message.handle, message.handle.open_sequence
        features = message.handle.input.adapted(message.features)
        self.core.append(name, message.token_ids, features, message.close, message.adapter)
        handle.answer = Answer(message.builder)
        handle.keep = not message.close
        self._owners[name] = handle

    def read_stats(self) -> None:
        if not self._core_died:
            self.stats = self.core.stats

    def fall_asleep(self) -> None:
        """Put the core to sleep. Raise InputError while there are requests or live sessions."""
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

    def update_weights(self, weights: Mapping[str, Tensor], mode: UpdateMode) -> None:
        """Replace weights of the core. If they cannot be read, the core stays asleep, and requests end with the error.

        Raises:
            InputError: there are requests or live sessions, and `mode` is "wait".
        """
        if mode == "abort":
            self.end([*self._names.values()], "abort")
        if self._names and mode not in KEEPS_REQUESTS:
            raise InputError(f"requests and sessions being served: {len(self._names)}; end them, then call update_weights()")
        self.core.stage_weights(weights)
        self.weights_version += 1
        try:
            if mode == "restart":
                self._restart_answers()
            self.core.sleep(mode in KEEPS_REQUESTS)
            self.core.wake_up()
        except EngineDeadError:
            self.asleep = False  # a restarted core has the new weights
            raise
        except BaseException as error:
            self.asleep = True
            self.end([*self._names.values()], "error", error_info(error, "an update of the weights"))
            raise
        self.asleep = False

    def _restart_answers(self) -> None:
        """Remove the tokens of answers that are being computed, except of sessions and of answers that callers have in part."""
        for name, handle in self._owners.items():
            if handle.keep:
                continue
            with handle.lock:  # no part may be taken meanwhile
                if not handle.answer.builder.answers[name].is_sent:
                    count = self.core.restart_answer(name)
                    if count:
                        handle.answer.inbox.append(TokenOutput(name, (), num_removed=count))

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended, open sessions included."""
        return len(self._names)

    @property
    def num_live(self) -> int:
        """Number of open sessions."""
        return sum(handle.keep for handle in [*self._names.values()])

    @property
    def busy(self) -> bool:
        """True if there is something to compute or the loop is closed."""
        return bool(self._owners) or self.closed

    def turn(self, message: Message | None) -> None:
        """Read waiting messages, compute one step, and notify callers. No exception ends the loop."""
        try:
            self._read_messages(message)
            if self._owners:
                self._step()
        except EngineDeadError as error:
            self._die(error)
        except BaseException as error:  # the step is incomplete, so none of its sequences can continue
            _log.exception("the engine's loop was interrupted")
            reason = f"the engine's step was interrupted ({type(error).__name__}); send the request again"
            self.end(set(self._owners.values()), "error", ErrorInfo("interrupted", reason))
        self._notify()

    def _read_messages(self, message: Message | None) -> None:
        while True:
            if message is not None:
                message(self)
            if self._messages.empty():
                return
            message = self._messages.get()

    def _die(self, error: EngineDeadError) -> None:
        """End the requests that the dead core held. Restart it, again if it dies while it loads, or refuse new requests.

        Requests whose prompts are being prepared go on, and are admitted after the restart.
        """
        lost = set(self._owners.values()) | {handle for handle in self._names.values() if handle.is_idle_session}
        self._report_death(error, len(lost))
        self._dead = None if not self.closed and self.core.restart else error
        self.end(lost, "error", error.info)
        while not self.closed and (restart := self.core.restart):
            self._notify()
            started = time.monotonic()
            try:
                restart()
                if self.asleep:
                    self.core.sleep()
            except EngineDeadError as died:
                error = died
                self._report_death(error, 0)
            except Exception as failure:
                _log.exception("the engine's process could not be restarted")
                error = EngineDeadError(f"{error}; that failed: {error_text(failure)}")
                break
            else:
                self._core_died = False
                self.num_restarts += 1
                _log.warning("the engine's process was restarted in %.1f s", time.monotonic() - started)
                return
        self._dead = error
        self.end(tuple(self._names.values()), "error", error.info)
        self._when_dead()

    def _report_death(self, error: EngineDeadError, num_lost: int) -> None:
        """Count a death of the core's process, and log it with the number of requests that are lost."""
        self._core_died = True
        self.num_deaths += 1
        if not self.closed:
            _log.error("%s (requests lost: %d)", error, num_lost)

    def shut(self) -> None:
        """End every request before the loop ends."""
        closed = ErrorInfo("engine_closed", "the engine was closed; make a new one")
        self.end(tuple(self._names.values()), "error", closed)
        try:
            self._read_messages(None)
        except EngineDeadError as error:
            self._die(error)
        self._notify()

    def admit(self, handle: RequestHandle, result: ProcessedPrompt | Exception) -> None:
        """Hand a processed prompt to the core. An error ends the request; a core that has died is restarted first."""
        if handle.answer.closed:
            return
        try:
            self.core.check_alive()
        except EngineDeadError:
            handle.admit(result)
            raise
        if isinstance(result, Exception):  # not raised here: the traceback and this frame would form a reference cycle
            self.end([handle], "error", error_info(result, "reading a prompt"))
            return
        try:
            handle.answer.inbox.append(result)
            handle.answer.times.admitted = time.perf_counter()
            for request in handle.sequences(result, self._eos, self._seed):
                self.core.add(request)
                self._owners[request.request_id] = handle
        except EngineDeadError:  # this request may be the reason
            self._owners |= dict.fromkeys(handle.answer.builder.answers, handle)
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
        if self._owners or self._core_died or self.asleep:
            return
        try:
            self.stats = self.core.step().stats
        except EngineDeadError:  # the next verb that somebody waits for raises it again
            return
        except BaseException:  # the next step frees it
            _log.exception("the engine could not free memory")

    def _deliver(self, handle: RequestHandle, output: TokenOutput, now: float) -> None:
        name = output.request_id
        handle.answer.inbox.append(output)
        if output.token_ids:
            handle.answer.times.record_token(name, now, bool(self.observers))
        if output.finish_reason is not None:
            del self._owners[name]
            handle.answer.open.discard(name)
            if output.error is not None:
                handle.keep = False  # the core has dropped the sequence
            if not handle.answer.open:
                self._close(handle, output.finish_reason)
        elif handle.keep and handle.input.stops_and_repairs:  # find stop strings now: a later repair may remove the tokens
            handle.read()
        elif not handle.answer.unread and (handle.input.params.stop or len(handle.answer.inbox) >= _MAX_UNREAD):
            handle.answer.unread = True
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
        for name in handle.answer.builder.answers:
            running = self._owners.get(name) is handle
            if running:
                del self._owners[name]
            if (running or handle.keep) and not self._core_died:
                self.core.abort(name)
        handle.keep = False
        if handle.answer.closed:
            self._free_name(handle)
        else:
            self._close(handle, reason, error)

    def _close(self, handle: RequestHandle, reason: str, error: ErrorInfo | None = None) -> None:
        """Finish the answer: free the prompt's place in the queue, and the request's name unless its sequence is kept."""
        handle.answer.close(reason, error)
        if handle.entry is not None:
            self.input_queue.drop(handle.entry)
            handle.entry = None  # the entry refers to the handle: the cycle would keep media until the next collection
        if not handle.keep:
            self._free_name(handle)
        if self.observers:
            self._to_notify.discard(handle)
            self._output.put((), ((handle, handle.answer),))
        else:
            self._to_notify.add(handle)

    def _free_name(self, handle: RequestHandle) -> None:
        if self._names.get(handle.name) is handle:  # a later request may have the same id
            del self._names[handle.name]
            if handle.input.adapter is not None:
                handle.input.adapter.release()

    def drop_now(self, *handles: RequestHandle) -> None:
        """Abort requests without further output."""
        self.end(handles, "abort")
        self._to_notify.difference_update(handles)

    def _notify(self) -> None:
        if self._to_notify:
            updated, self._to_notify = self._to_notify, set()
            self.drop_now(*notify(updated))


def _check_core(ref: weakref.ref[EngineLoop]) -> None:
    """Let the loop notice that its core's process has ended. It holds no reference to the loop while it waits."""
    engine_loop = ref()
    if engine_loop is not None and not engine_loop.closed:
        engine_loop.send(CheckCore())
