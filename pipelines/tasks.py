"""Run tasks that take several requests: all at once, on `LLM` and on `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..engine.errors import warn_of_failures
from ..engine.frontend.request_handle import RequestHandle
from ..engine.progress import ShowProgress
from ..engine.types import RequestOutput
from ..mm.errors import ErrorInfo
from ..mm.pacing import paced

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM
    from ..engine.llm import LLM


class Result(Protocol):
    """A task's result."""

    @property
    def error(self) -> ErrorInfo | None: ...


T = TypeVar("T", bound=Result)
V = TypeVar("V")
Task = Generator[RequestHandle, RequestOutput, T]
"""Yields a request, is sent its finished output, yields the next request, and returns the result of the task."""


def as_completed(llm: LLM, tasks: Sequence[Task[T]], use_tqdm: ShowProgress = True) -> Iterator[tuple[int, T]]:
    """Yield (index, result) of each task as it completes. The next request of a task precedes the first ones of others."""
    with closing(llm.serve([next(task) for task in paced(tasks)], use_tqdm)) as outputs:
        found = next(outputs, None)
        while found is not None:
            index, output = found
            step = _send(tasks[index], output)
            if isinstance(step, RequestHandle):
                step.priority -= 1
                found = outputs.send(step)
            else:
                yield index, step
                found = next(outputs, None)


def run_tasks(llm: LLM, tasks: Sequence[Task[T]], use_tqdm: ShowProgress = True) -> list[T]:
    """Return the results of all tasks, in their order."""
    results = [result for _, result in sorted(as_completed(llm, tasks, use_tqdm), key=lambda pair: pair[0])]
    warn_of_failures([result.error for result in results], "inputs")
    return results


async def run_tasks_async(engine: AsyncLLM, tasks: Sequence[Task[T]]) -> list[T]:
    """`run_tasks` for coroutines. Cancelling it aborts the requests that still run."""
    handles = [next(task) async for task in _in_turns(tasks)]  # wrong arguments raise here, before anything is computed
    running = []
    try:
        async for task, handle in _in_turns(list(zip(tasks, handles, strict=True))):
            running.append(asyncio.ensure_future(_run_task(engine, task, handle)))
        return list(await asyncio.gather(*running))
    finally:
        for future in running:
            future.cancel()


async def _in_turns(values: Sequence[V]) -> AsyncIterator[V]:
    """Yield the values. Other coroutines run after each 64, because 20,000 requests take seconds."""
    for index, value in enumerate(values, 1):
        yield value
        if index % 64 == 0:
            await asyncio.sleep(0)


async def _run_task(engine: AsyncLLM, task: Task[T], handle: RequestHandle) -> T:
    step: RequestHandle | T = handle
    while isinstance(step, RequestHandle):
        step = _send(task, await engine.answer(step))
    return step


def _send(task: Task[T], output: RequestOutput) -> RequestHandle | T:
    """Return the task's next request, or its result."""
    try:
        return task.send(output)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def error_of_task(output: RequestOutput, index: int) -> ErrorInfo | None:
    """Return the error of task `index`, whose request has one item, with the index of the task in place of the item's.

    The message does not name the item.
    """
    error = output.error
    return error if error is None or error.modality is None else replace(error, message=error.reason, index=index)
