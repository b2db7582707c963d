"""How questions are put to an engine: in rounds to `LLM`, each in a task of its own to `AsyncLLM`. Knows no question."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..engine.ticket import Job
from ..engine.types import RequestOutput

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM
    from ..engine.llm import LLM

T = TypeVar("T")
Asking = Generator[Job, RequestOutput, T]
"""One question: gives a job, is sent the whole answer to it, gives the next, and returns what they come to."""


def finished(llm: LLM, askings: Sequence[Asking[T]], use_tqdm: bool = True) -> Iterator[tuple[int, T]]:
    """(index, result) of each as it is finished. The next jobs of all are one batch once all have an answer to the last."""
    jobs = {place: next(asking) for place, asking in enumerate(askings)}
    while jobs:
        places, following = list(jobs), {}
        for number, output in llm.serve(list(jobs.values()), use_tqdm):
            place = places[number]
            told = _tell(askings[place], output)
            if isinstance(told, Job):
                following[place] = told
            else:
                yield place, told
        jobs = dict(sorted(following.items()))


def results(llm: LLM, askings: Sequence[Asking[T]], use_tqdm: bool = True) -> list[T]:
    """What all come to, in the order given."""
    return [result for _, result in sorted(finished(llm, askings, use_tqdm), key=lambda one: one[0])]


async def gathered(engine: AsyncLLM, askings: Sequence[Asking[T]]) -> list[T]:
    """`results` for coroutines; cancelling ends what is left of every one."""
    jobs = [next(asking) for asking in askings]  # whoever asks wrongly hears of it before anything is computed
    tasks = [asyncio.ensure_future(_follow(engine, *one)) for one in zip(askings, jobs, strict=True)]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _follow(engine: AsyncLLM, asking: Asking[T], job: Job) -> T:
    told: Job | T = job
    while isinstance(told, Job):
        told = _tell(asking, await engine.answer(told))
    return told


def _tell(asking: Asking[T], output: RequestOutput) -> Job | T:
    """The next job, or the result."""
    try:
        return asking.send(output)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
