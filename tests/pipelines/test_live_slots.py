"""Slots of partial passes: how many run at a time, who is next, and that no slot is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sensorium import LLM, AsyncLLM, EngineDeadError, LiveEvent
from sensorium.pipelines.speech import live_session
from sensorium.pipelines.speech.live import LiveTranscriber
from sensorium.pipelines.speech.live_slots import PassSlots, StreamSlot, slots_of
from streams import OPTIONS, blocks, speech
from waiting import LONG, assert_idle, wait_until


@pytest.fixture(scope="module")
def llm(whisper: Path) -> LLM:
    return LLM(whisper, max_num_seqs=8)


class HeldPasses:
    """Replaces `run_async` of live sessions: holds partial passes until `go_on` is set.

    Attributes:
        running: transcribers whose partial pass has begun and not ended. begun: those of all partial passes, in order.
        ends: samples up to which the first partial pass of each has heard.
        finals: those of all final passes. failing: those whose partial passes fail.
    """

    def __init__(self) -> None:
        self.running, self.begun, self.finals = [], [], []
        self.failing, self.go_on, self.most = [], threading.Event(), 0
        self.ends: dict[LiveTranscriber, int] = {}
        self._run = live_session.run_async

    async def run(self, llm: AsyncLLM, task: Any, threads: Any = None) -> Any:
        owner = getattr(task, "__self__", None)
        if owner is None:
            self.finals.append(task.func.__self__)
            return await self._run(llm, task, threads)
        self.running.append(owner)
        self.begun.append(owner)
        self.most = max(self.most, len(self.running))
        try:
            await until(lambda: self.go_on.is_set() or owner in self.failing)
            if owner in self.failing:
                raise EngineDeadError("the engine has failed")
            result = await self._run(llm, task, threads)
            self.ends.setdefault(owner, owner._last_pass)
            return result
        finally:
            self.running.remove(owner)


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG):
        while not true():
            await asyncio.sleep(0.001)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> HeldPasses:
    held = HeldPasses()
    monkeypatch.setattr(live_session, "run_async", held.run)
    return held


class Streams:
    """Streams of one event loop, each with a queue of blocks, which None ends."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.blocks, self.events = AsyncLLM(llm), list[asyncio.Queue[Any]](), list[list[LiveEvent]]()
        self.tasks, self.transcribers = list[asyncio.Task[None]](), list[LiveTranscriber]()

    async def open(self, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Open streams whose first partial pass is due, one after the other."""
        made = LiveTranscriber.__init__

        def note(transcriber: LiveTranscriber, *arguments: Any) -> None:
            made(transcriber, *arguments)
            self.transcribers.append(transcriber)

        monkeypatch.setattr(LiveTranscriber, "__init__", note)
        for seed in range(count):
            self.blocks.append(asyncio.Queue())
            self.events.append([])
            self.tasks.append(asyncio.ensure_future(self._read(len(self.tasks))))
            self.blocks[-1].put_nowait(speech(-1.2, 0.4, seed=seed))
            await until(lambda: any(event.kind == "speech_started" for event in self.events[-1]))
            await asyncio.sleep(0)

    async def _read(self, number: int) -> None:
        async with aclosing(self.llm.stream_transcribe(self._taken(number), **OPTIONS)) as events:
            async for event in events:
                self.events[number].append(event)

    async def _taken(self, number: int) -> AsyncIterator[np.ndarray]:
        while (block := await self.blocks[number].get()) is not None:
            yield block

    async def end(self) -> None:
        for queue in self.blocks:
            queue.put_nowait(None)
        await asyncio.gather(*self.tasks, return_exceptions=True)


def test_two_passes_run_and_the_others_wait_in_order(llm: LLM, passes: HeldPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> Streams:
        streams = Streams(llm)
        await streams.open(6, monkeypatch)
        await until(lambda: len(passes.running) == 2)
        before = streams.transcribers[4]._windows.end
        streams.blocks[4].put_nowait(speech(0.27))  # while it waits
        await until(lambda: streams.transcribers[4]._windows.end > before)
        assert passes.running == passes.begun == streams.transcribers[:2]
        passes.go_on.set()
        await until(lambda: len(passes.ends) == 6)
        await streams.end()
        return streams

    streams = asyncio.run(main())
    assert passes.begun[:6] == streams.transcribers
    assert passes.most == 2
    assert passes.ends[streams.transcribers[4]] > passes.ends[streams.transcribers[3]], "its first pass has the newest samples"
    assert all(events[-1].kind == "ended" for events in streams.events)
    assert_idle(llm)


def test_a_final_pass_goes_ahead(llm: LLM, passes: HeldPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for no slot, and the stream leaves the queue."""

    async def main() -> None:
        streams = Streams(llm)
        await streams.open(4, monkeypatch)
        streams.blocks[2].put_nowait(None)
        await streams.tasks[2]
        assert passes.finals == [streams.transcribers[2]]
        assert passes.running == streams.transcribers[:2]
        passes.go_on.set()
        await until(lambda: streams.transcribers[3] in passes.begun)
        await streams.end()

    asyncio.run(main())
    assert_idle(llm)


@pytest.mark.parametrize("waits", [True, False])
def test_a_cancelled_stream_leaves(llm: LLM, passes: HeldPasses, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    async def main() -> None:
        streams = Streams(llm)
        await streams.open(4, monkeypatch)
        gone = streams.tasks[2 if waits else 0]
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        if waits:
            assert passes.running == streams.transcribers[:2]
            passes.go_on.set()
        else:
            await until(lambda: passes.running == streams.transcribers[1:3])
            passes.go_on.set()
        await until(lambda: streams.transcribers[3] in passes.begun)
        await streams.end()

    asyncio.run(main())
    wait_until(lambda: not llm.engine.loop._names)
    assert_idle(llm)


def test_a_pass_that_fails_frees_its_slot(llm: LLM, passes: HeldPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        streams = Streams(llm)
        await streams.open(3, monkeypatch)
        passes.failing.append(streams.transcribers[0])
        with pytest.raises(EngineDeadError):
            await streams.tasks[0]
        await until(lambda: passes.running == streams.transcribers[1:])
        passes.go_on.set()
        await streams.end()

    asyncio.run(main())
    assert_idle(llm)


def test_a_slow_reader_holds_no_slot(llm: LLM, passes: HeldPasses, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams have ended a pass, and nobody takes their events."""
    emit = LiveTranscriber._partial

    async def always_emit(transcriber: LiveTranscriber) -> None:
        await emit(transcriber)
        transcriber._emit("partial", 0, 0, "text")

    monkeypatch.setattr(LiveTranscriber, "_partial", always_emit)
    passes.go_on.set()

    async def hold(stream: AsyncGenerator[LiveEvent, None]) -> None:
        while (await anext(stream)).kind != "partial":
            pass

    async def main() -> None:
        clips = [blocks([speech(-1, 0.8)], asyncio.Event()) for _ in range(3)]
        slow = [AsyncLLM(llm).stream_transcribe(clip, **OPTIONS) for clip in clips]
        async with asyncio.timeout(LONG):
            for stream in slow:
                await hold(stream)
        for stream in slow:
            await stream.aclose()

    asyncio.run(main())
    wait_until(lambda: not llm.engine.loop._names)
    assert_idle(llm)


@contextmanager
def sessions(llm: LLM, count: int) -> Iterator[list[Any]]:
    """Open sessions of threads whose first partial pass is due."""
    opened = []
    try:
        for seed in range(count):
            opened.append(llm.live_audio(**OPTIONS))
            opened[-1].push(speech(-1, 0.8, seed=seed))
            assert next(opened[-1].events()).kind == "speech_started"
        yield opened
    finally:
        for session in opened:
            session.close()


def test_sessions_of_threads_wait_too(llm: LLM, passes: HeldPasses) -> None:
    """A closed session gives its slot to the next one, in another thread."""
    with sessions(llm, 3) as opened:
        first, second, third = (session._stream.transcriber for session in opened)
        wait_until(lambda: set(passes.running) == {first, second})
        opened[0].close()
        wait_until(lambda: set(passes.running) == {second, third})
        passes.go_on.set()
        wait_until(lambda: len(passes.ends) == 2)
    wait_until(lambda: not llm.engine.loop._names)
    assert_idle(llm)


def test_the_queue_of_slots() -> None:
    woken = list[str]()
    slots = PassSlots(1)
    a, b, c = (StreamSlot(slots, lambda name=name: woken.append(name)) for name in "abc")
    assert a.acquire()
    assert a.acquire(), "it has its slot already"
    assert not b.acquire()
    assert not c.acquire()
    assert not b.acquire(), "it keeps its place"
    b.release()
    b.release()
    assert not woken
    a.release()
    assert woken == ["c"]
    assert not b.acquire()
    assert c.acquire()
    c.release()
    assert woken == ["c", "b"]
    b.release()
    assert a.acquire()


def test_other_devices_have_no_slots(llm: LLM) -> None:
    assert slots_of(llm.engine) is slots_of(llm.engine)
    gpu: Any = SimpleNamespace(config=SimpleNamespace(torch_device=torch.device("cuda:0")))
    assert slots_of(gpu) is None
    free = [StreamSlot(None, lambda: None) for _ in range(3)]
    assert all(slot.acquire() for slot in free)
