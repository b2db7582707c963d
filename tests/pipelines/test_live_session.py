"""Sessions of live transcription: many streams at once, sources that fail, and what is freed at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from sensorium import LLM, AsyncLLM, Gap, LiveEvent
from sensorium.callers.errors import InputError
from sensorium.pipelines.speech.live_input import LiveInput
from streams import OPTIONS, RATE, blocks, check_promises, check_that_the_loop_is_not_held, finals, play, speech
from waiting import assert_idle, wait_until


@pytest.fixture(scope="module")
def llm(whisper: Path) -> LLM:
    return LLM(whisper, max_num_seqs=8)


async def collect(events: AsyncIterator[LiveEvent], found: list[LiveEvent]) -> None:
    async for event in events:
        found.append(event)


def test_sixteen_streams_at_once(llm: LLM) -> None:
    """Each stream has the events that it has alone."""
    options = OPTIONS | {"min_chunk": 9}
    clips = [speech(-0.5, 0.3 + 0.02 * seed, -0.7, seed=seed) for seed in range(16)]
    alone = [[(one.kind, one.text, one.start) for one in play(llm, clip, **options)] for clip in clips]

    async def hear(clip: np.ndarray) -> list[LiveEvent]:
        return [event async for event in AsyncLLM(llm).stream_transcribe(blocks(np.split(clip, 10)), **options)]

    async def together() -> list[list[LiveEvent]]:
        return await asyncio.gather(*(hear(clip[: len(clip) // 10 * 10]) for clip in clips))

    found = asyncio.run(together())
    assert [[(one.kind, one.text, one.start) for one in events] for events in found] == alone
    assert_idle(llm)


def test_cancelling_one_stream_stops_nothing_else(llm: LLM) -> None:
    async def main() -> None:
        engine, hold = AsyncLLM(llm), asyncio.Event()
        first = engine.stream_transcribe(blocks([speech(-1, 0.8), speech(0.6)], hold), **OPTIONS, max_sessions=2)
        other = engine.stream_transcribe(blocks([speech(-1, 0.8)], hold), **OPTIONS, max_sessions=2)
        assert (await anext(first)).kind == (await anext(other)).kind == "speech_started"
        with pytest.raises(InputError, match="2 live streams are open, and max_sessions is 2"):
            await anext(engine.stream_transcribe(blocks([]), **OPTIONS, max_sessions=2))
        task = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await first.aclose()
        hold.set()
        assert len(finals([event async for event in other])) == 1

    asyncio.run(main())
    wait_until(lambda: not llm.engine.loop._names)
    assert_idle(llm)


def test_a_source_that_fails_or_stalls(llm: LLM) -> None:
    async def fails() -> AsyncIterator[np.ndarray]:
        yield speech(-1, 0.8)
        raise OSError("the cable is out")

    async def main() -> tuple[list[LiveEvent], list[LiveEvent]]:
        engine, found = AsyncLLM(llm), []
        with pytest.raises(OSError, match="the cable is out"):
            await collect(engine.stream_transcribe(fails(), **OPTIONS), found)
        stalled = blocks([speech(-1, 0.8)], asyncio.Event())
        return found, [event async for event in engine.stream_transcribe(stalled, **OPTIONS, idle_timeout=0.01)]

    found, stalled = asyncio.run(main())
    assert len(finals(found)) == len(finals(stalled)) == 1
    assert stalled[-1].reason == "idle"
    with pytest.raises(InputError, match="samples must be an async iterator"):
        AsyncLLM(llm).stream_transcribe([speech(1)])


def test_a_source_that_is_too_fast_waits(llm: LLM) -> None:
    async def main() -> list[LiveEvent]:
        parts = [speech(-0.5, 0.5, seed=seed) for seed in range(12)]
        return [one async for one in AsyncLLM(llm).stream_transcribe(blocks(parts), **OPTIONS, max_buffer_bytes=40 * RATE)]

    events = asyncio.run(main())
    check_promises(events)
    assert events[-1].end == 12
    assert len(finals(events)) >= 6


@pytest.mark.parametrize("rate", [RATE, 44_100])
def test_a_long_block_does_not_hold_the_loop(llm: LLM, rate: int) -> None:
    samples = speech(-0.5, 0.6, -30, 0.7, -1, 1.4, -2)
    block = samples if rate == RATE else np.stack([samples, samples])
    asyncio.run(check_that_the_loop_is_not_held(llm, block, rate, **OPTIONS))


def test_a_stream_is_not_idle_while_a_block_is_converted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop with much other work."""
    push = LiveInput.push_in_steps

    def slowly(self: LiveInput, block: object) -> Iterator[None]:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            yield
        yield from push(self, block)

    monkeypatch.setattr(LiveInput, "push_in_steps", slowly)
    events = list[LiveEvent]()
    stream = AsyncLLM(llm).stream_transcribe(blocks([speech(-1, 0.8, -1)]), **OPTIONS, idle_timeout=0.3)
    asyncio.run(collect(stream, events))
    assert events[-1].reason == "finished"
    assert finals(events)


def test_a_broken_value_late_in_a_block_drops_the_block(llm: LLM) -> None:
    """A long block is converted in steps, but it is added only if all of its values are finite."""
    broken = speech(-1, 0.8, -10)
    broken[-1] = np.nan

    async def main() -> list[LiveEvent]:
        found = list[LiveEvent]()
        with pytest.raises(InputError, match="NaN"):
            await collect(AsyncLLM(llm).stream_transcribe(blocks([speech(-1, 0.5), broken]), **OPTIONS, rate=44_100), found)
        return found

    assert [event.kind for event in asyncio.run(main()) if event.kind in ("speech_started", "final")] == [
        "speech_started",
        "final",
    ]


def test_a_session_of_threads(llm: LLM) -> None:
    with llm.live_audio(**OPTIONS) as session:
        for seed in range(4):
            session.push(speech(-0.8, 0.6, seed=seed))
        session.push(Gap(10))
        session.finish()
        events = list(session.events())
        assert list(session.events()) == list(session.events(wait=False)) == []
    check_promises(events)
    assert len(finals(events)) == 4
    assert events[-1].end == pytest.approx(4 * 1.4 + 10)
    with pytest.raises(InputError, match="the live session has ended"):
        session.push(speech(0.1))
    assert_idle(llm)


def test_a_finished_session_takes_no_samples(llm: LLM) -> None:
    with llm.live_audio(RATE) as session:
        session.finish()
        with pytest.raises(InputError, match=r"the live session .*; begin a new one"):
            session.push(speech(0.5))
        assert [event.kind for event in session.events()] == ["ended"]


def test_closing_a_session_frees_everything(llm: LLM) -> None:
    session = llm.live_audio(**OPTIONS, max_sessions=1)
    session.push(speech(-1, 0.8))
    assert next(session.events()).kind == "speech_started"
    with pytest.raises(InputError, match="1 live streams are open"):
        llm.live_audio(max_sessions=1)
    session.close()
    session.close()
    wait_until(lambda: not llm.engine.loop._names)
    assert_idle(llm)
    llm.live_audio(max_sessions=1).close()


def test_a_closed_engine_ends_the_session(whisper: Path) -> None:
    llm = LLM(whisper)
    session = llm.live_audio(**OPTIONS)
    llm.close()
    session.push(speech(-1, 0.8))
    with pytest.raises(InputError, match="the engine was closed"):
        list(session.events())
