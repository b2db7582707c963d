"""Waiting for what another thread does, and steps that wait for what a test does, however fast either is. Tests only."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LONG = 240.0
"""Seconds after which it hangs, on any machine."""


def wait_until(true: Callable[[], object]) -> None:
    """AssertionError where it is not within LONG."""
    end = time.monotonic() + LONG
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def heard(driver: Any) -> bool:
    """Whether every caller has taken what there was to tell."""
    return not any(ticket.posted for ticket in list(driver._names.values()))


def hold_steps(core: Any, until: Callable[[], object]) -> None:
    """Each step of this engine waits until then before it computes anything."""
    step = core.step

    def held() -> Any:
        wait_until(until)
        return step()

    core.step = held
