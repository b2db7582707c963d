"""Callers of EngineLoop: streams, threads, interrupts, failing steps, closing and forks."""

import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.engine.frontend import serve as serving
from sensorium.engine.frontend.request_handle import RequestHandle
from sensorium.engine.frontend.serve import serve
from sensorium.engine.sampling_params import SamplingParams
from toy_engine import PROMPTS, ToyEngine
from waiting import LONG, heard, hold_steps, wait_until


@pytest.fixture
def engine(toy):
    return ToyEngine(toy)


def test_streams_run_beside_a_batch(engine):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (expected,) = engine.texts(["stream me"], params)[0]
    taken = threading.Event()
    hold_steps(engine.core, lambda: taken.is_set() or heard(engine.engine_loop))
    stream = serve(engine.engine_loop, engine.requests(["stream me"], params), stream=True)
    first = next(stream)[1]
    taken.set()
    assert not first.finished
    batch = dict(serve(engine.engine_loop, engine.requests(PROMPTS, params)))  # these steps also serve the stream
    assert all(output.finished for output in batch.values())
    rest = [output for _, output in stream]
    assert rest[-1].finished
    assert rest[-1].outputs[0].text == expected
    assert engine.engine_loop.call(lambda engine_loop: torch.get_num_threads()).result() == torch.get_num_threads()
    texts = [first.outputs[0].text, *(output.outputs[0].text for output in rest)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    engine.toy.assert_empty(engine.core)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_closing_frees_everything(engine, toy, steps):
    stream = serve(engine.engine_loop, engine.requests(PROMPTS), stream=True)
    for _ in range(steps):
        next(stream, None)  # a slow consumer gets fewer outputs
    stream.close()
    toy.assert_empty(engine.core)
    assert engine.texts(["hello"]) == ToyEngine(toy).texts(["hello"])


@pytest.mark.parametrize("at", [1, 2, 4])
def test_ctrl_c_frees_everything(engine, toy, at):
    forward, calls = engine.core.executor.runner.model.forward, itertools.count(1)

    def interrupting(batch):
        if next(calls) == at:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.02)
        return forward(batch)

    engine.core.executor.runner.model.forward = interrupting
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            dict(serve(engine.engine_loop, engine.requests(PROMPTS)))
    finally:
        signal.signal(signal.SIGINT, before)
    toy.assert_empty(engine.core)
    assert engine.texts(PROMPTS) == ToyEngine(toy).texts(PROMPTS)


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_failing_step_ends_its_requests(engine, toy, at, error):
    forward, calls = engine.core.executor.runner.model.forward, itertools.count(1)

    def broken(batch):
        if next(calls) == at:
            raise error
        return forward(batch)

    engine.core.executor.runner.model.forward = broken
    failed = [output.error.message for output in engine.answers(PROMPTS) if output.error]
    assert failed
    assert all(error.__name__ in reason for reason in failed)
    assert engine.texts(PROMPTS) == ToyEngine(toy).texts(PROMPTS)


def test_callers_of_many_threads_take_turns(engine):
    """A small batch that is submitted later does not wait for all of a large one."""
    ended, asked = [], threading.Event()
    hold_steps(engine.core, lambda: len(ended) < 5 or asked.is_set())

    def ask(name, count):
        engine.engine_loop.submit(engine.requests(["a" * 9] * count), lambda news: ended.extend([name] * len(news)))

    thread = threading.Thread(target=ask, args=("much", 120))
    thread.start()
    wait_until(lambda: len(ended) >= 5)
    ask("little", 1)
    asked.set()
    wait_until(lambda: len(ended) == 121)
    thread.join()
    assert ended.index("little") < 80
    engine.engine_loop.call(lambda engine_loop: None).result()
    engine.toy.assert_empty(engine.core)


def test_many_requests_enter_in_blocks(engine, monkeypatch):
    """Each request holds dozens of objects, and every garbage collection, which stops all threads, looks at them."""
    monkeypatch.setattr(serving, "_MAX_SUBMITTED", 20)
    room = max(20, 4 * engine.core.info.max_num_seqs)
    made, most, left = 0, 0, set()

    def handles(params):
        nonlocal made, most
        for handle in engine.requests(["a"] * 300, params):
            made += 1
            left.add(handle)
            most = max(most, sum(one.input.params.n for one in left))
            yield handle

    for params in (SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, n=3)):
        left.clear()
        found = []
        for index, output in serve(engine.engine_loop, handles(params)):
            left -= {handle for handle in left if handle.number >= 0 and handle.answer.closed}
            found.append(index)
            assert output.error is None
        assert sorted(found) == list(range(300))
        assert most < room + 3
    engine.toy.assert_empty(engine.core)


def test_a_sequence_of_many_requests_enters_by_priority(engine, monkeypatch):
    monkeypatch.setattr(serving, "_MAX_SUBMITTED", 1)
    room = 4 * engine.core.info.max_num_seqs
    handles = engine.requests(["a"] * 5 * room)
    for number, handle in enumerate(handles):
        handle.input = replace(handle.input, priority=-number)
    order = [index for index, _ in serve(engine.engine_loop, handles)]
    assert sorted(order) == list(range(5 * room))
    assert set(order[: room // 2]) <= set(range(4 * room, 5 * room)), "the last have the smallest priority"
    handles = engine.requests(["a"] * 5 * room)
    for handle in handles[0], handles[-1]:
        handle.input = replace(handle.input, request_id="same")
    with pytest.raises(InputError, match="in use"):
        next(serve(engine.engine_loop, handles))
    engine.toy.assert_empty(engine.core)


def test_the_thread_ends_with_the_loop(engine, toy):
    engine.answers(PROMPTS)
    thread = engine.engine_loop._thread
    assert thread.is_alive()
    engine.engine_loop = None
    gc.collect()
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_closed_loop_refuses_requests_and_ends_those_it_has(engine, toy):
    hold_steps(engine.core, lambda: engine.engine_loop.closed)
    ended = []
    jobs = engine.requests(["hello"] * 20, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    thread = threading.Thread(target=lambda: ended.extend(serve(engine.engine_loop, jobs)))
    thread.start()
    wait_until(lambda: engine.core.scheduler.requests)
    engine.engine_loop.close()
    thread.join(LONG)
    assert len(ended) == 20
    assert all("closed" in output.error.message for _, output in ended)
    with pytest.raises(InputError, match="closed"):
        dict(serve(engine.engine_loop, engine.requests(["hello"])))
    engine.engine_loop.close()
    toy.assert_empty(engine.core)


@pytest.mark.parametrize("end", ["", "del llm, stream", "os._exit(0) if os.fork() == 0 else os.wait()", "raise SystemExit(0)"])
def test_a_process_ends_while_the_engine_computes(end):
    model = Path(__file__).parents[3] / "assets" / "tiny-vl"
    program = f"""
import os, warnings
warnings.simplefilter("ignore")
from sensorium import LLM, SamplingParams
llm = LLM({str(model)!r}, max_model_len=512)
stream = llm.stream("user 1 moves left", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True))
next(stream)
print("running", flush=True)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "running\n", "")


def test_a_forked_process_must_make_its_own_engine(engine):
    engine.answers(["hello"])
    engine.engine_loop.process += 1
    with pytest.raises(InputError, match="another process"):
        dict(serve(engine.engine_loop, engine.requests(["hello"])))
    engine.engine_loop.process -= 1


def test_a_large_batch_does_not_hold_the_lock_while_it_is_prepared(engine, monkeypatch):
    register, lock, taken = RequestHandle.register, engine.engine_loop._lock, []

    def take() -> None:
        taken.append(lock.acquire(timeout=10))
        lock.release()

    def registering(self, *arguments):
        other = threading.Thread(target=take)
        other.start()
        other.join()
        register(self, *arguments)

    monkeypatch.setattr(RequestHandle, "register", registering)
    engine.texts(["a", "b"])
    assert taken == [True, True]


def test_an_id_that_is_taken_while_a_batch_is_prepared_is_refused(engine, monkeypatch):
    register, (other,) = RequestHandle.register, engine.requests(["b"])
    other.input = replace(other.input, request_id="same")

    def registering(self, *arguments):
        monkeypatch.setattr(RequestHandle, "register", register)
        engine.engine_loop.submit([other], lambda handles: None)
        register(self, *arguments)

    monkeypatch.setattr(RequestHandle, "register", registering)
    (handle,) = engine.requests(["a"])
    handle.input = replace(handle.input, request_id="same")
    hold_steps(engine.core, lambda: handle.number >= 0)
    with pytest.raises(InputError, match="request_id 'same' is in use"):
        engine.engine_loop.submit([handle], lambda handles: None)
    wait_until(lambda: not engine.engine_loop._names)


def test_requests_that_are_dropped_together_are_not_prepared(engine):
    window, dropping, prepared = 2 * engine.core.info.max_num_seqs, threading.Event(), []
    handles = engine.requests(["hello"] * (window + 20), SamplingParams(max_tokens=20, ignore_eos=True))
    for handle in handles:
        prepare = handle.input.prepare
        handle.input = replace(handle.input, prepare=lambda prepare=prepare: prepared.append(1) or prepare())
    hold_steps(engine.core, dropping.is_set)
    engine.engine_loop.submit(handles, lambda handles: None)
    wait_until(lambda: engine.engine_loop.input_queue._count["held"] == window)
    dropped = engine.engine_loop.call(lambda engine_loop: engine_loop.drop_now(*handles))
    dropping.set()
    dropped.result()
    assert len(prepared) == window
    engine.toy.assert_empty(engine.core)
