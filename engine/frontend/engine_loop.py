"""The engine's loop in a thread of its own: requests in from any thread, outputs back. Knows no chat and no checkpoint."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from ..mm.errors import InputError
from ..processors.text import Tokenizer
from .core import ASLEEP, EngineCore
from .failures import explain
from .feeder import Entry, Feeder
from .input import Prepared, Unfinished
from .output import Assembly
from .threads import use_threads
from .ticket import Job, Ticket
from .trace import Observer
from .types import RequestOutput, TokenOutput

_MEDIA_BYTES = 512 << 20  # processed items held for running requests; beyond it no more are prepared
_IDLE_STEP = 0.005  # seconds until the next try after a step that had nothing to compute
_PATIENCE = 10.0  # seconds that a caller who leaves waits for its memory to be free
_log = logging.getLogger(__name__)


class Driver:
    """Owns the engine's loop. Thread-safe; the thread starts with the first request and ends with `close`, or when nobody
    holds the driver any more."""

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        seed: int = 0,
        workers: int = 2,
    ) -> None:
        self.core, self.tokenizer, self._eos, self._seed = core, tokenizer, eos_token_ids, seed
        self.feeder = Feeder(2 * core.scheduler.limits.max_num_seqs, workers, _MEDIA_BYTES)
        self.observers: list[Observer] = []
        self._owners: dict[str, Ticket] = {}  # by the name of each sequence that computes
        self._names: dict[str, Ticket] = {}  # requests that are not finished
        self._numbers = count()
        self._commands: SimpleQueue[Callable[[Driver], None] | None] = SimpleQueue()
        self._lock = threading.RLock()  # of names, numbers and the thread
        self._thread: threading.Thread | None = None
        self._closed, self._process, self._num_threads = False, os.getpid(), torch.get_num_threads()
        self._news: set[Ticket] = set()
        weakref.finalize(self, self._commands.put, None).atexit = False
        _drivers.add(self)

    # what callers do, in their threads

    def serve(self, jobs: Sequence[Job], partial: bool = False) -> Iterator[tuple[int, RequestOutput]]:
        """(index, output) of each job as it finishes, with `partial` also when something was added to it.

        A job that fails yields an output with `error`; the others go on. Closing the generator, or an exception in
        it, aborts what is left and frees its memory.
        """
        mail: SimpleQueue[list[Ticket]] = SimpleQueue()
        left: dict[Ticket, int] = {}
        try:
            left = {ticket: index for index, ticket in enumerate(self.tickets(jobs, mail.put, partial))}
            self.submit(tuple(left))
            while left:
                for ticket in mail.get():
                    output = ticket.take() if ticket in left else None
                    if output is not None:
                        yield (left.pop(ticket) if output.finished else left[ticket]), output
        finally:
            if left:
                freed = self.call(lambda driver: driver._drop(left))
                if threading.current_thread() is not self._thread:  # the collector of garbage may close us anywhere
                    wait([freed], _PATIENCE)

    def tickets(self, jobs: Sequence[Job], post: Callable[[list[Ticket]], None], partial: bool = False) -> list[Ticket]:
        """For `submit`. InputError for a request_id that is in use, while the engine sleeps, and after `close` or a fork."""
        self._check_open()
        with self._lock:
            if self.core.asleep:
                raise InputError(ASLEEP)
            made: list[Ticket] = []
            for job in jobs:
                number = next(self._numbers)
                name = job.request_id if job.request_id is not None else str(number)
                if name in self._names:
                    if job.request_id is not None:
                        raise InputError(
                            f"request_id {name[:80]!r} is in use; give another, or wait until that one is finished"
                        )
                    name = f"{number}-{time.time_ns()}"
                made.append(Ticket(number, job, Assembly(name, job.params, self.tokenizer), post, partial))
            self._names.update((ticket.assembly.request_id, ticket) for ticket in made)
            return made

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Their turn comes in the order given; see Feeder."""
        entries = [
            Entry(_preparation(self.core, ticket.job), _admission(self._commands, ticket), ticket.job.priority)
            for ticket in tickets
        ]
        for ticket, entry in zip(tickets, entries, strict=True):
            ticket.entry = entry
        with self._lock:
            self._start()
            self.feeder.add(entries)

    def drop(self, ticket: Ticket) -> None:
        """Nobody wants to hear of it any more."""
        self.send(_dropping(ticket))

    def drop_with(self, holder: object, ticket: Ticket) -> None:
        """`drop` once nobody holds the holder; that may be seen in any thread, the loop's included, so nothing is locked."""
        weakref.finalize(holder, self._commands.put, _dropping(ticket)).atexit = False

    def send(self, command: Callable[[Driver], None]) -> None:
        """Run in the loop's thread, between steps; after `close` here."""
        with self._lock:
            if not self._closed:
                self._start()
                self._commands.put(command)
                return
        self.close()
        command(self)

    def call(self, command: Callable[[Driver], Any]) -> Future[Any]:
        """`send`, with the result."""
        future: Future[Any] = Future()

        def run(driver: Driver) -> None:
            try:
                future.set_result(command(driver))
            except Exception as error:
                future.set_exception(error)

        self.send(run)
        return future

    def sleep(self) -> Future[None]:
        """See EngineCore; InputError also while there are requests or live sessions."""
        self._check_open()
        return self.call(lambda driver: driver._sleep())

    def wake(self) -> Future[None]:
        """See EngineCore."""
        self._check_open()
        return self.call(lambda driver: driver.core.wake())

    def close(self) -> None:
        """End every request with an error, and the threads."""
        with self._lock:
            self._closed, thread = True, self._thread
        self._commands.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        self.feeder.close()

    def _check_open(self) -> None:
        if self._closed or os.getpid() != self._process:
            reason = "was closed" if self._closed else "belongs to another process"
            raise InputError(f"the engine {reason}; make a new one")

    def _start(self) -> None:
        """With the lock held."""
        if self._closed:
            raise InputError("the engine was closed; make a new one")
        if self._thread is None:
            arguments = (weakref.ref(self), self._commands, self._num_threads, self.core.runner.device)
            self._thread = threading.Thread(target=_loop, args=arguments, name="sensorium-engine", daemon=True)
            self._thread.start()

    # what the loop's thread does

    def end(self, request_id: str) -> None:
        """A request ends with the finish reason "abort"; ids that are not known, or finished, are ignored."""
        ticket = self._names.get(request_id)
        if ticket is not None:
            self._end(ticket, "abort")

    def follow(self, name: str, ticket: Ticket) -> None:
        """This sequence computes for the ticket."""
        self._owners[name] = ticket

    def _sleep(self) -> None:
        with self._lock:  # so that none comes meanwhile
            live = sum(ticket.keep for ticket in self._names.values())
            if self._names:
                there = f"requests being served: {len(self._names) - live}, live sessions open: {live}"
                raise InputError(f"{there}; wait for them or end them, then sleep()")
            self.core.sleep()

    def _turn(self, command: Callable[[Driver], None] | None) -> None:
        """Do what was asked, compute one step, tell whoever has news. Nothing that happens in it ends the loop."""
        try:
            self._obey(command)
            if self._owners:
                self._step()
        except BaseException as error:  # half a step is done: nobody's state can be trusted
            _log.exception("the engine's loop was interrupted")
            self._break(error)
        self._tell()

    def _obey(self, command: Callable[[Driver], None] | None) -> None:
        """All commands there are."""
        while True:
            if command is not None:
                command(self)
            if self._commands.empty():
                return
            command = self._commands.get()

    def _break(self, error: BaseException) -> None:
        """End all that computes."""
        reason = f"the engine's step was interrupted ({type(error).__name__}); ask again"
        for ticket in set(self._owners.values()):
            self._end(ticket, "error", reason)

    def _shut(self) -> None:
        """The end of the loop: nobody waits for anything any more."""
        for ticket in tuple(self._names.values()):
            self._end(ticket, "error", "the engine was closed; make a new one")
        self._obey(None)
        self._tell()

    def _admit(self, ticket: Ticket, result: Prepared | Exception) -> None:
        """Hand the prepared prompt to the engine; whatever is wrong with it ends in the assembly."""
        if ticket.assembly.finished:
            return
        if isinstance(result, Exception):  # not raised again: its traceback would hold this frame, and that the error
            self._end(ticket, "error", explain(result, "reading a prompt"))
            return
        try:
            ticket.assembly.start(result)
            ticket.clock.admitted = time.perf_counter()
            for request in ticket.sequences(result, self.tokenizer, self._eos, self._seed):
                self.core.add(request)
                self._owners[request.request_id] = ticket
        except Exception as error:
            self._end(ticket, "error", explain(error, "beginning an answer"))

    def _step(self) -> None:
        outputs = self.core.step()
        now = time.perf_counter()
        for output in outputs:
            ticket = self._owners.get(output.request_id)
            if ticket is not None:
                self._deliver(ticket, output, now)
        if self.core.idle and self._owners:
            time.sleep(_IDLE_STEP)
        self._sweep()

    def _sweep(self) -> None:
        """When nothing is left to compute, the worker only frees."""
        if not self._owners:
            try:
                self.core.step()
            except BaseException:  # what is to be freed goes along with the next step
                _log.exception("the engine could not free memory")

    def _deliver(self, ticket: Ticket, output: TokenOutput, now: float) -> None:
        assembly, name = ticket.assembly, output.request_id
        try:
            with ticket.lock:
                stopped = assembly.add(output)
                changed = assembly.changed
                if output.token_ids:
                    ticket.clock.heard(name, now, bool(self.observers))
                if assembly.finished and assembly.request_id in self._names:
                    self._leave(ticket)
                    if output.error is not None or not ticket.keep:
                        self._release(ticket)
            if name not in assembly.open:
                del self._owners[name]
                if stopped and ticket.keep:
                    self.core.rest(name)
                elif stopped or output.finish_reason is None:
                    self.core.abort(name)
        except Exception as error:
            self._end(ticket, "error", explain(error, "writing an answer"))
        else:
            if changed and ticket.partial and not ticket.posted:
                self._news.add(ticket)

    def _end(self, ticket: Ticket, reason: str, error: str | None = None) -> None:
        """Stop it wherever it is, and say so."""
        for name in ticket.assembly.answers:
            if self._owners.pop(name, None) is not None or ticket.keep:
                self.core.abort(name)
        with ticket.lock:
            if not ticket.assembly.finished:
                ticket.assembly.end(reason, error)
                self._leave(ticket)
            self._release(ticket)
        self._sweep()

    def _drop(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            self._end(ticket, "abort")
            self._news.discard(ticket)

    def _leave(self, ticket: Ticket) -> None:
        """Its answer is finished: its place among prompts is free, a session that waits takes none; observers hear of it."""
        self._news.add(ticket)
        if ticket.entry is not None:
            self.feeder.drop(ticket.entry)
            ticket.entry = None  # it leads back here: media would stay until the collector finds the circle
        assembly = ticket.assembly
        waited = ticket.clock.waited(assembly.prepared.timings)
        assembly.timings["queue"] = assembly.timings.get("queue", 0.0) + waited
        for observe in self.observers:
            try:
                observe(assembly.trace(ticket.clock))
            except Exception:
                _log.exception("an observer of requests failed")

    def _release(self, ticket: Ticket) -> None:
        """Nothing more will come: its name is free."""
        ticket.keep = False
        self._names.pop(ticket.assembly.request_id, None)

    def _tell(self) -> None:
        """Each caller once, however many of its requests have news."""
        mail: dict[Callable[[list[Ticket]], None], list[Ticket]] = {}
        for ticket in self._news:
            ticket.posted = True
            mail.setdefault(ticket.post, []).append(ticket)
        self._news = set()
        for post, tickets in mail.items():
            try:
                post(tickets)
            except RuntimeError:  # its event loop is closed: nobody listens any more
                self._drop(tickets)


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that computes while the interpreter goes away would crash it."""
    for driver in list(_drivers):
        if driver._process == os.getpid():
            driver.close()


def _loop(ref: weakref.ref[Driver], commands: SimpleQueue[Any], num_threads: int, device: torch.device) -> None:
    """Holds the driver only while there is work, so that it ends when nobody else does."""
    use_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    command = None
    while True:
        driver = ref()
        if driver is None or driver._closed:
            break
        driver._turn(command)
        command, busy = None, bool(driver._owners) or driver._closed  # the turn may have read what `close` sent to wake us
        del driver
        if not busy:
            command = commands.get()
    if driver is not None:
        driver._shut()


def _preparation(core: EngineCore, job: Job) -> Callable[[], Prepared | Unfinished]:
    """A grammar is compiled where the prompt is read, so that the loop finds it done: the first one takes a second."""
    wanted = job.params.structured_outputs
    if wanted is None:
        return job.prepare

    def prepare() -> Prepared | Unfinished:
        core.runner.check_grammar(wanted)
        return job.prepare()

    return prepare


def _admission(commands: SimpleQueue[Any], ticket: Ticket) -> Callable[[Prepared | Exception], None]:
    """What the feeder calls with the prepared prompt: does not hold the driver."""
    return lambda result: commands.put(lambda driver: driver._admit(ticket, result))


def _dropping(ticket: Ticket) -> Callable[[Driver], None]:
    """A command that holds nothing but the ticket."""
    return lambda driver: driver._drop((ticket,))
