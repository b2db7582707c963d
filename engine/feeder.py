"""Which prompt is prepared next, in which thread and how much memory. Knows no engine and nothing of what a prompt holds."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .input import Prepared, Unfinished
from .threads import use_threads

_READERS = 2  # threads that render and tokenise
_FETCHING = 32  # prompts whose media are downloaded, or were and wait for a worker
_MEDIA = ("unfetched", "fetching", "named", "undecoded", "decoding")


Order = tuple[int, int, int]  # priority, turn, arrival


@dataclass(eq=False)
class Entry:
    """One prompt on its way. `done` is called once, in any thread, with what it became, unless it was dropped before.

    `stage`: coming, reading, unfetched, fetching, named (waits for content that another gives), undecoded, decoding, held (in
    the engine), gone.
    """

    prepare: Callable[[], Prepared | Unfinished]
    done: Callable[[Prepared | Exception], None]
    priority: int = 0
    stage: str = "coming"
    num_bytes: int = 0
    order: Order = (0, 0, 0)
    draft: Unfinished | None = None
    waits: Sequence[Future[Any]] = ()


class Feeder:
    """A line of prompts, and three pools beside it: to read, to download, to decode. Thread-safe.

    Entries of one `add` keep their order; two that ask for much at once take turns, whoever asks for little comes in
    between. A smaller priority goes first. A prompt is done as soon as it can be: text passes a clip that takes long,
    what is on this machine passes downloads. One that names content without giving it waits for those before it that
    give it, or may: they are still read.

    Args:
        window: prompts without media that are read or held at once, and prompts with media on their way.
        workers: threads that decode and process.
        capacity: bytes of processed media held; beyond it none are decoded, except when nothing is held at all.
    """

    def __init__(self, window: int, workers: int, capacity: int) -> None:
        self._window, self._at_once, self._capacity = window, workers, capacity
        one_thread: dict[str, Any] = {"initializer": use_threads, "initargs": (1,)}
        self._readers = ThreadPoolExecutor(_READERS, "sensorium-read", **one_thread)
        self._workers = ThreadPoolExecutor(workers, "sensorium-media", **one_thread)
        self._lock = threading.RLock()
        self._coming: list[tuple[Order, Entry]] = []
        self._unfetched: list[tuple[Order, Entry]] = []
        self._undecoded: list[tuple[Order, Entry]] = []
        self._named: list[Entry] = []
        self._on_way: dict[Entry, None] = {}  # those begun that are not held yet
        self._count: Counter[str] = Counter()  # entries by stage
        self._turn = self._arrivals = 0
        self._bytes = 0  # of entries that are held
        self._pumping = False
        self._typical = 0.0  # bytes of a prompt with media, the latest counting most

    @property
    def num_waiting(self) -> int:
        """Prompts that are not in the engine yet."""
        return sum(count for stage, count in self._count.items() if stage not in ("held", "gone"))

    def add(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            for turn, entry in enumerate(entries, self._turn + 1):
                self._arrivals += 1
                self._count["coming"] += 1
                entry.order = (entry.priority, turn, self._arrivals)
                heapq.heappush(self._coming, (entry.order, entry))
            self._pump()

    def drop(self, entry: Entry) -> None:
        """It has left the engine, or will never get there; its place and bytes are free."""
        with self._lock:
            if entry.stage == "held":
                self._bytes -= entry.num_bytes
            if entry.stage == "fetching":
                for future in entry.waits:
                    future.cancel()
            self._move(entry, "gone")
            self._pump()

    def close(self) -> None:
        """Nothing more is begun; what has been goes to its end by itself."""
        for pool in (self._readers, self._workers):
            pool.shutdown(wait=False, cancel_futures=True)

    def _move(self, entry: Entry, stage: str) -> None:
        self._count[entry.stage] -= 1
        entry.stage = stage
        self._count[stage] += stage != "gone"
        if stage in ("held", "gone"):
            self._on_way.pop(entry, None)
        else:
            self._on_way[entry] = None

    def _pump(self) -> None:
        """Begin what there is room for; not from inside itself, for what is begun may be done at once."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._begin():
                pass
        finally:
            self._pumping = False

    def _begin(self) -> bool:
        """One more stage of one entry; False when there is room for none."""
        self._release()
        if self._coming and self._room_to_read():
            _, entry = heapq.heappop(self._coming)
            if entry.stage == "coming":
                self._turn = max(self._turn, entry.order[1])
                self._run(entry, "reading", self._readers, entry.prepare)
        elif self._unfetched and self._count["fetching"] + self._count["undecoded"] < _FETCHING:
            _, entry = heapq.heappop(self._unfetched)
            if entry.stage == "unfetched" and entry.draft is not None:
                self._fetch(entry, entry.draft)
        elif self._undecoded and self._room_to_decode():
            _, entry = heapq.heappop(self._undecoded)
            if entry.stage == "undecoded" and entry.draft is not None:
                self._run(entry, "decoding", self._workers, entry.draft.finish)
        else:
            return False
        return True

    def _release(self) -> None:
        """Those whose names nobody before them is still to give may be decoded."""
        for entry in [one for one in self._named if one.stage != "named" or not self._waits(one)]:
            self._named.remove(entry)
            if entry.stage == "named":
                self._move(entry, "undecoded")
                heapq.heappush(self._undecoded, (entry.order, entry))

    def _waits(self, entry: Entry) -> bool:
        asks = entry.draft.asks if entry.draft is not None else frozenset()
        return bool(asks) and any(
            other.order[2] < entry.order[2] and (other.draft is None or not asks.isdisjoint(other.draft.gives))
            for other in self._on_way
        )

    def _await_names(self, entry: Entry) -> None:
        self._move(entry, "named")
        self._named.append(entry)

    def _room_to_read(self) -> bool:
        media = sum(self._count[stage] for stage in _MEDIA)
        return self._count["reading"] + max(media, self._count["held"]) < self._window

    def _room_to_decode(self) -> bool:
        under_way = self._count["decoding"]
        room = self._bytes + (under_way + 1) * self._typical <= self._capacity
        return under_way < self._at_once and (room or not (under_way or self._bytes))

    def _run(self, entry: Entry, stage: str, pool: ThreadPoolExecutor, work: Callable[[], Prepared | Unfinished]) -> None:
        self._move(entry, stage)
        try:
            future = pool.submit(work)
        except RuntimeError as error:  # the pool is shut down, or the interpreter is
            self._finish(entry, error)
            return
        future.add_done_callback(lambda done: self._went(entry, done))

    def _went(self, entry: Entry, future: Future[Prepared | Unfinished]) -> None:
        """A stage is over: in the thread that worked, or in the one that cancelled it."""
        with self._lock:
            if entry.stage == "gone" or future.cancelled():
                return
            error = future.exception()
            if error is not None:
                self._finish(entry, error if isinstance(error, Exception) else RuntimeError(repr(error)))
            elif isinstance(result := future.result(), Unfinished):
                entry.draft = result
                if result.remote:
                    self._move(entry, "unfetched")
                    heapq.heappush(self._unfetched, (entry.order, entry))
                else:
                    self._await_names(entry)
            else:
                self._finish(entry, result)
            self._pump()

    def _fetch(self, entry: Entry, draft: Unfinished) -> None:
        self._move(entry, "fetching")
        try:
            entry.waits = draft.fetch()
        except RuntimeError as error:
            self._finish(entry, error)
            return
        left = [len(entry.waits)]

        def fetched(_: Future[Any]) -> None:
            with self._lock:
                left[0] -= 1
                if left[0] == 0 and entry.stage == "fetching":
                    self._await_names(entry)
                    self._pump()

        for future in entry.waits:
            future.add_done_callback(fetched)

    def _finish(self, entry: Entry, result: Prepared | Exception) -> None:
        self._move(entry, "held")
        if isinstance(result, Prepared):
            entry.num_bytes = result.num_bytes
            self._bytes += entry.num_bytes
            if entry.draft is not None:
                self._typical = (3 * self._typical + entry.num_bytes) / 4 if self._typical else entry.num_bytes
        entry.draft, entry.waits = None, ()
        entry.done(result)
