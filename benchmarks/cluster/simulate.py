"""A simulated cluster: engines, encoder workers, links, failures and scaling, for one list of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from math import ceil
from random import Random
from typing import Literal

from .costs import Costs, Link
from .engine import Clock, Engine, Job, Limits, Queue
from .load import Request

ATTEMPTS = 3
"""How often a request is computed whose engines end."""
SLACK, FACTOR = 4, 1.25  # as in sensorium/server/ray_serve/routing.py
_FAR = Link(float("inf"), 0.0)


@dataclass(frozen=True)
class Scaling:
    """Replicas that come and go, as Ray Serve scales: enough that each has `target` requests.

    Args:
        start_seconds: until a new replica takes requests.
        period: seconds between decisions. Fewer replicas are wanted `patience` times in a row before one is removed.
    """

    least: int
    most: int
    target: float
    start_seconds: float = 30.0
    period: float = 5.0
    patience: int = 12


@dataclass(frozen=True)
class Setup:
    """A cluster.

    Args:
        costs, limits: of each engine.
        replicas: engines that generate. With `scaling`, those at the start.
        prefills: engines that compute prompts only, and hand the KV cache over; 0: each engine computes its own prompts.
        encoders: workers that compute encoder rows only; 0: each engine encodes.
        kv_bytes, row_bytes: of a token in the KV cache, and of an encoder row.
        network: the link of each engine and worker.
        routing: "content": requests with the same first item to one engine, unless it has more than others; "least": to the
            engine with the fewest requests; "turns": one after the other.
        mean_life: mean seconds until an engine ends; None: never. It is back after `restart_seconds`.
    """

    costs: Costs
    limits: Limits = field(default_factory=Limits)
    replicas: int = 1
    prefills: int = 0
    encoders: int = 0
    kv_bytes: int = 0
    row_bytes: int = 0
    network: Link = _FAR
    routing: Literal["content", "least", "turns"] = "content"
    mean_life: float | None = None
    restart_seconds: float = 60.0
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Result:
    """The result of a simulation. `area`: integral of the requests in the system over time. `engine_seconds`: of engines
    that were up. `most_replicas`: at one time."""

    jobs: Sequence[Job]
    seconds: float
    area: float
    busy_seconds: float
    engine_seconds: float
    most_replicas: int

    @property
    def finished(self) -> list[Job]:
        return [job for job in self.jobs if job.finished is not None]

    @property
    def latencies(self) -> list[float]:
        """Seconds from arrival to the last token, in rising order."""
        return sorted(job.finished - job.request.arrival for job in self.jobs if job.finished is not None)

    @property
    def first_tokens(self) -> list[float]:
        """Seconds from arrival to the first token (TTFT), in rising order."""
        return sorted(job.started - job.request.arrival for job in self.finished if job.started is not None)

    @property
    def token_gaps(self) -> list[float]:
        """Mean seconds between the tokens of each request (TPOT), in rising order."""
        gaps = [(job.finished or 0) - (job.started or 0) for job in self.finished if job.request.output_tokens > 1]
        tokens = [job.request.output_tokens - 1 for job in self.finished if job.request.output_tokens > 1]
        return sorted(gap / number for gap, number in zip(gaps, tokens, strict=True))

    @property
    def tokens_per_second(self) -> float:
        return sum(job.request.output_tokens for job in self.finished) / self.seconds if self.seconds else 0.0


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of rising values is; NaN for none."""
    return values[min(len(values) - 1, ceil(share * len(values)) - 1 if share else 0)] if values else float("nan")


def simulate(setup: Setup, requests: Sequence[Request], seed: int = 0) -> Result:
    """Simulate requests on a cluster and return the result. Equal arguments give equal results."""
    return Cluster(setup, requests, seed).run()


class Cluster:
    """The state of a simulation. See `simulate`."""

    def __init__(self, setup: Setup, requests: Sequence[Request], seed: int) -> None:
        self.setup, self.clock, self.random = setup, Clock(), Random(f"{seed} cluster")
        self.jobs = [Job(request) for request in requests]
        self.left = len(self.jobs)
        self.backlog: deque[Callable[[], None]] = deque()  # what waits for an engine that is up
        self.engines: list[Engine] = []
        self.retired: list[Engine] = []
        self.made = self.open = self.turn = self.starting = self.wishes = self.most = 0
        self.area = self.engine_seconds = self.changed = self.counted = 0.0
        self.prefills = [self._engine("prefill", only_prefill=True) for _ in range(setup.prefills)]
        for _ in range(setup.replicas):
            self._add()
        self.encoders = [Queue(self.clock) for _ in range(setup.encoders)]
        self.links = [Queue(self.clock) for _ in range(max(1, setup.encoders, setup.prefills))]

    def run(self) -> Result:
        for job in self.jobs:
            self.clock.after(job.request.arrival, partial(self._arrive, job))
        if self.setup.scaling is not None and self.jobs:
            self.clock.after(self.setup.scaling.period, self._scale)
        self.clock.run()
        end = max((job.finished for job in self.jobs if job.finished is not None), default=0.0)
        self._count_engines()
        busy = sum(engine.busy_seconds for engine in (*self.engines, *self.prefills, *self.retired))
        return Result(self.jobs, end, self.area, busy, self.engine_seconds, self.most)

    def _engine(self, kind: str, only_prefill: bool = False) -> Engine:
        setup, self.made = self.setup, self.made + 1
        leave = self._hand_over if only_prefill else self._finish
        engine = Engine(self.clock, f"{kind}-{self.made}", setup.costs, setup.limits, leave, only_prefill)
        if setup.mean_life is not None:
            self.clock.after(self.random.expovariate(1 / setup.mean_life), partial(self._fail, engine))
        return engine

    def _add(self) -> None:
        """Add an engine that generates."""
        self._count_engines()
        self.engines.append(self._engine("engine"))
        self.most = max(self.most, len(self.engines))

    def _count_engines(self) -> None:
        up = sum(engine.is_up for engine in self.engines)
        self.engine_seconds += up * (self.clock.now - self.counted)
        self.counted = self.clock.now

    def _change_open(self, change: int) -> None:
        self.area += self.open * (self.clock.now - self.changed)
        self.changed, self.open = self.clock.now, self.open + change

    def _arrive(self, job: Job) -> None:
        self._change_open(1)
        self.clock.after(self.setup.costs.per_request, partial(self._encode, job))

    def _encode(self, job: Job) -> None:
        """Let a worker compute a job's encoder rows, if there are workers, and send them to an engine."""
        if not self.encoders or not job.request.items:
            self._enter(job)
            return
        number = job.request.items[0].key % len(self.encoders)

        def sent() -> None:
            job.has_rows = True
            self._enter(job)

        size = job.request.rows * self.setup.row_bytes
        seconds = self.setup.costs.encode_seconds(job.request.rows)
        self.encoders[number].serve(seconds, lambda: self.links[number].send(self.setup.network, size, sent))

    def _enter(self, job: Job) -> None:
        """Send a job to the engine that computes its prompt."""
        self._submit(job, self.prefills or self.engines)

    def _submit(self, job: Job, engines: Sequence[Engine]) -> None:
        ready = [engine for engine in engines if engine.is_up and engine.takes_jobs]
        if not ready:
            self.backlog.append(partial(self._submit, job, engines))
        elif not ready[0].fits(job):
            self._close()
        else:
            self._choose(job, ready).submit(job)

    def _choose(self, job: Job, ready: Sequence[Engine]) -> Engine:
        if self.setup.routing == "turns":
            self.turn += 1
            return ready[(self.turn - 1) % len(ready)]
        if self.setup.routing == "least" or not job.request.items:
            return min(ready, key=lambda engine: engine.load)
        limit = max(SLACK, ceil(FACTOR * (sum(engine.load for engine in ready) + 1) / len(ready)))
        key = job.request.items[0].key
        return min(ready, key=lambda engine: (max(0, engine.load - limit + 1), _rank(key, engine.name)))

    def _hand_over(self, job: Job) -> None:
        """Send the KV cache of a prompt to an engine that generates."""
        if job.is_done:
            self._finish(job)
            return
        size = job.request.prompt_tokens * self.setup.kv_bytes
        link = self.links[job.request.number % len(self.links)]
        link.send(self.setup.network, size, partial(self._submit, job, self.engines))

    def _finish(self, job: Job) -> None:
        job.finished = self.clock.now
        self._close()

    def _close(self) -> None:
        """Count a request that is complete or has failed."""
        self._change_open(-1)
        self.left -= 1

    def _fail(self, engine: Engine) -> None:
        """End an engine. Its requests are computed again elsewhere, and it comes back."""
        if not self.left or engine in self.retired:
            return
        self._count_engines()
        for job in engine.fail():
            if job.attempts == ATTEMPTS:
                self._close()
            else:
                job.restart()
                self.clock.after(0.0, partial(self._encode, job))
        self.clock.after(self.setup.restart_seconds, partial(self._restart, engine))

    def _restart(self, engine: Engine) -> None:
        self._count_engines()
        engine.is_up = True
        self.clock.after(self.random.expovariate(1 / (self.setup.mean_life or 1.0)), partial(self._fail, engine))
        self._wake()

    def _wake(self) -> None:
        """Retry everything that waits for an engine."""
        for _ in range(len(self.backlog)):
            self.backlog.popleft()()

    def _scale(self) -> None:
        """Start or remove engines."""
        scaling = self.setup.scaling
        assert scaling is not None
        if not self.left:
            return
        self.clock.after(scaling.period, self._scale)
        active = [engine for engine in self.engines if engine.takes_jobs]
        wanted = min(scaling.most, max(scaling.least, ceil(self.open / scaling.target)))
        self.wishes = self.wishes + 1 if wanted < len(active) + self.starting else 0
        for _ in range(wanted - len(active) - self.starting):
            self.starting += 1
            self.clock.after(scaling.start_seconds, self._started)
        if self.wishes >= scaling.patience and len(active) > scaling.least:
            min(active, key=lambda engine: engine.load).takes_jobs = False
            self.wishes = 0
        for engine in [engine for engine in self.engines if not engine.takes_jobs and not engine.load]:
            self._count_engines()
            self.engines.remove(engine)
            self.retired.append(engine)

    def _started(self) -> None:
        self.starting -= 1
        self._add()
        self._wake()


def _rank(key: int, name: str) -> bytes:
    return blake2b(f"{key} {name}".encode(), digest_size=8).digest()
