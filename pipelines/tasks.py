"""Runs tasks that make several requests each: all tasks at once, on `LLM` or `AsyncLLM`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..engine.errors import warn_of_failures
from ..engine.frontend.request_handle import RequestHandle
from ..engine.progress import ShowProgress, make_progress
from ..engine.types import RequestOutput
from ..mm.errors import ErrorInfo
from ..mm.pacing import releasing_gil

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM
    from ..engine.llm import LLM


class Result(Protocol):
    """A task's result."""

    @property
    def error(self) -> ErrorInfo | None: ...


T = TypeVar("T", bound=Result)
_MAX_TASKS = 1024  # run at a time; each holds many objects, which lengthen every garbage collection
P = TypeVar("P")
V = TypeVar("V")
Requests = RequestHandle | list[RequestHandle] | None
Task = Generator[RequestHandle, RequestOutput, P]
"""Yields a request, is sent its finished output, yields the next request, and returns the result of the task."""
WideTask = Generator[Requests, RequestOutput, P]
"""A task with several concurrent requests: yields new requests or None, and is sent the next finished output of any request."""


def as_completed(
    llm: LLM, tasks: Sequence[WideTask[T]], use_tqdm: ShowProgress = True, max_concurrent: int = _MAX_TASKS
) -> Iterator[tuple[int, T]]:
    """Yield (index, result) of each task as it completes. Started tasks have priority over tasks that have not started.

    `max_concurrent`: number of tasks that run at a time.
    """
    waiting = iter(enumerate(tasks))
    done: list[tuple[int, T]] = []  # results that are not yielded yet
    ended: set[int] = set()  # tasks with a result; outputs of their other requests are dropped
    requests: list[dict[int, tuple[RequestHandle, int]]] = []  # of each slot: requests in progress, and the task of each

    def submit(slot: int, index: int, step: object) -> list[RequestHandle]:
        handles = as_list(step)
        requests[slot].update((id(handle), (handle, index)) for handle in handles)
        return handles

    def start(slot: int) -> list[RequestHandle]:
        """Start tasks until one has requests, and return these."""
        for index, task in waiting:
            step = advance(task)
            if is_request(step):
                return submit(slot, index, step)
            done.append((index, step))  # type: ignore[arg-type]
        return []

    slots: list[tuple[int, RequestHandle]] = []
    for slot in releasing_gil(range(min(max_concurrent, len(tasks)))):
        requests.append({})
        slots += [(slot, handle) for handle in start(slot)]
    with make_progress(len(tasks), use_tqdm) as progress, closing(llm.serve([one for _, one in slots], False)) as outputs:
        found = next(outputs, None) if slots else None
        while True:
            new_requests: list[RequestHandle] = []
            if found is not None:
                slot = slots[found[0]][0]
                handle, index = next(one for one in requests[slot].values() if one[0].name == found[1].request_id)
                del requests[slot][id(handle)]
                step = None if index in ended else advance(tasks[index], found[1])
                if is_request(step):
                    new_requests = submit(slot, index, step)
                    for handle in new_requests:
                        handle.priority -= 1
                else:
                    ended.add(index)
                    done.append((index, step))  # type: ignore[arg-type]
                    new_requests = start(slot)
            for result in done:  # before waiting for the next output
                progress.update(1)
                yield result
            done.clear()
            if found is None:
                return
            found = outputs.send(new_requests) if new_requests else next(outputs, None)


def run_tasks(
    llm: LLM, tasks: Sequence[WideTask[T]], use_tqdm: ShowProgress = True, max_concurrent: int = _MAX_TASKS
) -> list[T]:
    """Return the results of all tasks, in their order."""
    results = [result for _, result in sorted(as_completed(llm, tasks, use_tqdm, max_concurrent), key=lambda pair: pair[0])]
    warn_of_failures([result.error for result in results], "inputs")
    return results


async def run_tasks_async(
    engine: AsyncLLM,
    tasks: Sequence[WideTask[T]],
    max_concurrent: int = _MAX_TASKS,
    threads: Executor | None = None,
    priority: int = 0,
) -> list[T]:
    """`run_tasks` for coroutines. Cancelling it aborts the requests that still run.

    Args:
        max_concurrent: see `as_completed`.
        threads: for the tasks' own work, such as reading files; None: it runs in the event loop.
        priority: of the requests; smaller values are served first.
    """
    limit = asyncio.Semaphore(max_concurrent)
    running: list[asyncio.Future[T]] = []
    try:
        async for task in _in_turns(tasks):
            running.append(asyncio.ensure_future(_run_task(engine, task, limit, threads, priority)))
        return list(await asyncio.gather(*running))
    finally:
        for future in running:
            future.cancel()


async def _in_turns(values: Sequence[V]) -> AsyncIterator[V]:
    """Yield the values, and let other coroutines run after every 64 of them: 20,000 requests take seconds."""
    for index, value in enumerate(values, 1):
        yield value
        if index % 64 == 0:
            await asyncio.sleep(0)


async def in_thread(threads: Executor, function: Callable[..., P], *args: object) -> P:
    """`asyncio.to_thread` for long work, in threads of its own: the event loop's serve short work, which would wait."""
    return await asyncio.get_running_loop().run_in_executor(threads, partial(copy_context().run, function, *args))


async def _run_task(
    engine: AsyncLLM, task: WideTask[T], limit: asyncio.Semaphore, threads: Executor | None, priority: int
) -> T:
    async with limit:
        return await _run_steps(engine, task, threads, priority)


async def _run_steps(engine: AsyncLLM, task: WideTask[T], threads: Executor | None, priority: int) -> T:
    async def step_on(output: RequestOutput | None = None) -> Requests | T:
        return advance(task, output) if threads is None else await in_thread(threads, advance, task, output)

    step = await step_on()
    pending: set[asyncio.Future[RequestOutput]] = set()
    try:
        while is_request(step):
            for handle in (handles := as_list(step)):
                handle.priority += priority
            pending |= {asyncio.ensure_future(engine.answer(handle)) for handle in handles}
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            finished = done.pop()
            pending |= done  # the other finished ones are taken in the next rounds
            step = await step_on(finished.result())
    finally:
        for future in pending:
            future.cancel()
    return step  # type: ignore[return-value]


def join(
    tasks: Iterator[WideTask[P]], max_concurrent: int, on_result: Callable[[P], P] = lambda result: result
) -> WideTask[list[P]]:
    """Run tasks inside one task. Return their results in order; no result may be a list or None.

    `on_result`: called with each result, in order, when those before it are known. It returns what is kept of the result.
    """
    numbered, results = enumerate(tasks), dict[int, P]()
    reported = 0
    running: list[tuple[RequestHandle, int, WideTask[P]]] = []

    def submit(index: int, task: WideTask[P], step: object) -> list[RequestHandle]:
        handles = as_list(step)
        running.extend((handle, index, task) for handle in handles)
        return handles

    def start() -> list[RequestHandle]:
        for index, task in numbered:
            step = advance(task)
            if is_request(step):
                return submit(index, task, step)
            results[index] = step  # type: ignore[assignment]
        return []

    step = [handle for _ in range(max_concurrent) for handle in start()]
    while True:
        while reported in results:
            results[reported] = on_result(results[reported])
            reported += 1
        if not running:
            return [results[index] for index in range(reported)]
        output = yield step
        entry = next(entry for entry in running if entry[0].name == output.request_id)
        running.remove(entry)
        next_step = advance(entry[2], output)
        if is_request(next_step):
            step = submit(*entry[1:], next_step)
        else:
            results[entry[1]] = next_step  # type: ignore[assignment]
            step = start()


def is_request(step: object) -> bool:
    """Return whether a task's step holds new requests, or None to wait for running ones, and not the result."""
    return step is None or isinstance(step, RequestHandle | list)


def as_list(step: object) -> list[RequestHandle]:
    return [step] if isinstance(step, RequestHandle) else list(step or ())  # type: ignore[call-overload]


def advance(task: Generator[Requests, RequestOutput, P] | Task[P], output: RequestOutput | None = None) -> Requests | P:
    """Send an output to a task (None starts it). Return its next requests, or its result."""
    try:
        return next(task) if output is None else task.send(output)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def error_of_task(output: RequestOutput, index: int) -> ErrorInfo | None:
    """Return the error of task `index`, whose request has one item, with the index of the task in place of the item's.

    The message does not name the item.
    """
    error = output.error
    return error if error is None or error.modality is None else replace(error, message=error.reason, index=index)
