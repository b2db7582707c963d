"""One request on its way through the engine, shared by the loop's thread and the caller's. Knows neither."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from .feeder import Entry
from .input import Prepared, Unfinished
from .output import Assembly
from .runner import describe
from .sampling_params import SamplingParams
from .trace import Clock
from .types import RequestOutput


@dataclass(frozen=True)
class Job:
    """One prompt: how to prepare it, and what to ask of the answer.

    `keep`: the sequence stays after its answer, see EngineRequest.hold_open. `request_id`: None for one of ours.
    """

    prepare: Callable[[], Prepared | Unfinished]
    params: SamplingParams
    priority: int = 0
    request_id: str | None = None
    keep: bool = False


class Ticket:
    """One request, from asking to its last output. `post` is called in the loop's thread with those there is news of."""

    def __init__(self, number: int, job: Job, assembly: Assembly, post: Callable[[list[Ticket]], None], partial: bool) -> None:
        self.number, self.job, self.assembly, self.post, self.partial = number, job, assembly, post, partial
        self.entry: Entry | None = None
        self.lock = threading.Lock()  # of the assembly: the loop adds, the caller takes
        self.ring: Callable[[], None] = _silent  # for whoever passes `post` on
        self.keep = job.keep  # whether the sequence stays after an answer
        self.posted = False  # the caller was told of news and has not looked yet
        self.clock = Clock()

    def take(self, delta: bool = False) -> RequestOutput | None:
        """What there is to tell, with `delta` only what is new since the last time; None if there is no news."""
        with self.lock:
            self.posted = False
            if not self.assembly.changed:
                return None
            self.assembly.changed = False
            try:
                return self.assembly.output(delta)
            except Exception as error:  # text that cannot be decoded ends its own request
                self.assembly.end("error", describe(error))
                self.assembly.freeze()
                return self.assembly.output(delta)


def _silent() -> None:
    """Nobody listens."""
