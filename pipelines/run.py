"""Runs tasks, all at once, on `LLM` or `AsyncLLM`.

A task is a coroutine that makes requests: `async def task(engine, item, options)`. It awaits `answer`, `append`, `gather` and
other such coroutines, and nothing else, so that it does not depend on who waits for its requests: a thread or an event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..callers.errors import ErrorInfo
from ..callers.pacing import releasing_gil
from ..engine.errors import warn_of_failures
from ..engine.frontend.request_handle import Abort, RequestHandle
from ..engine.frontend.serve import serve
from ..engine.outputs import RequestOutput
from ..engine.progress import ShowProgress, make_progress
from ..engine.session import Turn

if TYPE_CHECKING:
    from ..engine.async_llm import AsyncLLM
    from ..engine.engine import Engine


class Result(Protocol):
    """A task's result."""

    @property
    def error(self) -> ErrorInfo | None: ...


P = TypeVar("P")
T = TypeVar("T", bound=Result)
_MAX_TASKS = 1024  # run at a time; each holds many objects, which lengthen every garbage collection
Task = Callable[[], Awaitable[P]]
"""A call that begins a task. The coroutine is made when the task has its turn."""
Request = RequestHandle | Turn


@coroutine
def answer(handle: RequestHandle) -> Generator[RequestHandle, RequestOutput, RequestOutput]:
    """Return the finished output of a request."""
    return (yield handle)


@coroutine
def append(turn: Turn) -> Generator[Turn, RequestOutput, RequestOutput]:
    """Return the finished output of the next turn of a sequence that is held open. Only `AsyncLLM` runs it."""
    return (yield turn)


@coroutine
def gather(
    tasks: Iterable[Task[P]], limit: int, on_result: Callable[[P], P] = lambda result: result
) -> Generator[Group, list[P], list[P]]:
    """Run tasks inside a task, at most `limit` at a time. Return their results in order.

    If one fails, the others end, and the error is raised here.

    Args:
        tasks: the next one is taken when it may begin.
        on_result: called with each result, in order, when those before it are known. It returns what is kept of the result.
    """
    return (yield Group(iter(tasks), limit, on_result))


@dataclass(eq=False)
class _Branch:
    """A coroutine of a task: the task's own, or one that it gathers.

    Args:
        number: its place in `group`.
        gathers: the tasks that it waits for.
    """

    coroutine: Any
    group: Group | None = None
    number: int = 0
    gathers: Group | None = None

    def close(self) -> None:
        """End the coroutine and those that it gathers."""
        if self.gathers is not None:
            self.gathers.close()
            self.gathers = None
        self.coroutine.close()


@dataclass(eq=False)
class Group:
    """The tasks of a `gather`. `unreported`: results that wait for those before them."""

    tasks: Iterator[Task[Any]]
    limit: int
    on_result: Callable[[Any], Any]
    owner: _Branch | None = None
    running: set[_Branch] = field(default_factory=set)
    begun: int = 0
    unreported: dict[int, Any] = field(default_factory=dict)
    results: list[Any] = field(default_factory=list)

    def begin_next(self) -> _Branch | None:
        """Report results, and begin the next task; None if no place is free, or no task is left."""
        while len(self.results) in self.unreported:
            self.results.append(self.on_result(self.unreported.pop(len(self.results))))
        if len(self.running) >= self.limit or (task := next(self.tasks, None)) is None:
            return None
        branch = _Branch(task(), self, self.begun)
        self.begun += 1
        self.running.add(branch)
        return branch

    def close(self) -> None:
        for branch in self.running:
            branch.close()
        self.running.clear()


_Ready = tuple[_Branch, Any, BaseException | None]
"""A coroutine, and the value or error with which it goes on."""


class Run(Generic[P]):
    """Steps one task. The caller waits for the answers to its requests.

    Attributes:
        waiting: the requests without an answer.
        done: the task has ended with `result`.
    """

    result: P

    def __init__(self, task: Task[P]) -> None:
        self._root = _Branch(task())
        self._branches: dict[Request, _Branch] = {}
        self.done = False

    @property
    def waiting(self) -> Iterable[Request]:
        return self._branches.keys()

    def start(self) -> list[Request]:
        """Run the task up to its first requests, and return them."""
        return self._go_on(self._root, None)

    def resume(self, request: Request, output: RequestOutput) -> list[Request]:
        """Go on with an answer. Return the new requests."""
        return self._go_on(self._branches.pop(request), output)

    def close(self) -> None:
        """End the task wherever it waits."""
        self._branches.clear()
        self._root.close()

    def _go_on(self, branch: _Branch, value: Any) -> list[Request]:
        """Run a coroutine, and those that begin or go on after it, until all wait."""
        requests = list[Request]()
        ready: list[_Ready] = [(branch, value, None)]
        while ready:
            branch, value, error = ready.pop()
            try:
                step = branch.coroutine.send(value) if error is None else branch.coroutine.throw(error)
            except StopIteration as end:
                if branch.group is None:
                    self.done, self.result = True, end.value
                    break
                branch.group.running.discard(branch)
                branch.group.unreported[branch.number] = end.value
            except BaseException as failure:
                if branch.group is None:
                    raise
                ready = self._fail(branch.group, failure, ready)
                continue
            else:
                if isinstance(step, Group):
                    step.owner, branch.gathers = branch, step
                    ready = self._begin(step, ready)
                else:
                    self._branches[step] = branch
                    requests.append(step)
            finally:
                error = None  # its traceback refers to this frame
            if branch.group is not None:  # the next task of the same group may begin
                ready = self._begin(branch.group, ready)
        return [request for request in requests if request in self._branches]

    def _begin(self, group: Group, ready: list[_Ready]) -> list[_Ready]:
        """Begin the next task of a group, or let its owner go on if all have ended. Return what is ready then."""
        if group.owner is None:  # the group has ended
            return ready
        try:
            branch = group.begin_next()
        except BaseException as error:  # of the caller's iterator or function
            return self._fail(group, error, ready)
        if branch is not None:
            return [*ready, (branch, None, None)]
        return ready if group.running else [*ready, (_release(group), group.results, None)]

    def _fail(self, group: Group, error: BaseException, ready: list[_Ready]) -> list[_Ready]:
        """End the coroutines of a group; their requests have no receiver any more. Return what is ready then."""
        group.close()
        self._branches = {request: branch for request, branch in self._branches.items() if not _is_within(branch, group)}
        return [*(entry for entry in ready if not _is_within(entry[0], group)), (_release(group), None, error)]


def _release(group: Group) -> _Branch:
    """Return the owner of a group that has ended. The two no longer refer to each other."""
    owner, group.owner = group.owner, None
    assert owner is not None
    owner.gathers = None
    return owner


def _is_within(branch: _Branch | None, group: Group) -> bool:
    while branch is not None and branch.group is not None:
        if branch.group is group:
            return True
        branch = branch.group.owner
    return False


def as_completed(
    engine: Engine, tasks: Sequence[Task[T]], use_tqdm: ShowProgress = True, limit: int = _MAX_TASKS
) -> Iterator[tuple[int, T]]:
    """Yield (index, result) of each task as it completes. Started tasks have priority over tasks that have not started.

    `limit`: number of tasks that run at a time.
    """
    waiting, runs = iter(enumerate(tasks)), dict[int, tuple[int, Run[T]]]()  # slot -> its task's index, and the task
    done = deque[tuple[int, T]]()  # results that are not yielded yet

    def start(slot: int) -> list[RequestHandle]:
        """Start tasks until one has requests, and return these."""
        for index, task in waiting:
            runs[slot] = index, (run := Run(task))
            if requests := run.start():
                return _handles(requests)
            done.append((index, run.result))
        return []

    slots, first = list[int](), list[RequestHandle]()
    try:
        for slot in releasing_gil(range(min(limit, len(tasks)))):
            requests = start(slot)
            first += requests
            slots += [slot] * len(requests)
        with make_progress(len(tasks), use_tqdm) as progress, closing(serve(engine.loop, first)) as outputs:
            entry = next(outputs, None) if first else None
            while True:
                requests = []
                if entry is not None:
                    slot = slots[entry[0]]
                    index, run = runs[slot]
                    if not run.done:  # else it is the output of a coroutine that was ended
                        requests = _resume(engine, run, entry[1])
                        if run.done:
                            done.append((index, run.result))
                            requests = start(slot)
                while done:  # before waiting for the next output
                    progress.update(1)
                    yield done.popleft()
                if entry is None:
                    return
                entry = outputs.send(requests) if requests else next(outputs, None)
    finally:
        for _, run in runs.values():
            run.close()


def _resume(engine: Engine, run: Run[Any], output: RequestOutput) -> list[RequestHandle]:
    """Give a task the output of one of its requests. Return its next requests, which have priority over those of new tasks.

    The requests of coroutines that have ended meanwhile are aborted.
    """
    before = _handles(run.waiting)
    handle = next((handle for handle in before if handle.name == output.request_id), None)
    if handle is None:  # of a coroutine that has ended
        return []
    requests = _handles(run.resume(handle, output))
    waiting = set(_handles(run.waiting))
    for other in before:
        if other is not handle and other not in waiting:
            engine.loop.call(Abort(other.name))
    for request in requests:
        _add_priority(request, -1)
    return requests


def _add_priority(handle: RequestHandle, priority: int) -> None:
    """Change a request's priority, before it is submitted."""
    handle.input = replace(handle.input, priority=handle.input.priority + priority)


def _handles(requests: Iterable[Request]) -> list[RequestHandle]:
    return [request for request in requests if isinstance(request, RequestHandle)]


def run_all(engine: Engine, tasks: Sequence[Task[T]], use_tqdm: ShowProgress = True, limit: int = _MAX_TASKS) -> list[T]:
    """Return the results of all tasks, in their order."""
    results = [result for _, result in sorted(as_completed(engine, tasks, use_tqdm, limit), key=lambda pair: pair[0])]
    warn_of_failures([result.error for result in results], "inputs")
    return results


async def run_all_async(
    llm: AsyncLLM, tasks: Sequence[Task[P]], limit: int = _MAX_TASKS, threads: Executor | None = None, priority: int = 0
) -> list[P]:
    """`run_all` for coroutines. Cancelling it aborts the requests that still run.

    Args:
        limit: see `as_completed`.
        threads: for the tasks' own work, such as reading files; None: it runs in the event loop.
        priority: of the requests; smaller values are served first.
    """
    slots, running = asyncio.Semaphore(limit), list[asyncio.Future[P]]()

    async def run_in_slot(task: Task[P]) -> P:
        async with slots:
            return await run_async(llm, task, threads, priority)

    try:
        async for task in _in_turns(tasks):
            running.append(asyncio.ensure_future(run_in_slot(task)))
        return list(await asyncio.gather(*running))
    finally:
        for future in running:
            future.cancel()


async def run_async(llm: AsyncLLM, task: Task[P], threads: Executor | None = None, priority: int = 0) -> P:
    """Return the result of one task; see `run_all_async`."""
    run, answers = Run(task), dict[asyncio.Future[RequestOutput], Request]()
    step = Future[list[Request]]()  # the last one
    step.set_result([])

    async def step_on(function: Callable[..., list[Request]], *arguments: Any) -> list[Request]:
        nonlocal step
        if threads is None:
            return function(*arguments)
        step = submit(threads, function, *arguments)
        return await asyncio.wrap_future(step)

    try:
        requests = await step_on(run.start)
        while not run.done:
            for handle in _handles(requests):
                _add_priority(handle, priority)
            for request in requests:
                answering = llm.answer(request) if isinstance(request, RequestHandle) else llm.append(request)
                answers[asyncio.ensure_future(answering)] = request
            for future in [future for future, request in answers.items() if request not in run.waiting]:
                del answers[future]
                future.cancel()
            done, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
            finished = done.pop()  # the others are taken in the next rounds
            requests = await step_on(run.resume, answers.pop(finished), finished.result())
        return run.result
    finally:
        for future in answers:
            future.cancel()
        step.add_done_callback(lambda _: run.close())  # at once, or when the step that runs now has ended


async def _in_turns(values: Sequence[P]) -> AsyncIterator[P]:
    """Yield the values, and let other coroutines run after every 64 of them: 20,000 requests take seconds."""
    for index, value in enumerate(values, 1):
        yield value
        if index % 64 == 0:
            await asyncio.sleep(0)


async def in_thread(threads: Executor, function: Callable[..., P], *arguments: object) -> P:
    """`asyncio.to_thread` for long work, in threads of its own: the event loop's serve short work, which would wait."""
    return await asyncio.wrap_future(submit(threads, function, *arguments))


def submit(threads: Executor, function: Callable[..., P], *arguments: object) -> Future[P]:
    """Call a function in a thread, with the context variables of the caller."""
    return threads.submit(partial(copy_context().run, function, *arguments))


def error_of_task(output: RequestOutput, index: int) -> ErrorInfo | None:
    """Return the error of task `index`, whose request has one item, with the index of the task in place of the item's.

    The message does not name the item.
    """
    error = output.error
    return error if error is None or error.modality is None else replace(error.without_item(), index=index)
