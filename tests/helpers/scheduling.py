"""Fail the test that changes the scheduling class of a thread, as an encoder does that gives itself a real-time priority.

Threads inherit the class, and real-time threads that wait actively keep every other process of the machine from running.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def threads_changed() -> dict[int, int]:
    """Return the scheduling class of each thread of this process that has not the usual one, and give it the usual one."""
    changed = {}
    for thread in map(int, os.listdir("/proc/self/task")) if hasattr(os, "sched_getscheduler") else ():
        try:
            policy = os.sched_getscheduler(thread)
            if policy != os.SCHED_OTHER:
                changed[thread] = policy
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
        except ProcessLookupError:  # it has ended
            continue
    return changed


@pytest.fixture(autouse=True)
def keep_scheduling() -> Iterator[None]:
    yield
    if changed := threads_changed():
        pytest.fail(f"the test left threads in other scheduling classes (thread: class): {changed}", pytrace=False)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if something that outlives the tests, such as a fixture of the session, changed the class at its end."""
    if changed := threads_changed():
        print(f"\nthreads are left in other scheduling classes (thread: class): {changed}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
