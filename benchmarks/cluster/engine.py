"""A simulated engine: continuous batching with chunked prefill, a KV cache of a number of tokens, and an encoder cache."""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from .costs import Costs, Link
from .load import Item, Request


class Clock:
    """The events of a simulation in the order of their times; those of equal times in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), action))

    def run(self) -> None:
        """Run until no event is left."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()


@dataclass(frozen=True)
class Limits:
    """Limits of an engine, with the names of its options. `encoder_rows`: rows that its encoder cache holds."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    kv_tokens: int = 1 << 20
    encoder_rows: int = 1 << 16


@dataclass(eq=False)
class Job:
    """A request on its way through the cluster.

    Args:
        prefilled: prompt tokens in a KV cache.
        generated: tokens so far.
        has_rows: its encoder rows came from elsewhere.
        started, finished: times of the first and the last token.
    """

    request: Request
    prefilled: int = 0
    generated: int = 0
    has_rows: bool = False
    attempts: int = 1
    started: float | None = None
    finished: float | None = None
    first_step: bool = field(default=True, repr=False)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the KV cache once the request is complete."""
        return self.request.prompt_tokens + self.request.output_tokens

    @property
    def is_done(self) -> bool:
        return self.generated >= self.request.output_tokens

    def restart(self) -> None:
        """Discard the computed tokens, but keep the time of the first token, which the client has received."""
        self.prefilled = self.generated = 0
        self.has_rows, self.first_step = False, True
        self.attempts += 1


class RowCache:
    """Encoder rows by item; those that were not used for the longest time leave first."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._items, self._size = capacity, OrderedDict[int, int](), 0

    def missing(self, items: Sequence[Item]) -> int:
        """Return the rows that must be computed, and keep them."""
        rows = 0
        for item in items:
            if item.key in self._items:
                self._items.move_to_end(item.key)
                continue
            rows += item.rows
            self._items[item.key] = item.rows
            self._size += item.rows
        while self._size > self._capacity:
            self._size -= self._items.popitem(last=False)[1]
        return rows


class Engine:
    """One engine. It computes a step while it has jobs.

    Args:
        on_leave: called with each job that is complete, and with those that `only_prefill` hands over.
        only_prefill: jobs leave with their first token.
    """

    def __init__(
        self, clock: Clock, name: str, costs: Costs, limits: Limits, on_leave: Callable[[Job], None], only_prefill: bool = False
    ) -> None:
        self.clock, self.name, self.costs, self.limits = clock, name, costs, limits
        self.waiting: deque[Job] = deque()
        self.prefilling: list[Job] = []
        self.generating: list[tuple[int, int, Job]] = []  # heap of: the step that ends it, number, job
        self.busy_seconds, self.is_up, self.takes_jobs = 0.0, True, True
        self._on_leave, self._only_prefill = on_leave, only_prefill
        self._rows = RowCache(limits.encoder_rows)
        self._held = self._context = 0  # tokens of the KV cache: reserved, and read by each step that generates
        self._steps = self._epoch = 0  # a step that began in an earlier epoch is lost
        self._is_computing = False

    @property
    def load(self) -> int:
        """The number of its jobs."""
        return len(self.waiting) + self._running

    @property
    def _running(self) -> int:
        return len(self.prefilling) + len(self.generating)

    def fits(self, job: Job) -> bool:
        """Return whether the engine can ever hold a job."""
        return job.kv_tokens <= self.limits.kv_tokens

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        if not self._is_computing:
            self._begin()

    def fail(self) -> list[Job]:
        """End the engine, and return the jobs that it had. Its caches are lost."""
        jobs = [*(job for *_, job in self.generating), *self.prefilling, *self.waiting]
        self.generating, self.prefilling, self.waiting, self._held, self._context = [], [], deque(), 0, 0
        self._rows = RowCache(self.limits.encoder_rows)
        self.is_up, self._is_computing, self._epoch = False, False, self._epoch + 1
        return jobs

    def _begin(self) -> None:
        """Choose the rows of the next step and compute it."""
        budget = self.limits.max_num_batched_tokens - len(self.generating)
        chunks: list[tuple[Job, int]] = []
        for job in self.prefilling:
            if budget > 0:
                chunks.append((job, min(budget, job.request.prompt_tokens - job.prefilled)))
                budget -= chunks[-1][1]
        while self.waiting and self._running < self.limits.max_num_seqs and budget > 0:
            job = self.waiting[0]
            if self._held + job.kv_tokens > self.limits.kv_tokens:
                break
            self.waiting.popleft()
            self._held += job.kv_tokens
            if job.prefilled == job.request.prompt_tokens:  # its KV cache came from another engine
                self._generate(job)
                budget -= 1
                continue
            self.prefilling.append(job)
            chunks.append((job, min(budget, job.request.prompt_tokens)))
            budget -= chunks[-1][1]
        self._is_computing = bool(self.generating or chunks)
        if self._is_computing:
            self._compute(chunks)

    def _generate(self, job: Job) -> None:
        """Let a job, which has its first token, generate the others: one in each step."""
        last = self._steps + job.request.output_tokens - job.generated
        heapq.heappush(self.generating, (last, job.request.number, job))
        self._context += job.prefilled + job.generated

    def _compute(self, chunks: list[tuple[Job, int]]) -> None:
        encoded = 0
        for job, _ in chunks:
            if job.first_step and not job.has_rows:
                encoded += self._rows.missing(job.request.items)
            job.first_step = False
        ending = sum(job.prefilled + size == job.request.prompt_tokens for job, size in chunks)
        context = self._context + sum(job.prefilled for job, _ in chunks)
        rows, sampling = len(self.generating) + sum(size for _, size in chunks), len(self.generating) + ending
        seconds = self.costs.step_seconds(rows, sampling, context) + self.costs.encode_seconds(encoded)
        epoch = self._epoch
        self.clock.after(seconds, lambda: self._end(epoch, seconds, chunks))

    def _end(self, epoch: int, seconds: float, chunks: list[tuple[Job, int]]) -> None:
        """Give out a step's tokens and begin the next one."""
        if epoch != self._epoch:
            return
        self.busy_seconds += seconds
        self._steps += 1
        self._context += len(self.generating)
        while self.generating and self.generating[0][0] <= self._steps:
            *_, job = heapq.heappop(self.generating)
            job.generated = job.request.output_tokens
            self._context -= job.kv_tokens
            self._leave(job)
        for job, size in chunks:
            job.prefilled += size
            if job.prefilled == job.request.prompt_tokens:
                self._start(job)
        self._begin()

    def _start(self, job: Job) -> None:
        """Give out a job's first token."""
        self.prefilling.remove(job)
        job.generated = 1
        job.started = self.clock.now if job.started is None else job.started
        if job.is_done or self._only_prefill:
            self._leave(job)
        else:
            self._generate(job)

    def _leave(self, job: Job) -> None:
        self._held -= job.kv_tokens
        self._on_leave(job)


class Queue:
    """Something that serves one job after another: an encoder worker, or a link."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._free_at, self.busy_seconds = clock, 0.0, 0.0

    def serve(self, seconds: float, then: Callable[[], None], delay: float = 0.0) -> None:
        """Call `then` once `seconds` of service, after those of earlier jobs, and a delay are over."""
        self._free_at = max(self._free_at, self._clock.now) + seconds
        self.busy_seconds += seconds
        self._clock.after(self._free_at + delay - self._clock.now, then)

    def send(self, link: Link, num_bytes: float, then: Callable[[], None]) -> None:
        """Send bytes: they take the link for a time, and arrive after its latency."""
        self.serve(num_bytes / link.bandwidth, then, link.latency)
