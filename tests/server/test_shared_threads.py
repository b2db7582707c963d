"""Threads that API keys share: who gets a free one."""

from __future__ import annotations

import asyncio
from collections import Counter
from threading import Event

import pytest
from batch_files import until
from sensorium.server.shared_threads import SharedThreads
from waiting import LONG


class Work:
    """Work of keys that runs until `go_on`."""

    def __init__(self, count):
        self.threads, self.go_on, self.begun = SharedThreads(count, "test"), Event(), []

    def start(self, key):
        def work():
            self.begun.append(key)
            self.go_on.wait(LONG)
            return key

        return asyncio.ensure_future(self.threads.run(key, work))


async def started(work, **counts):
    await until(lambda: Counter(work.begun) == Counter(counts))
    await asyncio.sleep(0.05)
    assert Counter(work.begun) == Counter(counts)


def test_a_key_leaves_threads_to_others():
    """Four threads: the first key gets two of them, and each of the next two keys gets one."""

    async def scenario():
        work = Work(4)
        try:
            tasks = [work.start("a") for _ in range(9)]
            await started(work, a=2)
            tasks += [work.start(key) for key in "bbc"]
            await started(work, a=2, b=1, c=1)
        finally:
            work.go_on.set()
        assert await asyncio.gather(*tasks) == [*"aaaaaaaaabbc"]
        assert not work.threads._busy
        assert not work.threads._waiting

    asyncio.run(scenario())


def test_requests_without_a_key_use_all_threads():
    async def scenario():
        work = Work(4)
        try:
            tasks = [work.start(None) for _ in range(4)]
            await until(lambda: len(work.begun) == 4)
        finally:
            work.go_on.set()
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_a_thread_is_in_use_until_its_work_ends():
    async def scenario():
        work = Work(2)
        try:
            tasks = [work.start("a") for _ in range(3)]
            await started(work, a=1)
            for task in tasks[:2]:  # one runs, one waits
                task.cancel()
            await asyncio.sleep(0.05)
            assert work.begun == ["a"]
        finally:
            work.go_on.set()
        assert await tasks[2] == "a"
        assert len(work.begun) == 2
        await until(lambda: not work.threads._busy)

    asyncio.run(scenario())


def test_errors_free_the_thread():
    async def scenario():
        threads = SharedThreads(1, "test")
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await threads.run("a", lambda: 1 // 0)
        assert await threads.run("b", lambda: 1) == 1

    asyncio.run(scenario())


def test_work_that_cannot_be_started_leaves_its_place(monkeypatch):
    """A system without room for another thread."""

    def refuse(work):
        raise RuntimeError("can't start new thread")

    async def scenario():
        threads = SharedThreads(1, "test")
        with monkeypatch.context() as patch:
            patch.setattr(threads._pool, "submit", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                await threads.run("a", int)
        assert await threads.run("a", lambda: 1) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("granted", [False, True])
def test_a_request_that_ends_while_it_waits_leaves_its_place(granted):
    """Also if it has just got a thread, and not begun."""

    async def scenario():
        threads = SharedThreads(1, "test")
        await threads._take("a")
        waiting = asyncio.ensure_future(threads._take("b"))
        await until(lambda: threads._waiting)
        if granted:
            threads._free("a")
        waiting.cancel()
        if not granted:
            threads._free("a")
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await threads._take("c")
        assert (threads._busy, threads._waiting) == ({"c": 1}, {})

    asyncio.run(scenario())
