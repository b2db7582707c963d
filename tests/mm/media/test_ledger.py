"""Bytes of media: a limit per request, equal files read once, and downloads that wait for other requests."""

from __future__ import annotations

import base64
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from sensorium.callers.errors import InputError
from sensorium.mm.media.ledger import Ledger, MediaBudget
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.media.source import read
from waiting import LONG, wait_until

POLICY = MediaPolicy(max_request_bytes=100, max_total_bytes=150, max_request_seconds=60.0)


@pytest.fixture
def budget() -> MediaBudget:
    return MediaBudget(POLICY)


def test_a_request_over_its_limit_is_refused(budget: MediaBudget) -> None:
    with budget.open() as ledger:
        ledger.take(60)
        with pytest.raises(InputError, match=r"more than 100 bytes \(media: max_request_bytes\); send fewer"):
            ledger.take(41)
        ledger.take(40)
        assert budget.num_bytes == 100
    assert budget.num_bytes == 0


def test_equal_sources_are_read_once(tmp_path: Path, budget: MediaBudget) -> None:
    file, link, other = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    file.write_bytes(b"x" * 40)
    os.link(file, link)
    (tmp_path / "s").symlink_to(file)
    other.write_bytes(b"x" * 40)
    url = "data:image/png;base64," + base64.b64encode(b"y" * 10).decode()
    with budget.open() as ledger:
        first = read(file, "image", POLICY, ledger)
        assert all(read(path, "image", POLICY, ledger) is first for path in (str(file), link, tmp_path / "s"))
        assert budget.num_bytes == 40
        assert read(url, "image", POLICY, ledger) is read(str(url), "image", POLICY, ledger)
        assert budget.num_bytes == 50
        with pytest.raises(InputError, match="max_request_bytes"):
            read(b"z" * 60, "image", POLICY, ledger)
        assert read(other, "image", POLICY, ledger) is not first


def waiting(ledger: Ledger, size: int) -> tuple[threading.Thread, list[object]]:
    """Take bytes in a thread that waits for room; the list gets 1 or the error."""
    out: list[object] = []

    def run() -> None:
        try:
            ledger.start()
            ledger.take(size, wait=True)
            out.append(1)
        except InputError as error:
            out.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, out


def test_downloads_wait_for_requests_before_them_and_the_oldest_never_waits(budget: MediaBudget) -> None:
    oldest, second, third = (budget.open() for _ in range(3))
    for ledger in (oldest, second):
        ledger.take(70)
    blocked, result = waiting(third, 20)
    wait_until(lambda: third in budget.holders)
    assert not result
    oldest.take(30, wait=True)
    assert budget.num_bytes == 170
    oldest.close()
    blocked.join(LONG)
    assert result == [1]
    assert budget.num_bytes == 90


def test_large_requests_leave_room_for_small_ones() -> None:
    budget = MediaBudget(replace(POLICY, max_request_bytes=1000, max_total_bytes=1000))
    oldest, large, small = (budget.open() for _ in range(3))
    oldest.take(400, wait=True)
    large.take(300, wait=True)  # as much as stays free
    blocked, result = waiting(large, 1)
    wait_until(lambda: large.deadline is not None)
    small.take(150, wait=True)
    assert not result
    oldest.close()
    blocked.join(LONG)
    assert result == [1]


def test_requests_of_a_tenant_have_one_share() -> None:
    budget = MediaBudget(replace(POLICY, max_request_bytes=1000, max_total_bytes=1000))
    oldest, *many = (budget.open("busy") for _ in range(4))
    for ledger in (oldest, *many[:-1]):
        ledger.take(160, wait=True)
    blocked, result = waiting(many[-1], 160)
    wait_until(lambda: many[-1].deadline is not None)
    budget.open("other").take(160, wait=True)
    assert not result
    oldest.close()
    many[0].close()
    blocked.join(LONG)
    assert result == [1]


def test_requests_in_the_background_have_one_share() -> None:
    budget = MediaBudget(replace(POLICY, max_request_bytes=1000, max_total_bytes=1000))
    oldest, *many = (budget.open() for _ in range(4))
    for ledger in (oldest, *many):
        ledger.background = True
    for ledger in (oldest, *many[:-1]):
        ledger.take(160, wait=True)
    blocked, result = waiting(many[-1], 160)
    wait_until(lambda: many[-1].deadline is not None)
    for _ in range(2):
        budget.open().take(160, wait=True)
    assert not result
    oldest.close()
    many[0].close()
    blocked.join(LONG)
    assert result == [1]


def test_a_dropped_request_stops_waiting(budget: MediaBudget) -> None:
    oldest, second = budget.open(), budget.open()
    oldest.take(100)
    thread, result = waiting(second, 90)
    wait_until(lambda: second in budget.holders)
    second.close()
    thread.join(LONG)
    assert "its request has ended" in str(result[0])
    assert budget.holders == {oldest}


def test_waiting_has_an_end() -> None:
    budget = MediaBudget(replace(POLICY, max_request_seconds=0.05))
    oldest, second = budget.open(), budget.open()
    oldest.take(100)
    thread, result = waiting(second, 90)
    thread.join(LONG)
    (error,) = result
    assert isinstance(error, InputError)
    assert error.info.code == "overloaded"


def test_tensors_count_for_the_engine_but_not_for_the_request(budget: MediaBudget) -> None:
    with budget.open() as ledger:
        ledger.hold(1000)
        ledger.take(100)
        assert budget.num_bytes == 1100
    ledger.hold(1000)
    assert budget.num_bytes == 0


def test_decoded_bytes_count_while_an_item_is_processed(budget: MediaBudget) -> None:
    with budget.open() as oldest, budget.open() as other:
        oldest.take(10)
        with oldest.holding(145):
            thread, result = waiting(other, 20)
            wait_until(lambda: other.deadline is not None)
            assert (budget.num_bytes, result) == (155, [])
        thread.join(LONG)
        assert result == [1]
        assert budget.num_bytes == 30
