"""Measured costs of an engine, and the simulation beside real engines in processes of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .costs import Costs
from .engine import Limits
from .load import Kind, Load, Request, make_requests
from .simulate import Setup, simulate

_OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024, "enable_prefix_caching": False}
_LIMITS = Limits(8, 512, kv_tokens=8 * 1024, encoder_rows=0)
_SIZES, _BATCHES, _SIDES = (16, 64, 256, 512), (1, 2, 4, 8), (112, 224, 448)
_REPEATS, _TOKENS, _LOAD = 5, 33, 0.6
_MIX = (Kind(3, 200, 40), Kind(1, 60, 30))
_TOLERANCE = 0.10
_HEAD = """\
| engines | requests/s | first token s: simulated / real | latency s: simulated / real | difference |
|---|---|---|---|---|"""


class Worker:
    """An engine, asked with token ids so that prompts have the lengths of the simulation."""

    def __init__(self, model: str) -> None:
        from sensorium import AsyncLLM

        self.llm = AsyncLLM(model, engine_process=False, **_OPTIONS)
        self._random = random.Random(0)

    async def answer(self, prompt: Any, tokens: int) -> tuple[float, float, int]:
        """Return the times of the first and the last token, and the prompt's length. `prompt`: that length, or a prompt."""
        from sensorium import SamplingParams

        if isinstance(prompt, int):
            prompt = {"prompt_token_ids": [self._random.randrange(20, 120) for _ in range(prompt)]}
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        first, output = 0.0, None
        async for output in self.llm.generate(prompt, params, output_kind="delta"):
            first = first or time.time()
            if output.error is not None:
                raise RuntimeError(str(output.error))
        assert output is not None
        return first, time.time(), len(output.prompt_token_ids or ())

    async def seconds(self, prompts: Sequence[Any], tokens: int) -> float:
        """Return the median seconds of requests that begin at once, until the last one has its last token."""
        times = []
        for _ in range(_REPEATS):
            start = time.time()
            await asyncio.gather(*(self.answer(prompt, tokens) for prompt in prompts))
            times.append(time.time() - start)
        return statistics.median(times)

    async def measure(self) -> Costs:
        """Return the costs of the engine.

        A step's rows are measured by prompts of one output token, a sequence's share by batches that generate, and an image by
        what a prompt with it takes more than one of the same length without it.
        """
        await self.seconds([64, 64], 4)  # warm
        alone = [(float(size), await self.seconds([size], 1)) for size in _SIZES]
        generated = {batch: await self._token_seconds(batch, 16) for batch in _BATCHES}
        long = await self._token_seconds(1, 768)
        fixed = max(0.0, alone[0][1] - generated[1])  # of a request, beside its step
        step = [(1.0, generated[1]), *((size, seconds - fixed) for size, seconds in alone)]
        step = [(size, max(seconds, generated[1])) for size, seconds in step]
        costs = Costs(sorted(step), per_context_token=max(0.0, long - generated[1]) / (768 - 16), per_request=fixed)
        extra = [generated[batch] - costs.step_seconds(batch, 0, batch * 32) for batch in _BATCHES[1:]]
        sequence = statistics.median(max(0.0, more) / (batch - 1) for more, batch in zip(extra, _BATCHES[1:], strict=True))
        return replace(costs, per_sequence=sequence, encode=await self._encode(costs))

    async def _token_seconds(self, batch: int, prompt: int) -> float:
        """Return the seconds of a step of a batch that generates."""
        many, one = await self.seconds([prompt] * batch, _TOKENS), await self.seconds([prompt] * batch, 1)
        return max(1e-6, (many - one) / (_TOKENS - 1))

    async def _encode(self, costs: Costs) -> Sequence[tuple[float, float]]:
        from PIL import Image

        if "image" not in self.llm.engine.info.modalities:
            return Costs(costs.step).encode
        points = [(0.0, 0.0)]
        for side in _SIDES:
            times, length = [], 0
            for _ in range(_REPEATS):
                image = Image.frombytes("RGB", (side, side), self._random.randbytes(3 * side * side))
                start = time.time()
                content = [{"type": "image", "image": image}, {"type": "text", "text": "a"}]
                _, end, length = await self.answer([{"role": "user", "content": content}], 1)
                times.append(end - start)
            seconds = statistics.median(times) - costs.per_request - costs.step_seconds(length, 1, 0)
            points.append((float(length), max(points[-1][1], seconds)))
        return points

    async def run(self, start: float, requests: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        """Return the seconds from `start` to the first and the last token of requests (arrival, prompt, tokens)."""

        async def one(arrival: float, prompt: float, tokens: float) -> tuple[float, float]:
            await asyncio.sleep(max(0.0, start + arrival - time.time()))
            first, last, _ = await self.answer(int(prompt), int(tokens))
            return first - start, last - start

        return await asyncio.gather(*(one(*request) for request in requests))


def measure(model: str) -> Costs:
    """Return the costs of an engine of this machine."""
    return asyncio.run(Worker(model).measure())


def check(model: str, processes: Sequence[int], count: int) -> int:
    """Compare the simulation with real engines, and print a row per number of them. Return 1 if a mean differs by more than
    10 %. Costs are measured in all processes at once, because these share the machine's cores."""
    print(_HEAD)
    worst = 0.0
    for number in processes:
        differences, row = _compare(model, number, count)
        worst = max(worst, *differences)
        print(f"| {number} | {row} | {max(differences):.1%} |", flush=True)
    return int(worst > _TOLERANCE)


def _compare(model: str, number: int, count: int) -> tuple[list[float], str]:
    workers = [_start(model, max(1, (os.cpu_count() or 1) // number)) for _ in range(number)]
    try:
        tables = [Costs.from_json(table) for table in _ask(workers, [{"verb": "measure"}] * number)]
        costs = _mean(tables)
        rate = _LOAD * number * _capacity(costs)
        requests = make_requests(Load(_MIX, rate, count * number), seed=1)
        jobs = simulate(Setup(costs, _LIMITS, number, routing="turns"), requests).jobs
        start = time.time() + 1.0
        parts = [[(r.arrival, r.prompt_tokens, r.output_tokens) for r in requests[index::number]] for index in range(number)]
        answers = _ask(workers, [{"verb": "run", "start": start, "requests": part} for part in parts])
        real = [answers[request.number % number][request.number // number] for request in requests]
    finally:
        for worker in workers:
            worker.stdin.close()  # type: ignore[union-attr]
            worker.wait()
    pairs = [
        (_mean_wait(requests, [job.started or 0.0 for job in jobs]), _mean_wait(requests, [first for first, _ in real])),
        (_mean_wait(requests, [job.finished or 0.0 for job in jobs]), _mean_wait(requests, [last for _, last in real])),
    ]
    cells = " | ".join(f"{simulated:.4f} / {measured:.4f}" for simulated, measured in pairs)
    return [abs(simulated / measured - 1) for simulated, measured in pairs], f"{rate:.2f} | {cells}"


def _mean_wait(requests: Sequence[Request], times: Sequence[float]) -> float:
    return statistics.fmean(time - request.arrival for request, time in zip(requests, times, strict=True))


def _capacity(costs: Costs) -> float:
    """Return the requests per second of an engine whose steps are full."""
    rush = [replace(request, arrival=0.0) for request in make_requests(Load(_MIX, 1.0, 200), seed=2)]
    return len(rush) / simulate(Setup(costs, _LIMITS), rush).seconds


def _mean(tables: Sequence[Costs]) -> Costs:
    """Return the mean of costs that were measured at the same sizes."""

    def points(name: str) -> list[tuple[float, float]]:
        columns = zip(*(getattr(table, name) for table in tables), strict=True)
        return [(statistics.fmean(x for x, _ in column), statistics.fmean(y for _, y in column)) for column in columns]

    names = ("per_sequence", "per_context_token", "per_request")
    return Costs(points("step"), encode=points("encode"), **{n: statistics.fmean(getattr(t, n) for t in tables) for n in names})


def _start(model: str, threads: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    words = [sys.executable, "-m", "benchmarks.cluster.check", model]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def _ask(workers: Sequence[subprocess.Popen[str]], messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Send each worker its message, and return the replies."""
    for worker, message in zip(workers, messages, strict=True):
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(message) + "\n")
        worker.stdin.flush()
    replies = [worker.stdout.readline() if worker.stdout is not None else "" for worker in workers]
    if not all(replies):
        raise RuntimeError("an engine's process has ended; its error is above")
    return [json.loads(reply) for reply in replies]


async def _work(model: str) -> None:
    """Run a worker: messages are lines of stdin, replies lines of stdout."""
    worker = Worker(model)
    for line in iter(sys.stdin.readline, ""):
        message = json.loads(line)
        if message["verb"] == "measure":
            reply: Any = (await worker.measure()).as_json()
        else:
            reply = await worker.run(message["start"], message["requests"])
        print(json.dumps(reply), flush=True)
    worker.llm.close()


if __name__ == "__main__":
    asyncio.run(_work(sys.argv[1]))
