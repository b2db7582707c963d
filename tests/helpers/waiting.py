"""Wait for other threads, and make steps wait for a test, independently of speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sensorium.engine.core.engine_core import EngineCore

LONG = 240.0
"""Seconds after which something counts as hung, on any machine."""


def wait_until(true: Callable[[], object]) -> None:
    """Wait until the condition holds; AssertionError after LONG seconds."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, f"the condition did not hold within {LONG:.0f} s"
        time.sleep(0.001)


def heard(engine_loop: Any) -> bool:
    """Return whether the callers have taken all outputs of answers that are being computed."""
    return not any(handle.posted and not handle.answer.closed for handle in list(engine_loop._names.values()))


def assert_idle(llm: Any) -> None:
    """Check that the engine holds nothing of any request, in whichever process its core runs."""
    loop = llm.engine.loop
    loop.call(lambda engine_loop: None).result()
    if isinstance(loop.core, EngineCore):
        assert not loop.core.scheduler.requests
        assert not loop.core.executor.runner.sequences
    assert not loop._owners
    assert not loop._names
    assert loop.input_queue.num_waiting == 0
    assert loop.input_queue._bytes == 0
    stats = llm.engine.stats
    assert (stats.running, stats.waiting, stats.idle, stats.blocks_used) == (0, 0, 0, 0)


def hold_steps(core: Any, until: Callable[[], object]) -> None:
    """Make each step of this core wait for the condition before it computes."""
    step = core.step

    def held() -> Any:
        wait_until(until)
        return step()

    core.step = held


def hold_first_step(engine_loop: Any, count: int) -> None:
    """Make the next step wait until that many requests are admitted, so that none ends before the last comes."""
    step, core = engine_loop.core.step, engine_loop.core

    def all_admitted() -> bool:
        engine_loop._read_messages(None)
        return len(set(engine_loop._owners.values())) == count

    def held() -> Any:
        wait_until(all_admitted)
        core.step = step
        return step()

    core.step = held
