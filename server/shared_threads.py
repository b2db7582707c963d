"""Threads that API keys share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class SharedThreads:
    """Threads for the work of requests. A key gets another one if more are free than it uses, so that no key uses all.

    A thread is in use until its work ends, even if the request has ended before. Requests of a server without keys may use all
    threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._count, self._pool = count, ThreadPoolExecutor(count, name)
        self._busy = Counter[str]()  # threads that each key uses
        self._waiting = dict[asyncio.Future[None], str]()  # what waits for a thread, in order of arrival, with its key

    async def run(self, tenant: str | None, work: Callable[[], T]) -> T:
        """Return the result of `work`. Work of one key starts in the order of its calls.

        Args:
            tenant: stands for the request's key, None without keys.
        """
        if tenant is not None:
            await self._take(tenant)
        try:
            future = self._pool.submit(work)
        except BaseException:  # no thread can be started
            if tenant is not None:
                self._free(tenant)
            raise
        if tenant is not None:
            loop = asyncio.get_running_loop()

            def free() -> None:
                with suppress(RuntimeError):  # the server has stopped
                    loop.call_soon_threadsafe(self._free, tenant)

            future.add_done_callback(lambda _: free())
        return await asyncio.wrap_future(future)

    async def _take(self, tenant: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = tenant
        self._give()
        try:
            await turn
        except asyncio.CancelledError:
            if self._waiting.pop(turn, None) is None:  # it had got its thread
                self._free(tenant)
            raise

    def _free(self, tenant: str) -> None:
        self._busy -= Counter([tenant])  # a key without threads is forgotten
        self._give()

    def _give(self) -> None:
        """Give free threads to those that wait, in their order."""
        for turn, tenant in list(self._waiting.items()):
            if not turn.cancelled() and self._busy[tenant] < self._count - self._busy.total():
                del self._waiting[turn]
                self._busy[tenant] += 1
                turn.set_result(None)
