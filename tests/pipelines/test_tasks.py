import asyncio
import threading
from types import SimpleNamespace

import pytest
from sensorium.engine.frontend.request_handle import RequestHandle
from sensorium.engine.sampling_params import SamplingParams
from sensorium.pipelines import llm
from sensorium.pipelines.llm import AsyncLLM
from sensorium.pipelines.tasks import run_tasks, run_tasks_async
from waiting import LONG


def make_task(number):
    yield RequestHandle(lambda: None, SamplingParams())
    return number


def test_other_coroutines_run_while_many_tasks_begin():
    turns, begun = [], []

    async def count():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    async def answer(handle):
        begun.append(len(turns))

    async def run():
        counting = asyncio.ensure_future(count())
        results = await run_tasks_async(SimpleNamespace(answer=answer), [make_task(number) for number in range(300)])
        counting.cancel()
        return results

    assert asyncio.run(run()) == list(range(300))
    assert begun[-1] >= 300 // 64


class Loop:
    """Finishes requests in order of submission, as `LLM.serve` does."""

    def serve(self, handles, use_tqdm):
        waiting = []

        def add(index, new):
            for handle in new:
                handle.name = str(len(names))
                names.append(handle)
                waiting.append((index, handle.name))

        names = []
        for index, handle in enumerate(handles):
            add(index, [handle])
        while waiting:
            index, name = waiting.pop(0)
            add(index, (yield index, SimpleNamespace(request_id=name)) or ())


def test_late_outputs_of_a_failed_task_go_to_no_other_task():
    def handle():
        return RequestHandle(lambda: None, SamplingParams())

    def failing():
        yield [handle(), handle(), handle()]
        return SimpleNamespace(error=None, got=["failed"])

    def waiting():
        mine, got = handle(), []
        got.append((yield mine).request_id == mine.name)
        return SimpleNamespace(error=None, got=got)

    found = run_tasks(Loop(), [failing(), waiting(), waiting()], use_tqdm=False, max_concurrent=1)
    assert [one.got for one in found] == [["failed"], [True], [True]]


@pytest.mark.parametrize("name", ["transcribe", "speak"])
def test_short_work_does_not_wait_for_the_steps_of_tasks(monkeypatch, name):
    """Steps such as decoding an upload fill their own threads, not those that an event loop has for short work."""
    gate, begun = threading.Event(), threading.Semaphore(0)

    def reading():
        begun.release()
        assert gate.wait(LONG)
        return SimpleNamespace(error=None)
        yield

    async def run():
        engine = AsyncLLM.__new__(AsyncLLM)
        engine.llm = SimpleNamespace(config=SimpleNamespace(max_num_seqs=40))
        monkeypatch.setattr(llm, f"{name}_tasks", lambda *_, **options: [reading() for _ in range(40)])
        work = asyncio.ensure_future(getattr(engine, name)(b""))
        try:
            while not begun.acquire(blocking=False):
                await asyncio.sleep(0.001)
            assert await asyncio.wait_for(asyncio.to_thread(len, "short"), LONG / 8) == 5
        finally:
            gate.set()
        assert len(await work) == 40

    asyncio.run(run())
