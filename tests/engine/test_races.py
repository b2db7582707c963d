"""Races between callers, the loop and a dying core, held open by gates: no caller waits forever or ends another's request."""

import os
import signal
import threading
from pathlib import Path

import pytest
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import InputError
from waiting import LONG as LONG_WAIT
from waiting import hold_first_step, hold_steps, wait_until

MODEL = Path(__file__).parents[2] / "assets" / "tiny-vl"
LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm():
    with LLM(MODEL, max_model_len=512, max_num_seqs=4) as made:
        yield made


def close(llm, loop, gate):
    closer = threading.Thread(target=llm.close, daemon=True)
    closer.start()
    wait_until(lambda: loop.closed)
    gate.set()
    closer.join(LONG_WAIT)
    assert not closer.is_alive()


def bug_in_a_command(llm, loop, gate):
    def bug(_):
        raise ValueError("a bug")

    loop.send(bug)
    gate.set()


def caller_that_is_gone(llm, loop, gate):
    def gone(_):
        raise RuntimeError("Event loop is closed")

    handle = next(iter(loop._owners.values()))
    handle.post = gone
    loop._to_notify.add(handle)
    gate.set()


@pytest.mark.parametrize("event", [close, bug_in_a_command, caller_that_is_gone])
def test_a_core_that_died_before_another_event_leaves_no_caller_waiting(event):
    llm = LLM(MODEL, max_model_len=512, max_num_seqs=4, engine_process=True)
    loop, found, gate, held = llm.engine.loop, [], threading.Event(), threading.Event()
    ask = lambda: found.extend(llm.generate(["a " * 20], LONG, use_tqdm=False))  # noqa: E731
    callers = [threading.Thread(daemon=True, target=ask) for _ in range(3)]
    notify = loop._notify

    def hold():
        if len(loop._owners) == 3 and not gate.is_set():
            held.set()
            gate.wait(LONG_WAIT)
        notify()

    loop._notify = hold
    hold_first_step(loop, 3)
    for caller in callers:
        caller.start()
    assert held.wait(LONG_WAIT)
    os.kill(loop.core.pid, signal.SIGKILL)
    event(llm, loop, gate)
    lost = event is caller_that_is_gone  # its own thread still waits; a coroutine of a closed event loop would not
    wait_until(lambda: sum(caller.is_alive() for caller in callers) <= lost)
    assert all(output.error is not None for output in found)
    llm.close()


def submitted(llm, params, loop):
    handle = llm.request("user 1 moves", params, request_id="x")
    loop.submit([handle], lambda _: None)
    return handle


@pytest.mark.parametrize("late", ["stop string", "drop"])
def test_a_late_message_does_not_end_the_next_request_of_the_same_id(llm, late):
    loop, said = llm.engine.loop, threading.Event()
    (known,) = llm.generate("user 1 moves", SHORT, use_tqdm=False)
    stop = [known.outputs[0].text[0]] if late == "stop string" else None
    loop._output.put = lambda *_: None  # an output thread that is late
    first = submitted(llm, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, stop=stop), loop)
    wait_until(lambda: first.answer.closed and "x" not in loop._names)
    hold_steps(loop.core, said.is_set)
    second = submitted(llm, SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True), loop)
    wait_until(lambda: "x.0" in loop._owners)
    if late == "drop":
        loop.drop(first)
    else:
        first.take()  # the caller finds the stop string and says so
    said.set()
    wait_until(lambda: second.answer.closed)
    assert second.take().outputs[0].finish_reason == "length"


def test_a_cancelled_call_ends_no_request(llm):
    loop, found, gate = llm.engine.loop, [], threading.Event()
    caller = threading.Thread(target=lambda: found.extend(llm.generate(["a b c"], LONG, use_tqdm=False)), daemon=True)
    hold_steps(loop.core, gate.is_set)
    caller.start()
    wait_until(lambda: loop._owners)
    assert loop.call(lambda engine_loop: engine_loop.abort("nobody")).cancel()
    gate.set()
    caller.join(LONG_WAIT)
    assert found[0].error is None


def test_callers_are_refused_while_the_engine_goes_to_sleep(llm):
    loop, begun, gate = llm.engine.loop, threading.Event(), threading.Event()
    sleep = loop.core.sleep

    def slowly():
        begun.set()
        assert gate.wait(LONG_WAIT)
        sleep()

    loop.core.sleep = slowly
    asleep = loop.sleep()
    assert begun.wait(LONG_WAIT)
    with pytest.raises(InputError, match="asleep"):
        llm.generate("user 1", SHORT, use_tqdm=False)
    gate.set()
    asleep.result(LONG_WAIT)
    llm.wake_up()
    loop.core.sleep = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        llm.sleep()
    assert llm.generate("user 1", SHORT, use_tqdm=False)[0].error is None


def test_each_turn_of_a_live_session_is_observed_once(llm):
    loop, seen, slow, began = llm.engine.loop, [], threading.Event(), threading.Event()
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)

    def first_is_slow(output, times):
        if not began.is_set():
            began.set()
            slow.wait(LONG_WAIT)
        seen.append(times.ended)

    loop.observers.append(first_is_slow)
    other = threading.Thread(target=lambda: llm.generate("x", params, use_tqdm=False), daemon=True)
    other.start()
    assert began.wait(LONG_WAIT)
    session = llm.live("user 1 moves left", params)
    wait_until(
        lambda: session._handle.answer.closed
    )  # the first token's notification is there, the last one waits for observers
    session.answer()
    session.append(" more")
    slow.set()
    session.answer()
    other.join(LONG_WAIT)
    wait_until(lambda: len(seen) == 3)
    assert len(set(seen)) == 3
