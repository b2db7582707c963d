"""Async scheduling: steps that start before the tokens of the previous step are known."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ConfigError, InputError
from sensorium.engine.worker.staging import StagingBuffers


def started(core):
    """Record requests and first tokens of every step that the runner starts."""
    seen, execute_model = [], core.executor.runner.execute_model

    def look(output, after=None):
        seen.append(([(task.request_id, task.num_computed) for task in output.scheduled], after is not None))
        return execute_model(output, after)

    core.executor.runner.execute_model = look
    return seen


@pytest.mark.parametrize("chunk", [3, 500])
def test_answers_are_the_same_and_every_decode_step_starts_early(toy, chunk):
    rng = random.Random(3)
    requests = [toy.make_request(f"r{i}", rng, max_tokens=9, ignore_eos=True) for i in range(5)]
    core = toy.make_core(budget=chunk, async_scheduling=True)
    seen = started(core)
    for request in requests:
        core.add(request)
    got = toy.drain(core)
    for request in requests:
        assert (toy.tokens_of(got[request.request_id]), got[request.request_id][-1].finish_reason) == toy.alone(request)
    toy.assert_empty(core)
    early = [ahead for rows, ahead in seen if rows]
    assert core.stats.steps_ahead == sum(early)
    if chunk == 500:
        assert early == [False, False] + [True] * 8, "all but those of prompts, whose items come between, and none at the end"


def test_results_after_the_end_of_an_answer_are_dropped(toy):
    """The end of an answer is seen one step late; the row that was computed meanwhile is dropped."""
    rng = random.Random(5)
    request = toy.make_request("live", rng, hold_open=True, max_tokens=30)
    stop = toy.alone(toy.request("x", request.prompt_token_ids, request.features))[0][2]
    core = toy.make_core(async_scheduling=True)
    ends = toy.make_request("live", random.Random(5), hold_open=True, max_tokens=30, stop_token_ids=[stop], ignore_eos=True)
    core.add(ends)
    seen = started(core)
    tokens = toy.tokens_of(toy.drain(core)["live"])
    assert tokens[-1] == stop
    length = len(request.prompt_token_ids) + len(tokens)
    assert seen[-1] == ([("live", length - 1)], True), "the row after the last token was computed"
    core.append("live", [9, 8])
    fresh = toy.request("x", (*request.prompt_token_ids, *tokens, 9, 8), request.features)
    assert toy.tokens_of(toy.drain(core)["live"])[:4] == toy.alone(fresh)[0]
    core.abort("live")
    toy.assert_empty(core)


@pytest.mark.parametrize("change", ["abort", "truncate", "again"])
def test_changes_while_a_step_runs(toy, change):
    core = toy.make_core(async_scheduling=True)
    request = toy.request("r", [5, 6, 7, 8, 9, 10], hold_open=True)
    core.add(request)
    other = toy.request("other", [9, 9, 4])
    core.add(other)
    got = [output for _ in range(2) for output in core.step().outputs]
    core.abort("r") if change != "truncate" else core.truncate("r", 5)
    if change == "again":
        core.add(request)
    outputs = toy.drain(core)
    assert toy.tokens_of([o for o in got if o.request_id == "other"] + outputs["other"]) == toy.alone(other)[0]
    if change == "truncate":
        assert toy.tokens_of(outputs["r"]) == toy.alone(toy.request("x", [5, 6, 7, 8, 9]))[0]
    elif change == "again":
        assert toy.tokens_of(outputs["r"]) == toy.alone(request)[0]
    else:
        assert "r" not in outputs
    core.abort("r")
    toy.assert_empty(core)


def test_a_step_that_cannot_start_ends_only_its_sequences(toy):
    core = toy.make_core(async_scheduling=True)
    core.add(toy.request("first", [5, 6, 7]))
    execute_model = core.executor.runner.execute_model

    def broken(output, after=None):
        if after is not None:
            raise RuntimeError("no memory for a row more")
        return execute_model(output)

    core.executor.runner.execute_model = broken
    assert [output.error for output in core.step().outputs] == [None], "the step before is not touched by it"
    (failed,) = core.step().outputs
    assert "no memory for a row more" in failed.error.message
    core.executor.runner.execute_model = execute_model
    core.add(toy.request("second", [5, 6, 7]))
    assert toy.tokens_of(toy.drain(core)["second"]) == toy.alone(toy.request("x", [5, 6, 7]))[0]
    toy.assert_empty(core)


def test_a_refused_append_takes_no_token_from_an_answer(toy):
    core = toy.make_core(async_scheduling=True, max_len=60)
    requests = [toy.request("r", [5, 6, 7], hold_open=True), toy.request("other", [9, 9, 4])]
    for request in requests:
        core.add(request)
    got = [output for output in core.step().outputs if output.request_id == "r"]
    with pytest.raises(InputError, match="max_model_len is 60"):
        core.append("r", [5] * 60)
    got += toy.drain(core)["r"]
    assert toy.tokens_of(got) == toy.alone(requests[0])[0]


def test_an_interrupt_while_a_step_is_read_loses_no_token(toy):
    request = toy.make_request("r", random.Random(2), max_tokens=12, ignore_eos=True)
    core = toy.make_core(async_scheduling=True)
    core.add(request)
    got, execute_model = list(core.step().outputs), core.executor.runner.execute_model

    def interrupted(*arguments):
        launched = execute_model(*arguments)

        def collect():
            raise KeyboardInterrupt

        return replace(launched, get_output=collect)

    core.executor.runner.execute_model = interrupted
    got += core.step().outputs
    core.executor.runner.execute_model = execute_model
    with pytest.raises(KeyboardInterrupt):
        core.step()
    got += toy.drain(core)["r"]
    assert toy.tokens_of(got) == toy.alone(request)[0]


def test_steps_that_depend_on_tokens_do_not_start_early(toy):
    core = toy.make_core(async_scheduling=True, seqs=2)
    for name, options in {"plain": {}, "counts": {"repetition_penalty": 1.2}}.items():
        core.add(toy.make_request(name, random.Random(1), max_tokens=6, ignore_eos=True, **options))
    toy.drain(core)
    assert core.stats.steps_ahead == 0
    for i in range(3):  # one more than max_num_seqs: the last one waits until another ends
        core.add(toy.make_request(f"r{i}", random.Random(i), max_tokens=6, ignore_eos=True))
    toy.drain(core)
    assert core.stats.steps_ahead > 0


def test_answers_are_the_same_with_and_without_it(checkpoint):
    prompts = ["one two", "three four five six", "seven", "eight nine"]
    params = [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=["e"]),
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    ]
    found = []
    for early in (False, True):
        with LLM(checkpoint, dtype="float32", max_model_len=256, async_scheduling=early) as llm:
            found.append([(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in llm.generate(prompts, params)])
            assert (llm.stats.steps_ahead > 0) == early
    assert found[0] == found[1]


def test_the_option_is_yes_no_or_none(checkpoint):
    with pytest.raises(ConfigError, match="async_scheduling='yes' must be True, False or None"):
        LLM(checkpoint, async_scheduling="yes")


class Late:
    """A stream whose copies read their source as late as possible: when the caller waits for them."""

    def __init__(self):
        self.copies = []

    def event(self):
        return _Event(self)


class _Event:
    def __init__(self, stream):
        self.stream, self.until = stream, 0

    def record(self):
        self.until = len(self.stream.copies)

    def synchronize(self):
        for target, source in self.stream.copies[: self.until]:
            target.copy_(source)
        self.stream.copies[: self.until] = [(t, t) for t, _ in self.stream.copies[: self.until]]


def test_memory_is_not_written_while_it_is_read():
    stream = Late()

    class Device(StagingBuffers):
        def _send(self, pinned):
            target = torch.full_like(pinned, -7)
            stream.copies.append((target, pinned))
            return target

    staging = Device(torch.device("cpu"), lambda size: torch.zeros(size, dtype=torch.uint8), stream.event)
    rng = np.random.default_rng(0)
    sent = []
    for step in range(12):
        with staging:
            for _ in range(3):
                size = (int(rng.integers(0, 40_000 if step == 5 else 300)), 2)
                array = rng.integers(0, 1 << 30, size).astype(rng.choice([np.int64, np.int32]))
                sent.append((array.copy(), staging(array)))
                array[:] = -1  # the caller may reuse it
    for _ in range(2):
        with staging:
            pass
    for array, there in sent:
        assert np.array_equal(there.numpy(), array)
