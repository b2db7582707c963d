"""Rows stay while somebody reads them, are found by whoever comes later, and go when the room is needed."""

import pytest
from sensorium.engine.encoder_cache import EncoderCache
from sensorium.mm.errors import InputError

A, B, C = ("a", 0), ("b", 0), ("c", 0)


def resident(cache, key, rows, user):
    cache.hold(key, rows, user)
    return cache.read(key, user)


def test_rows_are_made_once_and_found_afterwards():
    cache = EncoderCache(10, 1)
    assert resident(cache, "h", 4, A) is False
    assert resident(cache, "h", 4, B) is True
    for user in (A, B, B):
        cache.computed("h", user)
    cache.release("h", A)
    cache.release("h", A)
    cache.release("h", B)
    assert "h" in cache
    assert cache.take_dropped() == ()
    for _ in range(3):  # it is interrupted twice
        assert resident(cache, "h", 4, C) is True
        cache.unread("h", C)
    assert cache.hits == 1
    assert resident(cache, "h", 4, C) is True
    cache.computed("h", C)
    assert (cache.hits, cache.misses, cache.evictions) == (2, 1, 0)


def test_only_what_nobody_reads_goes_the_oldest_first_and_only_when_it_must():
    cache = EncoderCache(10, 1)
    for key, user in (("a", A), ("b", B)):
        resident(cache, key, 4, user)
        cache.unread(key, user)
    assert cache.bytes == 8
    assert resident(cache, "c", 2, C) is False
    assert cache.take_dropped() == (), "there was room"
    cache.read("a", A)  # read again: now b is the oldest, c is being read
    cache.unread("a", A)
    assert resident(cache, "d", 4, ("d", 0)) is False
    assert cache.take_dropped() == ("b",)
    assert "a" in cache
    assert resident(cache, "e", 5, ("e", 0)) is None, "4 of d and 2 of c are being read: no room for 5"
    assert "a" in cache, "and nothing was dropped in vain"
    assert cache.evictions == 1


def test_bytes_are_counted_not_rows():
    cache = EncoderCache(100, 10)
    assert resident(cache, "h", 8, A) is False
    assert cache.bytes == 80
    with pytest.raises(InputError, match=r"item 0: its 11 encoder rows take 110 bytes, encoder_cache_bytes is 100"):
        cache.hold("big", 11, B)


def test_rows_made_again_are_not_dropped():
    cache = EncoderCache(4, 1)
    resident(cache, "h", 4, A)
    cache.unread("h", A)
    resident(cache, "other", 4, B)
    cache.unread("other", B)
    assert cache.read("h", A) is False
    assert cache.take_dropped() == ("other",)


def test_a_failed_item_is_not_resident():
    cache = EncoderCache(10, 1)
    resident(cache, "h", 4, A)
    cache.fail("h")
    assert "h" not in cache
    assert cache.bytes == 0
    cache.fail("unknown")
    assert cache.read("h", A) is False, "it can be tried again"


def test_one_hash_one_number_of_rows():
    cache = EncoderCache(10, 1)
    cache.hold("h", 4, A)
    with pytest.raises(InputError, match="4 encoder rows, here it has 5"):
        cache.hold("h", 5, B)
    cache.release("h", A)
    cache.hold("h", 5, B)
    assert cache.holders("h") == ["b"]
