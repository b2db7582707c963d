"""Tasks are coroutines; `Run` steps them, for `LLM` and for `AsyncLLM`."""

import asyncio
import gc
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
from sensorium.engine.frontend.request import RequestInput
from sensorium.engine.frontend.request_handle import RequestHandle
from sensorium.engine.sampling_params import SamplingParams
from sensorium.pipelines.llm import AsyncLLM
from sensorium.pipelines.run import Run, answer, as_completed, gather, run_all, run_all_async, run_async
from waiting import LONG


def request():
    return RequestHandle(RequestInput(lambda: None, SamplingParams()))


def result_of(value):
    return SimpleNamespace(error=None, value=value)


class Loop:
    """An engine that finishes requests in order of submission. `done`, `aborted`: the names of these."""

    def __init__(self):
        self.done, self.submitted, self.aborted, self.closed, self.loop = [], [], [], False, self

    def call(self, message):
        self.aborted.append(message.request_id)

    def serve(self, handles):
        waiting = []

        def add(index, new):
            for handle in new:
                handle.name = str(len(self.submitted))
                self.submitted.append(handle)
                waiting.append((index, handle.name))

        try:
            for index, handle in enumerate(handles):
                add(index, [handle])
            while waiting:
                index, name = waiting.pop(0)
                self.done.append(name)
                add(index, (yield index, SimpleNamespace(request_id=name)) or ())
        finally:
            self.closed = True


@pytest.fixture(autouse=True)
def _loops_of_tests(monkeypatch):
    monkeypatch.setattr("sensorium.pipelines.run.serve", lambda loop, handles: loop.serve(handles))


async def ask(value=None, requests=1, log=None):
    for _ in range(requests):
        output = await answer(request())
    if log is not None:
        log.append(output.request_id)
    return result_of(value)


def test_other_coroutines_run_while_many_tasks_begin():
    turns, begun = [], []

    async def count():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def answered(handle):
        begun.append(len(turns))

    async def numbered(number):
        await answer(request())
        return number

    async def run():
        counting = asyncio.ensure_future(count())
        results = await run_all_async(SimpleNamespace(answer=answered), [partial(numbered, number) for number in range(300)])
        counting.cancel()
        return results

    assert asyncio.run(run()) == list(range(300))
    assert begun[-1] >= 300 // 64


def test_results_come_as_tasks_complete_and_are_returned_in_order():
    lengths = [3, 1, 2, 1]
    tasks = [partial(ask, number, count) for number, count in enumerate(lengths)]
    assert [index for index, _ in as_completed(Loop(), tasks, False)] == [1, 3, 2, 0]
    assert [one.value for one in run_all(Loop(), tasks, False)] == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_at_most_so_many_tasks_run_at_a_time(limit):
    running, most = 0, []

    async def counted():
        nonlocal running
        running += 1
        most.append(running)
        await answer(request())
        await answer(request())
        running -= 1
        return result_of(None)

    run_all(Loop(), [counted] * 9, False, limit)
    assert max(most) == limit


def test_started_tasks_have_priority_over_those_that_have_not_started():
    loop = Loop()
    run_all(loop, [partial(ask, requests=3)] * 3, False, limit=1)
    assert [handle.input.priority for handle in loop.submitted] == [0, -1, -1] * 3


def test_a_task_without_requests_has_a_result():
    async def at_once(number):
        return result_of(number)

    tasks = [partial(at_once, 0), partial(ask, 1), partial(at_once, 2)]
    for limit in (1, 3):
        assert [one.value for one in run_all(Loop(), tasks, False, limit)] == [0, 1, 2]
    assert run_all(Loop(), [], False) == []


async def gather_all(numbers, limit, kept):
    async def numbered(number):
        for _ in range(1 + number % 3):
            await answer(request())
        return number

    found = await gather((partial(numbered, number) for number in numbers), limit, lambda one: kept.append(one) or 10 * one)
    return result_of(found)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_gathered_results_are_reported_and_returned_in_order(limit):
    """The next task begins when another has ended; what `on_result` returns is kept."""
    kept, loop = [], Loop()
    (found,) = run_all(loop, [partial(gather_all, range(7), limit, kept)], False)
    assert kept == list(range(7))
    assert found.value == [10 * number for number in range(7)]
    (empty,) = run_all(loop, [partial(gather_all, (), limit, kept)], False)
    assert empty.value == []


def test_gathered_tasks_may_gather():
    async def outer():
        return result_of(sum(one.value[-1] for one in await gather([partial(gather_all, range(4), 2, [])] * 3, 2)))

    (found,) = run_all(Loop(), [outer], False)
    assert found.value == 90


def test_a_task_that_gathers_does_not_hold_up_those_beside_it():
    """Four windows begin at once, though each begins with a gather of its own."""

    async def window():
        return result_of(len(await gather([partial(gather_all, range(2), 2, [])] * 2, 2)))

    async def outer():
        return result_of([one.value for one in await gather([window] * 6, 4)])

    run = Run(outer)
    requests = run.start()
    assert len(requests) == 4 * 2 * 2
    while not run.done:
        requests += run.resume(requests.pop(0), SimpleNamespace())
    assert run.result.value == [2] * 6


def test_a_failure_ends_gathers_that_would_begin_in_the_same_step():
    async def inner():
        raise ValueError("inner")

    async def window():
        await gather([inner], 2)

    async def outer():
        try:
            await gather([window] * 3, 3)
        except ValueError as error:
            return result_of(str(error))

    run = Run(outer)
    assert run.start() == []
    assert run.result.value == "inner"


def test_a_failed_task_ends_those_that_are_gathered_beside_it():
    """The one that gathers them gets the error, and the late outputs of their requests go to no other task."""
    ended, closed = [], []

    async def failing():
        await answer(request())
        raise ValueError("broken")

    async def beside():
        try:
            await answer(request())
            await answer(request())
            ended.append("answered")
        finally:
            closed.append(None)

    async def together():
        try:
            await gather([beside, failing, beside], 3)
        except ValueError as error:
            return result_of(str(error))

    async def after(number):
        handle = request()
        return result_of((await answer(handle)).request_id == handle.name)

    loop = Loop()
    found = run_all(loop, [together, partial(after, 0), partial(after, 1)], False, limit=1)
    assert [one.value for one in found] == ["broken", True, True]
    assert (ended, len(closed)) == ([], 2)
    assert loop.aborted == ["2", "3"]


@pytest.mark.parametrize("where", ["tasks", "on_result"])
def test_an_error_of_the_callers_iterator_or_function_is_raised_where_tasks_are_gathered(where):
    def tasks():
        yield ask
        if where == "tasks":
            raise OSError("no next file")

    def report(result):
        raise OSError("no report")

    async def together():
        try:
            return result_of(await gather(tasks(), 1, report if where == "on_result" else lambda one: one))
        except OSError as error:
            return result_of(str(error))

    (found,) = run_all(Loop(), [together], False)
    assert found.value == {"tasks": "no next file", "on_result": "no report"}[where]


def test_an_error_of_a_task_ends_the_others():
    closed = []

    async def failing():
        await answer(request())
        raise ValueError("broken")

    async def waiting():
        try:
            await gather([ask, ask], 2)
            await answer(request())
        finally:
            closed.append(None)

    loop = Loop()
    with pytest.raises(ValueError, match="broken"):
        run_all(loop, [waiting, failing], False)
    assert loop.closed
    assert closed == [None]


def test_nothing_is_left_of_a_task_that_ends_early():
    """A closed iterator ends its tasks, those that they gather included, without the garbage collector."""

    class Sound:
        pass

    refs = []

    async def hold():
        sound = Sound()
        refs.append(weakref.ref(sound))
        await answer(request())
        await answer(request())
        return result_of(sound is None)

    async def together():
        await gather([hold, hold], 2)
        return result_of(None)

    async def fails():
        sound = Sound()
        refs.append(weakref.ref(sound))
        await answer(request())
        raise ValueError(sound)

    async def caught():
        try:
            await gather([fails, hold], 2)
        except ValueError:
            return result_of(None)

    gc.disable()
    try:
        results = as_completed(Loop(), [ask, together], False)
        next(results)
        results.close()
        assert len(run_all(Loop(), [caught], False)) == 1
        assert len(refs) == 4
        assert not any(ref() for ref in refs)
    finally:
        gc.enable()


def test_cancelling_ends_a_task_and_its_requests():
    asked, aborted, closed = [], [], []

    async def answered(handle):
        asked.append(handle)
        try:
            await asyncio.sleep(LONG)
        finally:
            aborted.append(handle)

    async def together():
        try:
            await gather([ask, ask], 2)
        finally:
            closed.append(None)

    async def run():
        work = asyncio.ensure_future(run_async(SimpleNamespace(answer=answered), together))
        while len(asked) < 2:
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert len(aborted) == 2
    assert closed == [None]


def test_the_requests_of_ended_coroutines_are_aborted():
    """One of three gathered tasks fails; the requests of the others are cancelled, and the task goes on."""
    aborted = []

    async def answered(handle):
        try:
            await asyncio.sleep(0 if handle.input.params.seed == 0 else LONG)
        except asyncio.CancelledError:
            aborted.append(handle)
            raise

    async def failing():
        await answer(RequestHandle(RequestInput(lambda: None, SamplingParams(seed=0))))
        raise ValueError

    async def together():
        try:
            await gather([ask, failing, ask], 3)
        except ValueError:
            await answer(RequestHandle(RequestInput(lambda: None, SamplingParams(seed=0))))
            return len(aborted)

    assert asyncio.run(run_async(SimpleNamespace(answer=answered), together)) == 2


def test_a_step_that_runs_in_a_thread_ends_before_its_task_is_closed():
    class Threads:
        """Runs each function in a thread of its own, as an executor does."""

        def submit(self, function):
            from concurrent.futures import Future

            future = Future()

            def work():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)

            future.set_running_or_notify_cancel()
            self.thread = threading.Thread(target=work)
            self.thread.start()
            return future

    threads, begun, go_on, events = Threads(), threading.Event(), threading.Event(), []

    async def slow():
        try:
            begun.set()
            assert go_on.wait(LONG)
            events.append("read")
            await answer(request())
        finally:
            events.append("closed")

    async def run():
        work = asyncio.ensure_future(run_async(SimpleNamespace(), slow, threads))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert events == []
        go_on.set()

    asyncio.run(run())
    threads.thread.join(LONG)
    assert events == ["read", "closed"]


def test_a_task_has_no_coroutine_before_it_begins():
    """Otherwise Python warns of coroutines that were never awaited if a call ends before their turn."""
    made = []

    def task():
        made.append(None)
        return ask()

    results = as_completed(Loop(), [task] * 3, False, limit=1)
    next(results)
    results.close()
    assert len(made) == 2


def test_requests_of_a_run_without_an_answer():
    async def together():
        await gather([ask, ask], 2)
        return "done"

    run = Run(together)
    first, second = run.start()
    assert list(run.waiting) == [first, second]
    assert run.resume(second, None) == []
    assert (list(run.waiting), run.done) == ([first], False)
    assert run.resume(first, None) == []
    assert (run.done, run.result, list(run.waiting)) == (True, "done", [])


@pytest.mark.parametrize(("name", "tasks"), [("transcribe", "transcribe.transcribe_tasks"), ("speak", "llm.speech_tasks")])
def test_short_work_does_not_wait_for_the_steps_of_tasks(monkeypatch, name, tasks):
    """Steps such as decoding an upload fill their own threads, not those that an event loop has for short work."""
    gate, begun = threading.Event(), threading.Semaphore(0)

    async def reading():
        begun.release()
        assert gate.wait(LONG)
        return SimpleNamespace(error=None)

    async def run():
        engine = AsyncLLM.__new__(AsyncLLM)
        engine.engine = SimpleNamespace(config=SimpleNamespace(max_num_seqs=40))
        monkeypatch.setattr(f"sensorium.pipelines.{tasks}", lambda *_, **options: [reading] * 40)
        work = asyncio.ensure_future(getattr(engine, name)(b""))
        try:
            while not begun.acquire(blocking=False):
                assert not work.done(), work.exception()
                await asyncio.sleep(0.001)
            assert await asyncio.wait_for(asyncio.to_thread(len, "short"), LONG / 8) == 5
        finally:
            gate.set()
        assert len(await work) == 40

    asyncio.run(run())
