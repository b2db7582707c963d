"""InputQueue: the order of prompts, which prompts may overtake others, and limits on running prompts and held bytes."""

import heapq
import random
import threading
import traceback
from concurrent.futures import Future
from functools import partial

import pytest
import torch
from sensorium.engine.frontend.input_processor import ParsedPrompt
from sensorium.engine.frontend.input_queue import InputQueue, QueueEntry, TenantHeaps
from sensorium.engine.frontend.processed_prompt import ProcessedPrompt
from sensorium.engine.frontend.prompts import Prompt
from sensorium.engine.scheduler.policy import SchedulingPolicy
from sensorium.mm.fields import BatchedField, FieldElem
from sensorium.mm.media.isolate import _interrupt
from sensorium.mm.media.ledger import MediaBudget
from sensorium.mm.media.policy import MediaPolicy
from sensorium.mm.tenants import tenant_salt
from sensorium.mm.types import ItemGeometry, MultiModalFeature, PlaceholderRange
from waiting import LONG, wait_until

NAMES = (None, "a", "b", "c")


def prepared(size):
    kwargs = {"pixels": FieldElem(torch.zeros(size, dtype=torch.uint8), BatchedField())}
    return ProcessedPrompt(
        None, (1,), (MultiModalFeature("image", kwargs, PlaceholderRange(0, 1), ItemGeometry(1, 1, 1), "h"),)
    )


class Media(ParsedPrompt):
    """Media of `size` bytes whose decoding waits for `gate`."""

    def __init__(self, queue, size=1, gate=None, fetches=(), provides="", requires="", salt=None):
        own = {
            "prompt": Prompt("", salt=salt),
            "ledger": MediaBudget(MediaPolicy()).open(),
            "queue": queue,
            "size": size,
            "gate": gate,
            "downloads": fetches,
            "provided": provides,
            "required": requires,
        }
        for name, value in own.items():
            object.__setattr__(self, name, value)

    remote = property(lambda self: bool(self.downloads))
    provided_uuids = property(lambda self: frozenset(self.provided))
    required_uuids = property(lambda self: frozenset(self.required))

    def fetch(self):
        return self.downloads

    def finish(self):
        with self.queue.lock:
            self.queue.now += 1
            self.queue.most = max(self.queue.most, self.queue.now)
        if self.gate is not None:
            assert self.gate.wait(LONG)
        with self.queue.lock:
            self.queue.now -= 1
        return prepared(self.size)


class Queue:
    """An input queue and its results, in order."""

    def __init__(self, window=8, workers=2, capacity=100):
        self.input_queue, self.out, self.results = InputQueue(window, workers, capacity, SchedulingPolicy()), [], {}
        self.lock, self.news, self.now, self.most = threading.Lock(), threading.Condition(), 0, 0

    def entry(self, name, work=None, priority=0, has_files=False, salt=None):
        def done(result):
            with self.news:
                self.out.append(name)
                self.results[name] = result
                self.news.notify_all()

        return QueueEntry(work or (lambda: ProcessedPrompt(name, (1,))), done, priority, has_files, salt)

    def add(self, *entries):
        self.input_queue.add(entries)
        return entries

    def media(self, name, **draft):
        return self.entry(name, lambda: Media(self, **draft), salt=draft.get("salt"))

    def wait(self, *names):
        with self.news:
            assert self.news.wait_for(lambda: set(names) <= set(self.out), LONG), (names, self.out)

    def settle(self):
        """Wait until all prompts are parsed and none is being processed."""
        input_queue = self.input_queue

        def settled():
            with input_queue._lock:
                return not any(input_queue._count[stage] for stage in ("waiting", "parsing", "processing"))

        wait_until(settled)


@pytest.fixture
def queue():
    queue = Queue()
    yield queue
    queue.input_queue.close()


def test_a_continued_batch_stays_behind_its_beginning():
    queue, gate, started = Queue(window=3), threading.Event(), []

    def work(name):
        def run():
            started.append(name)
            assert gate.wait(LONG)
            return ProcessedPrompt(name, (1,))

        return run

    def entries(name, count):
        return [queue.entry(f"{name}{i}", work(f"{name}{i}")) for i in range(count)]

    last = queue.input_queue.add(first := entries("first", 30))
    queue.input_queue.add(other := entries("other", 5))
    queue.input_queue.add(later := entries("later", 5), last)
    gate.set()
    everyone = [*first, *other, *later]
    for count in range(len(everyone)):
        wait_until(lambda: len(queue.out) > count)  # noqa: B023
        queue.input_queue.drop(*(entry for entry in everyone if entry.stage == "held"))
    order = [name for name in started if not name.startswith("other")]
    assert [name for name in order if name.startswith("later")] == order[-5:]
    assert started.index("other4") < started.index("first20"), "another batch takes turns with the first one"
    queue.input_queue.close()


def test_text_overtakes_slow_media(queue):
    gate = threading.Event()
    queue.add(*(queue.media(f"clip{i}", gate=gate) for i in range(4)), *(queue.entry(f"text{i}") for i in range(3)))
    queue.wait("text0", "text1", "text2")
    assert not any(name.startswith("clip") for name in queue.out)
    gate.set()
    queue.wait("clip0", "clip1", "clip2", "clip3")


def test_downloads_occupy_no_worker(queue):
    slow = [Future() for _ in range(6)]
    queue.add(*(queue.media(f"far{i}", fetches=(future,)) for i, future in enumerate(slow)), queue.media("near"))
    queue.wait("near")
    assert queue.out == ["near"]
    for future in slow:
        future.set_result(None)
    queue.wait(*(f"far{i}" for i in range(6)))
    assert queue.most <= 2, "the workers decoded them anyway"


def test_slow_downloads_hold_no_other_prompt_up():
    queue = Queue(window=4)
    far = [Future() for _ in range(100)]
    queue.add(*(queue.media(f"far{i}", fetches=(future,)) for i, future in enumerate(far)))
    queue.add(queue.entry("text"), queue.media("near"))
    queue.wait("text", "near")
    queue.input_queue.close()


def test_a_tenant_leaves_places_for_downloads_of_others():
    queue = Queue(window=4)
    busy = queue.add(*(queue.media(f"busy{i}", fetches=(Future(),), salt="busy") for i in range(40)))
    done = Future()
    (other,) = queue.add(queue.media("other", fetches=(done,), salt="other"))
    wait_until(lambda: other.stage == "fetching")
    wait_until(lambda: [entry.stage for entry in busy].count("fetching") >= 16)
    assert [entry.stage for entry in busy].count("fetching") == 16
    done.set_result(None)
    queue.wait("other")
    queue.input_queue.close()


def test_downloads_of_a_low_priority_are_in_the_background(queue):
    made = [Media(queue, fetches=(Future(),)) for _ in range(2)]
    entries = queue.add(*(queue.entry(i, lambda i=i: made[i], priority=i) for i in range(2)))
    wait_until(lambda: [entry.stage for entry in entries] == ["fetching"] * 2)
    assert [one.ledger.background for one in made] == [False, True]


def slow(queue, gate, name, salt=None, result=None):
    """Return an entry whose files take until `gate` to open."""

    def work():
        assert gate.wait(LONG)
        return result or ProcessedPrompt(name, (1,))

    return queue.entry(name, work, has_files=True, salt=salt)


def test_slow_files_delay_no_other_prompt(queue):
    gate = threading.Event()
    queue.add(*(slow(queue, gate, f"pdf{i}") for i in range(4)), *(queue.entry(f"text{i}") for i in range(3)))
    queue.wait("text0", "text1", "text2")
    assert len(queue.out) == 3
    gate.set()
    queue.wait(*(f"pdf{i}" for i in range(4)))


def test_slow_files_of_one_tenant_leave_a_thread_to_others(queue):
    gate, other = threading.Event(), threading.Event()
    other.set()
    queue.add(*(slow(queue, gate, f"mine{i}", "a") for i in range(4)), slow(queue, other, "theirs", "b"))
    queue.wait("theirs")
    assert queue.out == ["theirs"]
    gate.set()
    queue.wait(*(f"mine{i}" for i in range(4)))


def test_a_tenant_gets_no_more_places_by_changing_its_salt(queue):
    gate = threading.Event()
    queue.add(*(slow(queue, gate, f"mine{i}", tenant_salt("a", str(i))) for i in range(4)))
    other = slow(queue, gate, "theirs", "b")
    other.prepare = lambda: ProcessedPrompt("theirs", (1,))
    queue.add(other)
    queue.wait("theirs")
    assert queue.out == ["theirs"]
    busy = queue.add(*(queue.media(f"busy{i}", fetches=(Future(),), salt=tenant_salt("busy", str(i))) for i in range(40)))
    wait_until(lambda: [entry.stage for entry in busy].count("fetching") >= 16)
    queue.add(queue.entry("text"))
    queue.wait("text")
    assert [entry.stage for entry in busy].count("fetching") == 16
    gate.set()
    queue.wait(*(f"mine{i}" for i in range(4)))


def test_a_tenant_with_thousands_of_prompts_is_passed_over_at_once(queue, monkeypatch):
    """The work for each event does not grow with the prompts of a tenant that has no place."""
    gate, steps = threading.Event(), []
    busy = queue.add(*(slow(queue, gate, f"busy{i}", salt="busy") for i in range(5000)))
    for name in ("heappop", "heappush"):
        real = getattr(heapq, name)
        monkeypatch.setattr(heapq, name, lambda *args, real=real: steps.append(1) or real(*args))
    queue.add(queue.entry("text"))
    queue.wait("text")
    count = len(steps)
    queue.input_queue.drop(*busy)
    gate.set()
    assert 0 < count < 30


def test_tenants_take_turns_in_order():
    """Entries leave in order, without those that were dropped and those of tenants that may not start one."""
    chance, waiting, expected = random.Random(0), TenantHeaps("waiting"), []
    for number in range(300):
        entry = QueueEntry(lambda: ProcessedPrompt("", (1,)), lambda _: None, salt=chance.choice(NAMES))
        entry.order, entry.stage = (0, chance.randrange(1000), number), chance.choice(["waiting", "waiting", "gone"])
        waiting.push(entry)
        expected += [entry] if entry.stage == "waiting" else []
    assert {one for name in NAMES for one in waiting.entries_of(name)} == {*expected}
    for blocked in ("a", None, "b", "c", "other"):
        left = sorted((one for one in expected if one.owner != blocked), key=lambda one: one.order)[:60]
        assert [waiting.pop(lambda owner: owner != blocked) for _ in left] == left  # noqa: B023
        expected = [one for one in expected if one not in left]
    assert [one for name in NAMES for one in waiting.entries_of(name)] == expected == []
    assert waiting.pop(lambda _: True) is None


def test_a_prompt_that_is_dropped_while_its_files_are_opened_frees_its_thread(queue):
    started, opened = threading.Semaphore(0), list[str]()

    class Worker:
        """Stands for the process that opens a PDF."""

        def __init__(self):
            self.killed = threading.Event()

        kill = property(lambda self: self.killed.set)

    def work(name, worker):
        with _interrupt.get().watching(worker.kill):
            opened.append(name)
            started.release()
            assert worker.killed.wait(LONG)
        raise RuntimeError("killed")

    entries = queue.add(*(queue.entry(str(i), partial(work, str(i), Worker()), has_files=True) for i in range(5)))
    assert all(started.acquire(timeout=LONG) for _ in range(2))
    queue.input_queue.drop(*entries)
    queue.add(queue.entry("next", has_files=True))
    queue.wait("next")
    assert (queue.out, sorted(opened)) == (["next"], ["0", "1"])


def test_a_uuid_waits_for_earlier_files_that_are_not_opened_yet(queue):
    gate = threading.Event()
    queue.add(*(slow(queue, gate, f"pdf{i}") for i in range(2)), slow(queue, gate, "far", result=Media(queue, provides="a")))
    queue.add(queue.media("requires a", requires="a"), queue.media("other"))
    queue.wait("other")
    assert queue.out == ["other"]
    gate.set()
    queue.wait("far", "requires a")


def test_a_uuid_waits_for_no_files_with_another_salt(queue):
    gate = threading.Event()
    mine, theirs = tenant_salt("a", "x"), tenant_salt("a", "y")
    queue.add(*(slow(queue, gate, f"pdf{i}", salt) for i, salt in enumerate(("b", theirs, None, "b"))))
    queue.add(queue.media("uuid", requires=[(mine, "u")], salt=mine))
    queue.wait("uuid")
    assert queue.out == ["uuid"]
    gate.set()
    queue.wait(*(f"pdf{i}" for i in range(4)))


def test_a_uuid_without_data_waits_for_earlier_prompts_that_provide_it():
    """The prompt also waits for earlier prompts that are still being parsed, but not for later ones or for other uuids."""
    queue = Queue(window=20)
    gate, read, far = threading.Event(), threading.Event(), Future()

    def slowly():
        assert read.wait(LONG)
        return Media(queue, provides="b")

    queue.add(
        queue.media("a", gate=gate, provides="a"), queue.media("far", fetches=(far,), provides="c"), queue.entry("b", slowly)
    )
    queue.add(
        *(queue.media(f"requires {name}", requires=name) for name in "aabcx"), queue.media("late", provides="x", requires="")
    )
    queue.wait("late")
    assert queue.out == ["late"], "one that is read may give any name"
    read.set()
    queue.wait("b", "requires b", "requires x")
    assert set(queue.out) == {"late", "b", "requires b", "requires x"}
    far.set_exception(OSError("gone"))
    queue.wait("far", "requires c")
    assert "requires a" not in queue.out
    gate.set()
    queue.wait("requires a", "a")
    assert queue.out.index("a") < queue.out.index("requires a")
    queue.input_queue.close()


def test_a_small_batch_does_not_wait_for_a_large_one():
    queue = Queue(window=1)
    big = queue.add(*(queue.entry(f"a{i}") for i in range(50)))
    queue.wait("a0")
    queue.add(queue.entry("b"))
    queue.input_queue.drop(big[0])
    queue.wait("a1")
    queue.input_queue.drop(big[1])
    queue.wait("b")
    assert queue.out == ["a0", "a1", "b"]
    queue.input_queue.close()


def test_none_of_several_dropped_prompts_begins():
    queue = Queue(window=1)
    dropped = queue.add(*(queue.entry(f"a{i}") for i in range(50)))
    queue.wait("a0")
    queue.input_queue.drop(*dropped)
    queue.add(queue.entry("b"))
    queue.wait("b")
    assert queue.out == ["a0", "b"]
    queue.input_queue.close()


def test_a_smaller_priority_goes_first():
    queue = Queue(window=1)
    (first,) = queue.add(queue.entry("first"))
    queue.wait("first")
    entries = queue.add(queue.entry("late", priority=2), queue.entry("soon", priority=-1), queue.entry("then", priority=1))
    queue.input_queue.drop(first)
    queue.wait("soon")
    queue.input_queue.drop(entries[1])
    queue.wait("then")
    queue.input_queue.drop(entries[2])
    queue.wait("late")
    assert queue.out == ["first", "soon", "then", "late"]
    queue.input_queue.close()


def test_held_bytes_are_limited_and_one_prompt_always_runs():
    queue = Queue(window=20, capacity=100)
    entries = {f"clip{i}": queue.media(f"clip{i}", size=60) for i in range(6)}
    queue.add(*entries.values())
    queue.add(queue.media("huge", size=1000))
    queue.settle()
    assert 1 <= len(queue.out) <= 2, "one per worker, before their size is known"
    for name in queue.out[1:]:
        queue.input_queue.drop(entries.pop(name))
    while "huge" not in queue.out:
        assert queue.input_queue._bytes == 60, "two do not fit"
        (name,) = set(queue.out) & entries.keys()
        seen = len(queue.out)
        queue.input_queue.drop(entries.pop(name))
        with queue.news:
            assert queue.news.wait_for(lambda before=seen: len(queue.out) > before, LONG)
    assert queue.input_queue._bytes == 1000, "it was alone"
    queue.input_queue.close()


def test_bytes_of_prompt_embeds_hold_back_parsing():
    """Parsing alone gives a ProcessedPrompt with features for prompts of `prompt_embeds` only."""
    queue = Queue(window=20, capacity=100)
    both = threading.Barrier(2)  # of the first two: neither is held before the other is being parsed

    def parse(number):
        if number < 2:
            both.wait(LONG)
        return prepared(60)

    entries = queue.add(*(queue.entry(f"rows{i}", partial(parse, i)) for i in range(5)), queue.entry("text"))
    queue.wait("rows0", "rows1")
    wait_until(lambda: not queue.input_queue._count["parsing"])
    assert set(queue.out) == {"rows0", "rows1"}, "one per parser, before their size is known"
    queue.input_queue.drop(entries[0])
    assert not queue.input_queue._count["parsing"]
    assert len(queue.out) == 2, "two do not fit"
    for number, entry in enumerate(entries[1:5], 1):
        queue.wait(f"rows{number}")
        queue.input_queue.drop(entry)
    queue.wait("text")
    assert queue.input_queue._bytes == 0
    queue.input_queue.close()


def test_dropped_prompts_give_no_result(queue):
    gate = threading.Event()
    entries = queue.add(*(queue.media(f"clip{i}", gate=gate) for i in range(30)))
    for entry in entries[:-1]:
        queue.input_queue.drop(entry)
    gate.set()
    queue.wait("clip29")
    queue.input_queue._workers.shutdown(wait=True)
    assert queue.out == ["clip29"]
    queue.input_queue.drop(entries[-1])
    assert queue.input_queue.num_waiting == 0
    assert queue.input_queue._bytes == 0


def test_a_prompt_dropped_during_its_downloads_is_not_processed(queue):
    media = Media(queue, fetches=(Future(), Future()))
    (entry,) = queue.add(queue.entry("far", lambda: media))
    wait_until(lambda: entry.stage == "fetching")
    queue.input_queue.drop(entry)
    queue.settle()
    assert queue.most == 0
    assert media.ledger.closed
    assert all(download.cancelled() for download in media.downloads)


def test_errors_are_results(queue):
    def broken():
        raise ValueError("no such thing")

    queue.add(queue.entry("bad", broken), queue.entry("good"))
    queue.wait("bad", "good")
    assert isinstance(queue.results["bad"], ValueError)
    queue.input_queue.close()
    queue.add(queue.entry("late"))
    queue.wait("late")
    assert isinstance(queue.results["late"], RuntimeError)


def test_a_long_queue_does_not_recurse():
    """Each prompt is parsed and dropped while the queue starts the next one."""
    queue, depths, here = Queue(), [], _depth()

    def at_once(work):
        future = Future()
        future.set_result(work())
        return future

    def left(entry, result):
        depths.append(_depth())
        queue.input_queue.drop(entry)

    entries = [queue.entry(str(i)) for i in range(4000)]
    for entry in entries:
        entry.done = partial(left, entry)
    queue.input_queue._parsers.submit = at_once
    queue.add(*entries)
    assert len(depths) == 4000
    assert max(depths) < here + 30
    queue.input_queue.close()


def _depth():
    return sum(1 for _ in traceback.walk_stack(None))
