"""Quarantine: failing items are refused for a time."""

from __future__ import annotations

import pytest
from sensorium.callers.errors import InputError
from sensorium.engine.scheduler import quarantine
from sensorium.engine.scheduler.quarantine import Quarantine


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_an_item_is_refused_by_name_until_its_time_is_over():
    clock = Clock()
    held = Quarantine(300, clock)
    held.check("a", "image", 0)
    held.add("a")
    clock.now = 100.5
    with pytest.raises(InputError, match=r"image 1: .* another 200 s"):
        held.check("a", "image", 1)
    held.check("b", "image", 1)
    clock.now = 300
    held.check("a", "image", 0)
    assert len(held) == 0


def test_failing_again_restarts_the_time():
    clock = Clock()
    held = Quarantine(10, clock)
    held.add("a")
    clock.now = 9
    held.add("a")
    clock.now = 15
    with pytest.raises(InputError):
        held.check("a", "image", 0)


def test_the_number_of_refused_items_is_bounded(monkeypatch):
    monkeypatch.setattr(quarantine, "_MAX_ITEMS", 3)
    held = Quarantine(300, Clock())
    for key in "abcd":
        held.add(key)
    assert len(held) == 3
    held.check("a", "image", 0)
    with pytest.raises(InputError):
        held.check("d", "image", 0)


def test_zero_seconds_refuse_nothing():
    held = Quarantine(0)
    held.add("a")
    assert len(held) == 0
    held.check("a", "image", 0)
