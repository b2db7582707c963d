"""EncoderCache: rows stay while they are pinned, later sequences find them, and they are evicted when room is needed."""

import pytest
from sensorium.callers.errors import InputError
from sensorium.engine.scheduler.encoder_cache import EncoderCache, PinResult

A, B, C = ("a", 0), ("b", 0), ("c", 0)


def register_and_pin(cache, key, rows, user):
    cache.register(key, rows, user)
    return cache.pin(key, user)


def test_rows_are_encoded_once_and_found_by_later_sequences():
    cache = EncoderCache(10, 1)
    assert register_and_pin(cache, "h", 4, A) is PinResult.TO_ENCODE
    assert register_and_pin(cache, "h", 4, B) is PinResult.RESIDENT
    for user in (A, B, B):
        cache.mark_computed("h", user)
    cache.unregister("h", A)
    cache.unregister("h", A)
    cache.unregister("h", B)
    assert "h" in cache
    assert cache.take_freed() == ()
    for _ in range(3):  # the sequence is preempted each time
        assert register_and_pin(cache, "h", 4, C) is PinResult.RESIDENT
        cache.unpin("h", C)
    assert cache.hits == 1
    assert register_and_pin(cache, "h", 4, C) is PinResult.RESIDENT
    cache.mark_computed("h", C)
    assert (cache.hits, cache.misses, cache.evictions) == (2, 1, 0)


def test_unpinned_rows_are_evicted_oldest_first_and_only_when_needed():
    cache = EncoderCache(10, 1)
    for key, user in (("a", A), ("b", B)):
        register_and_pin(cache, key, 4, user)
        cache.unpin(key, user)
    assert cache.bytes == 8
    assert register_and_pin(cache, "c", 2, C) is PinResult.TO_ENCODE
    assert cache.take_freed() == (), "there was room"
    cache.pin("a", A)  # now b is the least recently used, and c is pinned
    cache.unpin("a", A)
    assert register_and_pin(cache, "d", 4, ("d", 0)) is PinResult.TO_ENCODE
    assert cache.take_freed() == ("b",)
    assert "a" in cache
    assert register_and_pin(cache, "e", 5, ("e", 0)) is PinResult.NO_ROOM, "4 rows of d and 2 of c are pinned: no room for 5"
    assert "a" in cache, "nothing was evicted in vain"
    assert cache.evictions == 1


def test_the_capacity_is_in_bytes():
    cache = EncoderCache(100, 10)
    assert register_and_pin(cache, "h", 8, A) is PinResult.TO_ENCODE
    assert cache.bytes == 80
    with pytest.raises(InputError, match=r"its 11 encoder rows take 110 bytes, but encoder_cache_bytes is 100"):
        cache.register("big", 11, B)


def test_rows_encoded_again_are_not_reported_as_freed():
    cache = EncoderCache(4, 1)
    register_and_pin(cache, "h", 4, A)
    cache.unpin("h", A)
    register_and_pin(cache, "other", 4, B)
    cache.unpin("other", B)
    assert cache.pin("h", A) is PinResult.TO_ENCODE
    assert cache.take_freed() == ("other",)


def test_a_discarded_item_is_not_resident_and_can_be_tried_again():
    cache = EncoderCache(10, 1)
    register_and_pin(cache, "h", 4, A)
    cache.discard("h")
    assert "h" not in cache
    assert cache.bytes == 0
    cache.discard("unknown")
    assert cache.pin("h", A) is PinResult.TO_ENCODE, "it can be tried again"


def test_a_hash_stands_for_one_number_of_rows():
    cache = EncoderCache(10, 1)
    cache.register("h", 4, A)
    with pytest.raises(InputError, match="4 encoder rows"):
        cache.register("h", 5, B)
    cache.unregister("h", A)
    cache.register("h", 5, B)
    assert cache.users_of("h") == ["b"]
