import asyncio
from types import SimpleNamespace

from sensorium.engine.frontend.request_handle import RequestHandle
from sensorium.engine.sampling_params import SamplingParams
from sensorium.pipelines.tasks import run_tasks_async


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
