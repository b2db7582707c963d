"""Prompts in line: who goes first, who may pass whom, and how much is under way and held at once."""

import threading
import time
import traceback
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from sensorium.engine.feeder import Entry, Feeder
from sensorium.engine.input import Prepared, Unfinished
from sensorium.mm.fields import BatchedField, FieldElem
from sensorium.mm.types import ItemGeometry, MultiModalFeature, PlaceholderRange
from waiting import wait_until


def prepared(size):
    kwargs = {"pixels": FieldElem(torch.zeros(size, dtype=torch.uint8), BatchedField())}
    return Prepared(None, (1,), (MultiModalFeature("image", kwargs, PlaceholderRange(0, 1), ItemGeometry(1, 1, 1), "h"),))


class Draft(Unfinished):
    """Media of `size` bytes whose decoding takes until `gate` opens."""

    def __init__(self, line, size=1, gate=None, fetches=(), gives="", asks=""):
        own = {"line": line, "size": size, "gate": gate, "waits": fetches, "given_names": gives, "asked_names": asks}
        for name, value in own.items():
            object.__setattr__(self, name, value)

    remote = property(lambda self: bool(self.waits))
    gives = property(lambda self: frozenset(self.given_names))
    asks = property(lambda self: frozenset(self.asked_names))

    def fetch(self):
        return self.waits

    def finish(self):
        with self.line.lock:
            self.line.now += 1
            self.line.most = max(self.line.most, self.line.now)
        if self.gate is not None:
            assert self.gate.wait(60)
        with self.line.lock:
            self.line.now -= 1
        return prepared(self.size)


class Line:
    """A feeder and what came out of it, in order."""

    def __init__(self, window=8, workers=2, capacity=100):
        self.feeder, self.out, self.results = Feeder(window, workers, capacity), [], {}
        self.lock, self.news, self.now, self.most = threading.Lock(), threading.Condition(), 0, 0

    def entry(self, name, work=None, priority=0):
        def done(result):
            with self.news:
                self.out.append(name)
                self.results[name] = result
                self.news.notify_all()

        return Entry(work or (lambda: Prepared(name, (1,))), done, priority)

    def add(self, *entries):
        self.feeder.add(entries)
        return entries

    def media(self, name, **draft):
        return self.entry(name, lambda: Draft(self, **draft))

    def wait(self, *names):
        with self.news:
            assert self.news.wait_for(lambda: set(names) <= set(self.out), 60), (names, self.out)

    def settle(self):
        """Until nothing more is done by itself: all are read, and none is being decoded."""
        feeder = self.feeder

        def settled():
            with feeder._lock:
                return not any(feeder._count[stage] for stage in ("coming", "reading", "decoding"))

        wait_until(settled)


@pytest.fixture
def line():
    line = Line()
    yield line
    line.feeder.close()


def test_text_passes_slow_media(line):
    gate = threading.Event()
    line.add(*(line.media(f"clip{i}", gate=gate) for i in range(4)), *(line.entry(f"text{i}") for i in range(3)))
    line.wait("text0", "text1", "text2")
    assert not any(name.startswith("clip") for name in line.out)
    gate.set()
    line.wait("clip0", "clip1", "clip2", "clip3")


def test_downloads_keep_no_worker(line):
    slow = [Future() for _ in range(6)]
    line.add(*(line.media(f"far{i}", fetches=(future,)) for i, future in enumerate(slow)), line.media("near"))
    line.wait("near")
    assert line.out == ["near"]
    for future in slow:
        future.set_result(None)
    line.wait(*(f"far{i}" for i in range(6)))
    assert line.most <= 2, "they were decoded by the workers all the same"


def test_who_names_content_waits_for_those_before_that_give_it():
    """Also while they are only read; nobody waits for those that come after, or that give something else."""
    line = Line(window=20)
    gate, read, far = threading.Event(), threading.Event(), Future()

    def slowly():
        assert read.wait(60)
        return Draft(line, gives="b")

    line.add(line.media("a", gate=gate, gives="a"), line.media("far", fetches=(far,), gives="c"), line.entry("b", slowly))
    line.add(*(line.media(f"asks {name}", asks=name) for name in "aabcx"), line.media("late", gives="x", asks=""))
    line.wait("late")
    assert line.out == ["late"], "one that is read may give any name"
    read.set()
    line.wait("b", "asks b", "asks x")
    assert set(line.out) == {"late", "b", "asks b", "asks x"}
    far.set_exception(OSError("gone"))
    line.wait("far", "asks c")
    assert "asks a" not in line.out
    gate.set()
    line.wait("asks a", "a")
    assert line.out.index("a") < line.out.index("asks a")
    line.feeder.close()


def test_who_asks_for_little_comes_in_between():
    line = Line(window=1)
    big = line.add(*(line.entry(f"a{i}") for i in range(50)))
    line.wait("a0")
    line.add(line.entry("b"))
    line.feeder.drop(big[0])
    line.wait("a1")
    line.feeder.drop(big[1])
    line.wait("b")
    assert line.out == ["a0", "a1", "b"]
    line.feeder.close()


def test_a_smaller_priority_goes_first():
    line = Line(window=1)
    (first,) = line.add(line.entry("first"))
    line.wait("first")
    entries = line.add(line.entry("late", priority=2), line.entry("soon", priority=-1), line.entry("then", priority=1))
    line.feeder.drop(first)
    line.wait("soon")
    line.feeder.drop(entries[1])
    line.wait("then")
    line.feeder.drop(entries[2])
    line.wait("late")
    assert line.out == ["first", "soon", "then", "late"]
    line.feeder.close()


def test_bytes_held_are_bounded_and_one_always_goes():
    line = Line(window=20, capacity=100)
    entries = {f"clip{i}": line.media(f"clip{i}", size=60) for i in range(6)}
    line.add(*entries.values())
    line.add(line.media("huge", size=1000))
    line.settle()
    assert 1 <= len(line.out) <= 2, "one per worker, before their size is known"
    for name in line.out[1:]:
        line.feeder.drop(entries.pop(name))
    while "huge" not in line.out:
        assert line.feeder._bytes == 60, "two do not fit"
        (name,) = set(line.out) & entries.keys()
        seen = len(line.out)
        line.feeder.drop(entries.pop(name))
        with line.news:
            assert line.news.wait_for(lambda before=seen: len(line.out) > before, 60)
    assert line.feeder._bytes == 1000, "it was alone"
    line.feeder.close()


def test_what_is_dropped_is_never_heard_of(line):
    gate = threading.Event()
    entries = line.add(*(line.media(f"clip{i}", gate=gate) for i in range(30)))
    for entry in entries[:-1]:
        line.feeder.drop(entry)
    gate.set()
    line.wait("clip29")
    time.sleep(0.05)
    assert line.out == ["clip29"]
    line.feeder.drop(entries[-1])
    assert line.feeder.num_waiting == 0
    assert line.feeder._bytes == 0


def test_errors_are_results(line):
    def broken():
        raise ValueError("no such thing")

    line.add(line.entry("bad", broken), line.entry("good"))
    line.wait("bad", "good")
    assert isinstance(line.results["bad"], ValueError)
    line.feeder.close()
    line.add(line.entry("late"))
    line.wait("late")
    assert isinstance(line.results["late"], RuntimeError)


def test_a_long_line_is_no_deep_stack():
    """Also when each prompt is read before the feeder has looked away, and left the engine at once."""
    line, depths, here = Line(), [], _depth()

    def at_once(work):
        future = Future()
        future.set_result(work())
        return future

    def left(entry, result):
        depths.append(_depth())
        line.feeder.drop(entry)

    entries = [line.entry(str(i)) for i in range(4000)]
    for entry in entries:
        entry.done = partial(left, entry)
    line.feeder._readers.submit = at_once
    line.add(*entries)
    assert len(depths) == 4000
    assert max(depths) < here + 30
    line.feeder.close()


def _depth():
    return sum(1 for _ in traceback.walk_stack(None))
