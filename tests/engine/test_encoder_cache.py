"""Rows stay for as long as somebody needs them, and are given back once."""

import pytest
from sensorium.engine.encoder_cache import EncoderCache
from sensorium.mm.errors import InputError


def test_an_entry_goes_with_its_last_user():
    cache = EncoderCache()
    for user in (("a", 0), ("a", 1), ("b", 0)):
        cache.acquire("h", 4, user)
    assert "h" not in cache
    cache.mark_encoded("h")
    assert "h" in cache
    cache.release("h", ("a", 0))
    cache.release("h", ("a", 0))
    cache.release("h", ("b", 0))
    assert "h" in cache
    assert cache.take_freed() == ()
    cache.release("h", ("a", 1))
    assert len(cache) == 0
    assert cache.take_freed() == ("h",)
    assert cache.take_freed() == ()


def test_rows_wanted_and_encoded_again_are_not_freed():
    cache = EncoderCache()
    cache.acquire("h", 4, ("a", 0))
    cache.mark_encoded("h")
    cache.release("h", ("a", 0))
    cache.acquire("h", 4, ("b", 0))
    assert "h" not in cache
    cache.mark_encoded("h")
    assert cache.take_freed() == ()


def test_a_failed_item_is_not_resident():
    cache = EncoderCache()
    cache.acquire("h", 4, ("a", 0))
    cache.mark_encoded("h")
    cache.mark_failed("h")
    assert "h" not in cache
    cache.mark_failed("unknown")


def test_one_hash_one_number_of_rows():
    cache = EncoderCache()
    cache.acquire("h", 4, ("a", 0))
    with pytest.raises(InputError, match="4 encoder rows, here it has 5"):
        cache.acquire("h", 5, ("b", 2))
