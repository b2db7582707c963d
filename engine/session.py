"""A conversation whose tokens stay in the cache between its turns. Knows no chat template."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from queue import SimpleQueue

from ..mm.errors import InputError
from .driver import Driver
from .input import InputProcessor, Prepared, Unfinished
from .output import Assembly
from .ticket import Job, Ticket
from .trace import Clock
from .types import RequestOutput


class LiveSession:
    """One sequence, held open: a prompt, its answer, more, the next answer. `with` closes it; so does
    forgetting it.

    Made by `LLM.live`. Every turn is answered with the same sampling parameters. A stop string ends a turn; of its tokens those
    that are made stay in the sequence. For one thread at a time.
    """

    def __init__(self, driver: Driver, inputs: InputProcessor, job: Job) -> None:
        if job.params.n > 1:
            raise InputError(f"a live session has one answer per turn, not n={job.params.n}")
        self._driver, self._inputs = driver, inputs
        self._mail: SimpleQueue[list[Ticket]] = SimpleQueue()
        (self._ticket,) = driver.tickets([replace(job, keep=True)], self._mail.put, partial=True)
        self._last: RequestOutput | None = None
        self._kept: tuple[int, ...] = ()  # tokens of the sequence, when a turn is over
        driver.submit([self._ticket])
        driver.drop_with(self, self._ticket)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens of the sequence after the last answer that was taken: what `truncate` counts."""
        return self._kept

    def stream(self) -> Iterator[RequestOutput]:
        """The answer of this turn as it grows; each output holds all of it so far."""
        while self._last is None:
            self._mail.get()
            output = self._ticket.take()
            if output is not None:
                if output.finished:
                    self._last = output
                    self._kept = (*output.prompt_token_ids, *output.outputs[0].token_ids)
                yield output

    def answer(self) -> RequestOutput:
        """The whole answer of this turn; waits for it."""
        for _ in self.stream():
            pass
        assert self._last is not None
        return self._last

    def append(self, part: object) -> None:
        """Go on with more text, tokens or media, in any form of a prompt; the next answer follows.

        Raises:
            InputError: a part that cannot be served or does not fit, or a session that has ended.
            MediaError: an item that is refused or cannot be decoded or processed.
        """
        self.answer()
        begun = self._inputs.begin(part, more=True)
        prepared = begun.finish() if isinstance(begun, Unfinished) else begun
        self._driver.call(lambda driver: _append(driver, self._inputs, self._ticket, self._kept, prepared)).result()
        self._last = None

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` of `token_ids`, cache included; InputError if that cuts an item."""
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
            raise InputError(f"truncate takes a number of tokens, not {str(num_tokens)[:40]!r}")
        self.answer()
        self._driver.call(lambda driver: _truncate(driver, self._ticket, num_tokens)).result()
        self._kept = self._kept[:num_tokens]

    def close(self) -> None:
        """Free all it holds; a running answer is aborted."""
        self._driver.drop(self._ticket)

    def __enter__(self) -> LiveSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _append(driver: Driver, inputs: InputProcessor, ticket: Ticket, known: tuple[int, ...], prepared: Prepared) -> None:
    """In the loop's thread. What computes the sequence is told by all items that it has then."""
    (name,) = _sequence(ticket)
    features = tuple(
        replace(feature, range=replace(feature.range, offset=feature.range.offset + len(known)))
        for feature in prepared.features
    )
    adapter = inputs.adapter((*driver.core.scheduler.requests[name].features, *features))
    driver.core.append(name, prepared.token_ids, features, adapter=adapter)
    turn = Assembly(ticket.assembly.request_id, ticket.job.params, driver.tokenizer)
    turn.start(replace(prepared, token_ids=(*known, *prepared.token_ids)))
    with ticket.lock:
        ticket.assembly, ticket.clock = turn, Clock()
    driver.follow(name, ticket)


def _truncate(driver: Driver, ticket: Ticket, num_tokens: int) -> None:
    (name,) = _sequence(ticket)
    driver.core.truncate(name, num_tokens)


def _sequence(ticket: Ticket) -> tuple[str, ...]:
    if not ticket.keep:
        raise InputError("the live session has ended; begin a new one")
    return tuple(ticket.assembly.answers)
