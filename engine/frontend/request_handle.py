"""One request on its way through the engine, shared by the loop's thread and the caller's. Knows neither."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..processors.text import Tokenizer
from .failures import explain
from .feeder import Entry
from .input import Prepared, Unfinished
from .output import Assembly
from .pooling import Pooling
from .sampler import mix
from .sampling_params import SamplingParams
from .trace import Clock
from .types import EngineRequest, RequestOutput


@dataclass(frozen=True)
class Job:
    """One prompt: how to prepare it, and what to ask of the answer.

    `keep`: the sequence stays after its answer, see EngineRequest.hold_open. `request_id`: None for one of ours. `pooling`:
    what is wanted instead of an answer.
    """

    prepare: Callable[[], Prepared | Unfinished]
    params: SamplingParams
    priority: int = 0
    request_id: str | None = None
    keep: bool = False
    pooling: Pooling | None = None


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

    def sequences(
        self, prepared: Prepared, tokenizer: Tokenizer, eos_token_ids: tuple[int, ...], seed: int
    ) -> Iterator[EngineRequest]:
        """What the engine computes for it, one for each answer; `seed` is the engine's, for those without one of their own."""
        params = self.job.params
        base = params.seed if params.seed is not None else mix(mix(seed) + self.number)
        words = tuple(dict.fromkeys(ids for word in params.bad_words or () for ids in bad_word_ids(word, tokenizer)))
        for i, name in enumerate(self.assembly.answers):
            own = replace(params, n=1, prompt_logprobs=params.prompt_logprobs if i == 0 else None) if params.n > 1 else params
            yield EngineRequest(
                name,
                prepared.token_ids,
                own,
                eos_token_ids,
                prepared.features,
                priority=self.job.priority,
                seed=mix(mix(base) ^ i),
                bad_word_ids=words,
                hold_open=self.job.keep,
                salt=prepared.salt,
                adapter=prepared.adapter,
                cross=prepared.cross,
                pooling=self.job.pooling,
            )

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
                self.assembly.end("error", explain(error, "writing an answer"))
                self.assembly.freeze()
                return self.assembly.output(delta)


def _silent() -> None:
    """Nobody listens."""


def bad_word_ids(word: str, tokenizer: Tokenizer) -> Iterator[tuple[int, ...]]:
    """The token sequences a word has at the start of a text and after a space."""
    for spelled in (word.lstrip(), " " + word.lstrip()):
        ids = tuple(tokenizer.encode(spelled, add_special_tokens=False))
        if ids:
            yield ids
