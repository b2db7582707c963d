"""ByteCache and UuidTable: limits, order of eviction, and values that are made once for concurrent callers."""

from __future__ import annotations

import threading

import pytest
from sensorium.callers.errors import InputError
from sensorium.mm.cache import ByteCache, UuidTable
from sensorium.mm.tenants import tenant_salt
from waiting import wait_until

SIZES = {"A": 2, "B": 2, "C": 2, "D": 1, "E": 1, "huge": 7}


def ask(cache: ByteCache[str], *keys: str) -> list[str]:
    """Look all keys up, then make the missed values, as a request does. Return the hits."""
    found = {key: cache.get(key) for key in keys}
    for key, value in found.items():
        if value is None:
            assert cache.make(key, lambda key=key: key) == key
    return [key for key, value in found.items() if value is not None]


@pytest.fixture
def cache():
    return ByteCache(6, SIZES.__getitem__)


def test_values_that_a_request_found_are_not_evicted(cache):
    assert ask(cache, "A", "B", "C") == []
    assert ask(cache, "D", "E", "A", "C") == ["A", "C"]
    assert cache.get("B") is None
    assert (cache.stats.bytes, cache.stats.entries, cache.stats.evictions) == (6, 4, 1)


def test_an_item_larger_than_the_cache_is_made_and_not_kept(cache):
    ask(cache, "A")
    assert ask(cache, "huge") == []
    assert cache.get("huge") is None
    assert cache.get("A") == "A"
    assert cache.stats.bytes == 2


def test_hits_and_misses_are_counted(cache):
    ask(cache, "A", "B")
    ask(cache, "A")
    assert (cache.stats.hits, cache.stats.misses) == (1, 2)


def test_concurrent_callers_make_a_value_once(cache):
    calls, asked, got = [], [], []

    def maker() -> str:
        calls.append(1)
        wait_until(lambda: len(asked) == 16)
        return "A"

    def work() -> None:
        asked.append(1)
        got.append(cache.make("A", maker))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == ["A"] * 16
    assert calls == [1]


def test_an_error_reaches_every_caller_and_is_not_cached(cache):
    def fail() -> str:
        raise InputError("broken")

    for _ in range(2):
        with pytest.raises(InputError, match="broken"):
            cache.make("A", fail)
    assert cache.make("A", lambda: "A") == "A"


def test_a_uuid_stands_for_one_content_per_tenant():
    names = UuidTable()
    names.bind(None, "cat", "1")
    names.bind(None, "cat", "1")
    assert names.find(None, "cat") == "1"
    assert names.find("tenant", "cat") is None
    names.bind("tenant", "cat", "2")
    for act in (names.bind, names.check):
        with pytest.raises(InputError, match="'cat' already stands for other content"):
            act(None, "cat", "2")


def test_the_least_recently_used_uuids_beyond_the_limit_are_forgotten():
    names = UuidTable(max_uuids=3)
    for name in ("a", "b", "c"):
        names.bind(None, name, name)
    names.find(None, "a")
    names.bind(None, "d", "d")
    assert [names.find(None, name) for name in ("a", "b", "c", "d")] == ["a", None, "c", "d"]
    names.bind(None, "b", "another")  # forgotten, so free again


def test_uuids_of_all_tenants_together_have_a_limit():
    names = UuidTable(max_uuids=100)
    names.bind("honest", "cat", "1")
    for i in range(1000):
        names.bind("greedy", str(i), "2")
    assert names.find("honest", "cat") == "1"
    assert names.find("greedy", "999") == "2"
    assert names._count == sum(map(len, names._tenants.values())) == 100
    for i in range(1000):
        names.bind(tenant_salt("rotating", str(i)), "cat", str(i))
    assert names.find("honest", "cat") == "1"
    assert names.find(tenant_salt("rotating", "999"), "cat") == "999"
    for i in range(5000):
        names.bind(f"tenant {i}" + "x" * 1000, "a", "3")
    assert names._count == sum(map(len, names._tenants.values())) <= 100
    assert len(names._tenants) <= 4096
    assert all(len(tenant) == 64 for tenant in names._tenants)
