from itertools import count

from sensorium.callers import pacing
from sensorium.callers.pacing import releasing_gil


def test_long_loops_rest_and_short_ones_do_not(monkeypatch):
    clock, rests = count(), []
    monkeypatch.setattr(pacing.time, "perf_counter", lambda: next(clock) * pacing._WORK_SECONDS / 2)
    monkeypatch.setattr(pacing.time, "sleep", rests.append)
    assert list(releasing_gil(range(2))) == [0, 1]
    assert not rests
    assert list(releasing_gil(range(9))) == list(range(9))
    assert rests
