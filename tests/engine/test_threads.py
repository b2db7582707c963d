"""Each thread keeps its own number of torch's threads."""

import threading

import pytest
import torch
from sensorium.engine.threads import run_in_thread, use_threads
from waiting import LONG


def seen_in_a_thread(count, *, first):
    found = []

    def run():
        use_threads(count)
        first.set()
        last.wait(LONG)
        torch.ones(4096, 64).sum(0)
        found.append(torch.get_num_threads())

    last = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    return thread, last, found


def test_a_thread_keeps_its_number_of_threads():
    before, first = torch.get_num_threads(), threading.Event()
    try:
        loop, go_on, found = seen_in_a_thread(2, first=first)
        first.wait(LONG)
        worker = threading.Thread(target=use_threads, args=(1,))
        worker.start()
        worker.join()
        go_on.set()
        loop.join()
        assert found == [2]
    finally:
        use_threads(before)


def test_threads_that_start_later_are_not_affected():
    found = []
    threads = [threading.Thread(target=use_threads, args=(1,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [torch.get_num_threads()]


def test_work_run_in_thread_has_the_callers_number_and_its_errors():
    before = torch.get_num_threads()
    try:
        use_threads(2)
        other = threading.Thread(target=use_threads, args=(1,))
        other.start()
        other.join()
        assert run_in_thread(torch.get_num_threads) == 2
        threads = threading.enumerate()
        with pytest.raises(ZeroDivisionError):
            run_in_thread(lambda: 1 // 0)
        assert set(threading.enumerate()) <= set(threads)
    finally:
        use_threads(before)
