"""Work that the step loop does not wait for: stop strings, observers and slow grammars."""

import threading
import time
from dataclasses import replace

import pytest
from sensorium.engine.frontend import request_handle
from sensorium.engine.frontend.output_processor import CompletionBuilder
from sensorium.engine.frontend.serve import serve
from sensorium.engine.sampling_params import SamplingParams
from toy_engine import ToyEngine
from waiting import LONG, hold_steps, wait_until

FREE = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def engine(toy):
    return ToyEngine(toy)


def stop_of(toy, prompt="hello"):
    """Return the text of an answer without stop strings, and two letters of it."""
    (full,) = ToyEngine(toy).texts([prompt], SamplingParams(**FREE))[0]
    return full, full[4:6]


def test_detokenising_runs_in_no_thread_of_the_loop(engine, toy, monkeypatch):
    _, stop = stop_of(toy)
    real, seen = CompletionBuilder.add, []

    def add(self, output):
        seen.append(threading.current_thread().name)
        return real(self, output)

    monkeypatch.setattr(CompletionBuilder, "add", add)
    engine.answers(["hello"], SamplingParams(**FREE, stop=stop))
    engine.answers(["hello"], SamplingParams(**FREE, logprobs=3))
    assert seen
    assert "sensorium-engine" not in seen


def test_a_slow_stop_string_does_not_delay_other_requests(engine, toy, monkeypatch):
    """While the output thread hangs, a stream without stop strings continues. The answer is still cut at the same place."""
    _, stop = stop_of(toy)
    expected = ToyEngine(toy).answers(["hello"], SamplingParams(**FREE, stop=stop))[0].outputs
    gate, real = threading.Event(), request_handle.RequestHandle.read

    def read(self):
        assert gate.wait(LONG)
        real(self)

    monkeypatch.setattr(request_handle.RequestHandle, "read", read)
    ended = []
    caller = threading.Thread(
        target=lambda: ended.extend(serve(engine.engine_loop, engine.requests(["hello"], SamplingParams(**FREE, stop=stop))))
    )
    begun = threading.Event()
    hold_steps(engine.core, begun.is_set)
    caller.start()
    wait_until(lambda: engine.engine_loop._owners)
    begun.set()
    other = dict(serve(engine.engine_loop, engine.requests(["other"], SamplingParams(**FREE))))
    assert len(other[0].outputs[0].token_ids) == FREE["max_tokens"]
    gate.set()
    caller.join(LONG)
    assert ended[0][1].outputs == expected
    toy.assert_empty(engine.core)


def test_the_inbox_stays_short_during_a_long_answer(toy):
    engine, longest = ToyEngine(toy), 0
    (handle,) = engine.requests(["hello"], SamplingParams(temperature=0.0, max_tokens=180, ignore_eos=True))
    step = engine.core.step

    def watched():
        nonlocal longest
        longest = max(longest, len(handle.answer.inbox))
        wait_until(lambda: not handle.answer.unread)
        return step()

    engine.core.step = watched
    dict(serve(engine.engine_loop, [handle]))
    assert 60 <= longest <= 66


def test_observers_run_beside_the_loop_and_before_the_caller_gets_the_output(engine):
    seen = []
    engine.engine_loop.observers.append(lambda output, times: (time.sleep(0.05), seen.append(threading.current_thread().name)))
    engine.answers(["hello", "you"])
    assert seen == ["sensorium-output"] * 2


def test_the_output_thread_ends_with_the_loop(engine, toy):
    _, stop = stop_of(toy)
    engine.answers(["hello"], SamplingParams(**FREE, stop=stop))
    thread = engine.engine_loop._output._thread
    assert thread.is_alive()
    engine.engine_loop.close()
    assert not thread.is_alive()


@pytest.mark.parametrize("late", [0, 1, 5])
def test_a_session_holds_only_the_tokens_of_its_answer(toy, late):
    """The loop may learn of the stop string some steps later."""
    full, stop = stop_of(toy)
    core = toy.make_core()
    request = toy.request("r", [ord(letter) - 27 for letter in "hello"], hold_open=True, params=SamplingParams(**FREE))
    core.add(request)
    tokens = list(request.prompt_token_ids)
    cut = len(tokens) + full.index(stop) + len(stop)
    while len(tokens) < cut + late:
        tokens += [token for output in core.step().outputs for token in output.token_ids]
    core.pause("r")
    core.truncate("r", cut)
    core.append("r", [50, 51])
    answer = toy.tokens_of(toy.drain(core)["r"])
    fresh = toy.make_core()
    fresh.add(toy.request("r", [*tokens[:cut], 50, 51], params=SamplingParams(**FREE)))
    assert answer == toy.tokens_of(toy.drain(fresh)["r"])


class SlowFactory:
    """Compiles when the gate opens; the grammar of "bad" fails."""

    def __init__(self):
        from concurrent.futures import Future

        self.future = Future()

    def begin(self, wanted, tenant=""):
        return self.future


def test_a_request_waits_for_its_grammar_outside_the_scheduler(toy):
    from sensorium.callers.errors import InputError
    from sensorium.engine.structured_outputs import StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]), **FREE)
    core = toy.make_core()
    core.executor.runner.grammars = factory = SlowFactory()
    core.info = replace(core.info, structured_outputs=True)
    core.add(toy.request("slow", [5, 6], params=params))
    core.add(toy.request("gone", [5, 6], params=params))
    with pytest.raises(InputError, match="already being served"):
        core.add(toy.request("slow", [5], params=params))
    core.add(toy.request("quick", [5, 6, 7]))
    outputs = [output for _ in range(6) for output in core.step().outputs]
    assert {output.request_id for output in outputs} == {"quick"}
    assert outputs[-1].finish_reason == "length"
    done = core.step()
    assert done.idle
    assert done.stats.waiting == 2
    core.abort("gone")
    factory.future.set_exception(InputError("structured_outputs.choice cannot be used"))
    (failed,) = core.step().outputs
    assert (failed.request_id, failed.finish_reason) == ("slow", "error")
    assert "cannot be used" in failed.error.message
    assert core.step().stats.waiting == 0
    toy.assert_empty(core)
