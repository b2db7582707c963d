"""Runs live streams: in coroutines for `AsyncLLM.stream_transcribe`, in a thread per session for `LLM.live_audio`."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from ...callers.errors import InputError, typed
from ...engine.async_llm import AsyncLLM
from ...engine.errors import NotPicklable
from ...engine.frontend.adapters import AdapterChoice
from ..run import run_async
from ..with_adapter import with_adapters
from .live import LiveTranscriber
from .live_input import Gap, LiveEvent, LiveInput
from .live_native import NativeTranscriber
from .live_slots import StreamSlot, slots_of
from .options import LiveOptions

if TYPE_CHECKING:
    from ...engine.engine import Engine

_lock = threading.Lock()
_threads = ThreadPoolExecutor(2, "speakers")  # networks that tell speakers apart would hold the event loop
_sessions: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # number of open streams


class LiveStream:
    """Runs one live stream in an event loop. Its passes run one after the other while samples arrive.

    Args:
        adapter: of all requests. The stream keeps the content that the name has when the stream is made.

    Raises:
        ConfigError, InputError: see `LiveTranscriber`, and `NativeTranscriber` if the model transcribes streams natively.
    """

    def __init__(self, llm: AsyncLLM, options: LiveOptions, adapter: AdapterChoice = None) -> None:
        engine, default = llm.engine, llm.engine.adapters.default
        self._adapter = engine.adapters.lease(adapter) if adapter is not None or default is None else default(("audio",))
        is_native = engine.speech is not None and engine.speech.stream_rule() is not None
        transcriber = NativeTranscriber if is_native else LiveTranscriber
        self.transcriber: LiveInput = transcriber(engine, options)
        self.max_sessions = min(options.max_sessions, engine.config.max_streams) if is_native else options.max_sessions
        self.llm, self._idle_timeout, self._hears = llm, options.idle_timeout, options.tells_speakers
        self.arrived = asyncio.Event()  # set after each change of the transcriber's input
        self._taken = asyncio.Event()  # set after samples were taken from the buffer
        self._converts = False  # the block that has arrived last

    async def read(self, blocks: AsyncIterable[object]) -> AsyncGenerator[LiveEvent, None]:
        """Yield the events of a source of blocks. While the buffer is full, no block is taken from the source."""
        with count_session(self):
            feeder = asyncio.ensure_future(self._feed(blocks))
            try:
                async with aclosing(self.events()) as events:
                    async for event in events:
                        if event.kind == "ended" and event.reason == "finished":
                            await feeder  # raises the error of the source, if it has failed
                        yield event
            finally:
                feeder.cancel()

    async def events(self) -> AsyncGenerator[LiveEvent, None]:
        """Yield events until the stream has ended. Closing the generator aborts the running pass.

        Raises:
            SensoriumError: the adapter cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        slot = StreamSlot(slots_of(self.llm.engine), lambda: _call(loop, self.arrived.set))
        try:
            async with aclosing(self._events(slot)) as events:
                async for event in events:
                    yield event
        finally:
            slot.release()
            if self.transcriber.handle is not None:
                self.llm.drop(self.transcriber.handle)
            if self._adapter is not None:
                self._adapter.release()

    async def _events(self, slot: StreamSlot) -> AsyncGenerator[LiveEvent, None]:
        transcriber = self.transcriber
        if self._adapter is not None:
            await asyncio.to_thread(self._adapter.load)
        while True:
            self.arrived.clear()
            task = transcriber.next_task()
            self._taken.set()
            may_wait = transcriber.busy or (task is not None and transcriber.may_wait(task))
            if transcriber.events or not may_wait:
                slot.release()  # else a slow reader of the events would hold it
            while transcriber.events:
                yield transcriber.events.popleft()
            if transcriber.ended:
                return
            if task is None:
                await (asyncio.sleep(0) if transcriber.busy else self._wait())
            elif may_wait and not slot.acquire():
                await self.arrived.wait()  # for the slot, or for samples, with which another pass may be due
            else:
                (adapted,) = with_adapters(self.llm.engine, [task], self._adapter)
                await run_async(self.llm, adapted, _threads if self._hears else None)
                slot.release()

    async def _wait(self) -> None:
        while not self.arrived.is_set():
            try:
                async with asyncio.timeout(self._idle_timeout):
                    await self.arrived.wait()
            except TimeoutError:
                if not self._converts and not self.arrived.is_set():  # else a long block takes its time, or has just been added
                    self.transcriber.finish("idle")
                    return

    async def _feed(self, blocks: AsyncIterable[object]) -> None:
        try:
            async for block in blocks:
                await self._wait_for_room(block)
                if isinstance(block, Gap):
                    self.transcriber.gap(block)
                else:
                    self._converts = True
                    for _ in self.transcriber.push_in_steps(block):
                        await asyncio.sleep(0)
                    self._converts = False
                self.arrived.set()
            await self._wait_for_room()
        finally:
            self.transcriber.finish()
            self.arrived.set()

    async def _wait_for_room(self, block: object = b"") -> None:
        """Wait until the block fits into the buffer and the transcriber is not busy: events must not depend on its breaks."""
        transcriber = self.transcriber
        while transcriber.busy or (transcriber.fits(block) and not transcriber.has_room(block)):
            self._taken.clear()
            await self._taken.wait()


@contextmanager
def count_session(stream: LiveStream) -> Iterator[None]:
    """Count a stream as open while the context lasts. Raise InputError if too many are open."""
    engine, limit = stream.llm.engine, stream.max_sessions
    with _lock:
        if _sessions.get(engine, 0) >= limit:
            config, name = engine.config, "max_sessions"
            if isinstance(stream.transcriber, NativeTranscriber) and limit == config.max_streams:
                name = "max_live_streams" if limit == config.max_live_streams else "max_num_seqs"
            where = "" if name == "max_sessions" else " of the engine"
            reason = f"{_sessions[engine]} live streams are open, and <<param>>{where} is {limit}; close one or raise it"
            raise InputError(reason, code="overloaded", param=name)
        _sessions[engine] = _sessions.get(engine, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _sessions[engine] -= 1


def stream_events(
    llm: AsyncLLM, samples: AsyncIterable[object], options: LiveOptions, adapter: AdapterChoice = None
) -> AsyncGenerator[LiveEvent, None]:
    if not isinstance(samples, AsyncIterable):
        raise InputError(
            f"samples must be an async iterator of blocks of samples, not {typed(samples)}",
            code="invalid_value",
            param="samples",
        )
    return LiveStream(llm, options, adapter).read(samples)


class LiveAudio(NotPicklable):
    """A live stream for threads: `push` samples in one, read `events` in another or in the same one.

    Made by `LLM.live_audio`. It ends with `close`, with its `with` block, or when it is garbage collected.
    """

    def __init__(self, stream: LiveStream) -> None:
        self._stream, self._queue = stream, SimpleQueue[LiveEvent | Exception | None]()
        self._finished = False  # `finish` was called
        slot = count_session(stream)
        slot.__enter__()
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(_collect(stream, self._queue))

        def run(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
            loop.close()
            slot.__exit__(None, None, None)

        self._thread = threading.Thread(target=run, args=(self._loop, self._task), name="live audio", daemon=True)
        self._thread.start()
        weakref.finalize(self, _call, self._loop, self._task.cancel).atexit = False

    def push(self, samples: object) -> None:
        """Add samples, bytes of PCM (int16, little-endian, mono), or a `Gap`. It does not wait.

        Raises:
            InputError: see `LiveTranscriber.push`; or the session has ended or was finished.
        """
        if self._task.done() or self._finished:
            state = "has ended" if self._task.done() else "was finished and takes no more samples"
            raise InputError(f"the live session {state}; begin a new one")
        transcriber = self._stream.transcriber
        if isinstance(samples, Gap):
            transcriber.gap(samples)
        else:
            transcriber.push(samples)
        _call(self._loop, self._stream.arrived.set)

    @property
    def lag(self) -> float:
        """Seconds of audio that no final text covers yet."""
        return self._stream.transcriber.lag

    def events(self, wait: bool = True) -> Iterator[LiveEvent]:
        """Yield events until the session has ended; without `wait`, only the events that are ready.

        Raises:
            SensoriumError: the engine was closed, sleeps, or has died.
        """
        while True:
            try:
                event = self._queue.get(wait)
            except Empty:
                return
            if event is None:
                self._queue.put(None)  # ends later calls, too
                return
            if isinstance(event, Exception):
                raise event
            yield event

    def finish(self) -> None:
        """End the stream. `events` yields the rest, and then "ended"."""
        self._finished = True
        self._stream.transcriber.finish()
        _call(self._loop, self._stream.arrived.set)

    def close(self) -> None:
        """End the session at once and free its memory. The text of the open window is dropped."""
        _call(self._loop, self._task.cancel)
        self._thread.join()

    def __enter__(self) -> LiveAudio:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _collect(stream: LiveStream, queue: SimpleQueue[LiveEvent | Exception | None]) -> None:
    try:
        async with aclosing(stream.events()) as events:
            async for event in events:
                queue.put(event)
    except Exception as error:
        queue.put(error)
    finally:
        queue.put(None)


def _call(loop: asyncio.AbstractEventLoop, function: Any) -> None:
    with suppress(RuntimeError):  # the loop has ended
        loop.call_soon_threadsafe(function)
