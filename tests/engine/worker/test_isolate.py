"""isolate_failures: failing items are found among good ones in few calls."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sensorium.engine.worker.isolate import isolate_failures


@given(st.integers(0, 70), st.sets(st.integers(0, 69), max_size=6))
def test_only_failing_items_fail_and_few_calls_find_them(count, failing):
    calls = []

    def attempt(items):
        calls.append(len(items))
        if failing & set(items):
            raise RuntimeError("failing item")
        return [item * 10 for item in items]

    results = isolate_failures(range(count), attempt)
    bad = {i for i in failing if i < count}
    assert [i for i, result in enumerate(results) if isinstance(result, RuntimeError)] == sorted(bad)
    assert all(result == i * 10 for i, result in enumerate(results) if i not in bad)
    assert len(results) == count
    assert len(calls) <= 1 + 2 * len(bad) * math.ceil(math.log2(max(count, 2)))


def test_a_wrong_number_of_results_fails_the_call():
    results = isolate_failures(["a", "b"], lambda items: items[:1])
    assert results == ["a", "b"]
    assert isinstance(isolate_failures(["a"], lambda items: [])[0], RuntimeError)


def test_an_interrupt_is_not_caught():
    def attempt(items):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        isolate_failures([1, 2], attempt)
