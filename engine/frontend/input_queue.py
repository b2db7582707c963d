"""The queue of prompts: it decides in which order, threads and memory they are parsed, downloaded, decoded and processed."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

from ...mm.media.isolate import Interrupt
from ...mm.tenants import tenant_of
from ..scheduler.policy import Order, SchedulingPolicy
from ..threads import use_threads
from .input_processor import ParsedPrompt
from .processed_prompt import ProcessedPrompt

_NUM_PARSERS = 2  # threads that render and tokenise
_NUM_OPENERS = 2  # threads that do the same for prompts with files, and open these
_MAX_FETCHING = 32  # prompts whose media are being downloaded or wait for a media worker
_MAX_REMOTE = 1024  # prompts that wait for downloads
_MEDIA_STAGES = ("awaiting_uuids", "to_process", "processing")


class TenantHeaps:
    """Entries that wait for a stage, with a heap for each tenant, so that a tenant without a place is passed over at once.

    Args:
        stage: entries that have left this stage are dropped.
    """

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._heaps: dict[str | None, list[tuple[Order, QueueEntry]]] = {}
        self._firsts: list[tuple[Order, str | None]] = []  # the first entry of each heap, and some that are not first any more

    def entries_of(self, owner: str | None) -> Iterator[QueueEntry]:
        """Iterate over a tenant's entries that wait, in no order."""
        return (entry for _, entry in self._heaps.get(owner, ()) if entry.stage == self._stage)

    def push(self, entry: QueueEntry) -> None:
        heap = self._heaps.setdefault(entry.owner, [])
        heapq.heappush(heap, (entry.order, entry))
        if heap[0][1] is entry:
            heapq.heappush(self._firsts, (entry.order, entry.owner))

    def pop(self, may_start: Callable[[str | None], bool]) -> QueueEntry | None:
        """Remove and return the first entry of the tenants that may start one; None if there is none."""
        passed, chosen = list[tuple[Order, str | None]](), None
        while self._firsts and chosen is None:
            first = order, owner = heapq.heappop(self._firsts)
            heap = self._heaps.get(owner)
            if not heap or heap[0][0] != order:
                continue
            entry = heap[0][1]
            if entry.stage == self._stage and not may_start(owner):
                passed.append(first)
                continue
            heapq.heappop(heap)
            if heap:
                heapq.heappush(self._firsts, (heap[0][0], owner))
            else:
                del self._heaps[owner]
            chosen = entry if entry.stage == self._stage else None
        for first in passed:
            heapq.heappush(self._firsts, first)
        return chosen


@dataclass(eq=False)
class QueueEntry:
    """One prompt in the queue.

    Args:
        prepare: parses the prompt; a prompt with media gives a ParsedPrompt, which is fetched and processed later.
        done: called once, in any thread, with the processed prompt or the error, unless the entry was dropped before.
        has_files: the prompt's messages hold files. Parsing opens PDFs, which may take seconds.
        salt: the prompt's `cache_salt`.
        stage: waiting, parsing, opening (parsing of a prompt with files), to_fetch, fetching, awaiting_uuids (other prompts
            have to provide its content), to_process, processing, held (by the engine), gone.
        num_bytes: bytes of the processed items while the entry is held.
        arrival: its turn, and its number among all entries. remaining: see `Work`.
        order: the policy's key.
        parsed: the prompt after parsing, if it has media.
        interrupt: ends the parsing of a prompt that was dropped.
        downloads: its running downloads.
    """

    prepare: Callable[[], ProcessedPrompt | ParsedPrompt]
    done: Callable[[ProcessedPrompt | Exception], None]
    priority: int = 0
    has_files: bool = False
    salt: str | None = None
    stage: str = "waiting"
    num_bytes: int = 0
    arrival: tuple[int, int] = (0, 0)
    remaining: int = 0
    order: Order = ()
    parsed: ParsedPrompt | None = None
    interrupt: Interrupt = field(default_factory=Interrupt)
    downloads: Sequence[Future[Any]] = ()

    @property
    def owner(self) -> str | None:
        """The prompt's tenant."""
        return tenant_of(self.salt)


class InputQueue:
    """Queue of prompts, with thread pools that parse, download, and decode and process. Thread-safe.

    Entries of one `add` keep their order. Several large batches take turns entry by entry, so a small batch does not wait for
    a large one. The policy orders entries by their priority and these turns. A prompt that is ready overtakes slower ones:
    text overtakes a slow video, and local media overtake downloads. Prompts with files have threads of their own, so that slow
    PDFs delay no other prompt, and one that is dropped while its PDFs are opened frees its thread. A prompt with uuids
    waits for earlier prompts of its `cache_salt` that give the same uuids with data, or that are not parsed yet and may do so.

    Args:
        window: limit on the prompts being parsed, plus the larger of two numbers: prompts that are held, and prompts whose
            media are loaded but not processed yet. Prompts that wait for downloads do not count; their limit is _MAX_REMOTE.
        workers: number of threads that decode and process.
        capacity: maximum bytes of processed media and `prompt_embeds` that are held. If nothing is held, one larger prompt is
            processed. While `prompt_embeds` are held, no prompt is parsed that may go over it.
    """

    def __init__(self, window: int, workers: int, capacity: int, policy: SchedulingPolicy) -> None:
        self._window, self._num_workers, self._capacity, self._policy = window, workers, capacity, policy
        one_thread: dict[str, Any] = {"initializer": use_threads, "initargs": (1,)}
        self._parsers = ThreadPoolExecutor(_NUM_PARSERS, "sensorium-parse", **one_thread)
        self._openers = ThreadPoolExecutor(_NUM_OPENERS, "sensorium-open", **one_thread)
        self._workers = ThreadPoolExecutor(workers, "sensorium-media", **one_thread)
        self._lock = threading.RLock()
        self._waiting: list[tuple[Order, QueueEntry]] = []
        self._to_open = TenantHeaps("waiting")  # like _waiting, with files
        self._to_fetch = TenantHeaps("to_fetch")
        self._to_process: list[tuple[Order, QueueEntry]] = []
        self._awaiting_uuids: list[QueueEntry] = []
        self._in_progress: dict[QueueEntry, None] = {}  # started and not held yet, in order
        self._count: Counter[str] = Counter()  # entries per stage
        self._turn = self._arrivals = 0
        self._bytes = 0  # processed media and prompt_embeds of held entries
        self._embeds = set[QueueEntry]()  # held entries with prompt_embeds, which parsing alone processes
        self._starting = False
        self._average_bytes = 0.0  # moving average of these bytes per prompt that has any

    @property
    def num_waiting(self) -> int:
        """Number of prompts that the engine does not hold yet."""
        with self._lock:
            return sum(count for stage, count in self._count.items() if stage not in ("held", "gone"))

    def add(self, entries: Sequence[QueueEntry], after: int = 0) -> int:
        """Queue entries, behind turn `after` if they continue an earlier batch. Return the turn of the last one."""
        with self._lock:
            turn = max(self._turn, after)
            for entry in entries:
                turn += 1
                self._arrivals += 1
                self._count["waiting"] += 1
                entry.arrival = (turn, self._arrivals)
                entry.order = self._policy.order(entry)
                if entry.has_files:
                    self._to_open.push(entry)
                else:
                    heapq.heappush(self._waiting, (entry.order, entry))
            self._start_ready()
            return turn

    def drop(self, *entries: QueueEntry) -> None:
        """Remove entries that are finished or aborted, and free their places and bytes."""
        with self._lock:
            for entry in entries:
                if entry.stage == "held":
                    self._bytes -= entry.num_bytes
                    self._embeds.discard(entry)
                if entry.stage != "processing" and entry.parsed is not None:  # `finish` closes it
                    entry.parsed.ledger.close()
                self._move(entry, "gone")
                entry.interrupt.stop()
                for future in entry.downloads:  # after the move: the last download that ends sends an entry to its next stage
                    future.cancel()
            self._start_ready()

    def close(self) -> None:
        """Start no more work. Running work ends by itself."""
        for pool in (self._parsers, self._openers, self._workers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _move(self, entry: QueueEntry, stage: str) -> None:
        self._count[entry.stage] -= 1
        entry.stage = stage
        self._count[stage] += stage != "gone"
        if stage in ("held", "gone"):
            self._in_progress.pop(entry, None)
        else:
            self._in_progress[entry] = None

    def _start_ready(self) -> None:
        """Start all work there is room for. Work that finishes at once calls this again; the nested call does nothing."""
        if self._starting:
            return
        self._starting = True
        try:
            while self._start_one():
                pass
        finally:
            self._starting = False

    def _start_one(self) -> bool:
        """Start the next stage of one entry. Return False if there is room for none."""
        self._release_provided()
        if self._waiting and self._room_to_parse("parsing", _NUM_PARSERS):
            _, entry = heapq.heappop(self._waiting)
            if entry.stage == "waiting":
                self._parse(entry, "parsing", self._parsers)
        elif (opening := self._pop_to_open()) is not None:
            self._parse(opening, "opening", self._openers)
        elif (fetching := self._pop_to_fetch()) is not None:
            self._fetch(fetching)
        elif self._to_process and self._room_to_process():
            _, entry = heapq.heappop(self._to_process)
            if entry.stage == "to_process" and entry.parsed is not None:
                self._run(entry, "processing", self._workers, entry.parsed.finish)
        else:
            return False
        return True

    def _pop_to_open(self) -> QueueEntry | None:
        """Remove and return the next prompt with files to parse."""
        if not self._room_to_parse("opening", _NUM_OPENERS):
            return None
        return self._pop_fairly(self._to_open, ("opening",), _NUM_OPENERS)

    def _pop_to_fetch(self) -> QueueEntry | None:
        """Remove and return the next prompt to download."""
        return self._pop_fairly(self._to_fetch, ("fetching", "to_process"), _MAX_FETCHING)

    def _pop_fairly(self, waiting: TenantHeaps, next_stages: Sequence[str], places: int) -> QueueEntry | None:
        """Remove and return the next entry. A tenant gets another place if more places are free than it holds."""
        busy = Counter(entry.owner for entry in self._in_progress if entry.stage in next_stages)
        left = places - busy.total()
        return waiting.pop(lambda owner: owner is None or busy[owner] < left) if left > 0 else None

    def _release_provided(self) -> None:
        """Queue waiting entries for processing if no earlier prompt can still provide their uuids."""
        done = [e for e in self._awaiting_uuids if e.stage != "awaiting_uuids" or not self._has_provider(e)]
        for entry in done:
            self._awaiting_uuids.remove(entry)
            if entry.stage == "awaiting_uuids":
                self._move(entry, "to_process")
                heapq.heappush(self._to_process, (entry.order, entry))

    def _has_provider(self, entry: QueueEntry) -> bool:
        """Return True if an earlier prompt provides data of the entry's uuids, or has its salt and is not parsed yet."""
        required = entry.parsed.required_uuids if entry.parsed is not None else frozenset()
        return bool(required) and any(
            other.arrival[1] < entry.arrival[1]
            and (other.salt == entry.salt if other.parsed is None else not required.isdisjoint(other.parsed.provided_uuids))
            for other in chain(self._in_progress, self._to_open.entries_of(entry.owner))
        )

    def _await_uuids(self, entry: QueueEntry) -> None:
        self._move(entry, "awaiting_uuids")
        self._awaiting_uuids.append(entry)

    def _room_to_parse(self, stage: str, threads: int) -> bool:
        media = sum(self._count[stage] for stage in _MEDIA_STAGES)
        parsing = self._count[stage]
        if parsing >= threads or self._count["to_fetch"] + self._count["fetching"] >= _MAX_REMOTE:
            return False
        full = self._embeds and self._bytes + (self._count["parsing"] + 1) * self._average_bytes > self._capacity
        return not full and parsing + max(media, self._count["held"]) < self._window

    def _parse(self, entry: QueueEntry, stage: str, pool: ThreadPoolExecutor) -> None:
        self._turn = max(self._turn, entry.arrival[0])
        self._run(entry, stage, pool, partial(entry.interrupt.run, entry.prepare))

    def _room_to_process(self) -> bool:
        processing = self._count["processing"]
        room = self._bytes + (processing + 1) * self._average_bytes <= self._capacity
        return processing < self._num_workers and (room or not (processing or self._bytes))

    def _run(
        self, entry: QueueEntry, stage: str, pool: ThreadPoolExecutor, work: Callable[[], ProcessedPrompt | ParsedPrompt]
    ) -> None:
        self._move(entry, stage)
        try:
            future = pool.submit(work)
        except RuntimeError as error:  # the pool or the interpreter is shutting down
            self._finish(entry, error)
            return
        future.add_done_callback(lambda done: self._on_stage_done(entry, done))

    def _on_stage_done(self, entry: QueueEntry, future: Future[ProcessedPrompt | ParsedPrompt]) -> None:
        """Send the entry to its next stage. Runs in the thread that did the work or cancelled it."""
        with self._lock:
            if entry.stage == "gone" or future.cancelled():
                return
            error = future.exception()
            if error is not None:
                self._finish(entry, error if isinstance(error, Exception) else RuntimeError(repr(error)))
            elif isinstance(result := future.result(), ParsedPrompt):
                entry.parsed = result
                result.ledger.background = self._policy.is_background(entry)
                if result.remote:
                    self._move(entry, "to_fetch")
                    self._to_fetch.push(entry)
                else:
                    self._await_uuids(entry)
            else:
                self._finish(entry, result)
            self._start_ready()

    def _fetch(self, entry: QueueEntry) -> None:
        assert entry.parsed is not None
        self._move(entry, "fetching")
        try:
            entry.downloads = entry.parsed.fetch()
        except RuntimeError as error:
            self._finish(entry, error)
            return
        remaining = [len(entry.downloads)]

        def fetched(_: Future[Any]) -> None:
            with self._lock:
                remaining[0] -= 1
                if remaining[0] == 0 and entry.stage == "fetching":
                    self._await_uuids(entry)
                    self._start_ready()

        for future in entry.downloads:
            future.add_done_callback(fetched)

    def _finish(self, entry: QueueEntry, result: ProcessedPrompt | Exception) -> None:
        self._move(entry, "held")
        if isinstance(result, ProcessedPrompt):
            entry.num_bytes = result.num_bytes
            self._bytes += entry.num_bytes
            if entry.parsed is None and entry.num_bytes:
                self._embeds.add(entry)
            if entry.parsed is not None or entry.num_bytes:
                self._average_bytes = (
                    (3 * self._average_bytes + entry.num_bytes) / 4 if self._average_bytes else entry.num_bytes
                )
        entry.parsed, entry.downloads = None, ()
        entry.done(result)
