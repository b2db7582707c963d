"""Poison items: found in few attempts among good ones, refused for their time, never because memory ran out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sensorium.engine import quarantine
from sensorium.engine.quarantine import Quarantine, bisect, is_out_of_memory
from sensorium.mm.errors import InputError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_refused_for_its_time_and_named():
    clock = Clock()
    held = Quarantine(300, clock)
    held.check("a", "image 0")
    held.add("a")
    clock.now = 100.5
    with pytest.raises(InputError, match=r"image 1: .* another 200 s"):
        held.check("a", "image 1")
    held.check("b", "image 1")
    clock.now = 300
    held.check("a", "image 0")
    assert len(held) == 0


def test_breaking_again_starts_the_time_anew():
    clock = Clock()
    held = Quarantine(10, clock)
    held.add("a")
    clock.now = 9
    held.add("a")
    clock.now = 15
    with pytest.raises(InputError):
        held.check("a", "image 0")


def test_the_number_is_bounded(monkeypatch):
    monkeypatch.setattr(quarantine, "_MAX_ITEMS", 3)
    held = Quarantine(300, Clock())
    for key in "abcd":
        held.add(key)
    assert len(held) == 3
    held.check("a", "image 0")
    with pytest.raises(InputError):
        held.check("d", "image 0")


def test_no_seconds_is_no_quarantine():
    held = Quarantine(0)
    held.add("a")
    assert len(held) == 0
    held.check("a", "image 0")


def test_what_running_out_of_memory_looks_like():
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 bytes"),
    ):
        assert is_out_of_memory(error)
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), KeyboardInterrupt()):
        assert not is_out_of_memory(error)


def test_torch_says_so_itself():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@given(st.integers(0, 70), st.sets(st.integers(0, 69), max_size=6))
def test_only_poison_fails_in_few_attempts(count, poison):
    calls = []

    def attempt(items):
        calls.append(len(items))
        if poison & set(items):
            raise RuntimeError("poison")
        return [item * 10 for item in items]

    results = bisect(range(count), attempt)
    bad = {i for i in poison if i < count}
    assert [i for i, result in enumerate(results) if isinstance(result, RuntimeError)] == sorted(bad)
    assert all(result == i * 10 for i, result in enumerate(results) if i not in bad)
    assert len(results) == count
    assert len(calls) <= 1 + 2 * len(bad) * math.ceil(math.log2(max(count, 2)))


def test_a_wrong_number_of_results_is_an_error_of_the_batch():
    results = bisect(["a", "b"], lambda items: items[:1])
    assert results == ["a", "b"]
    assert isinstance(bisect(["a"], lambda items: [])[0], RuntimeError)


def test_an_interrupt_is_not_caught():
    def attempt(items):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bisect([1, 2], attempt)
