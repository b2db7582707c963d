"""Scheduling policies: the default, and "shortest_prompt_first" in the scheduler, the encoder core and the input queue."""

from dataclasses import replace
from inspect import getsource

import pytest
import torch
from sensorium import LLM
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import SCHEDULING_POLICIES, EngineConfig
from sensorium.engine.core.encoder_core import EncoderCore
from sensorium.engine.frontend.input_queue import InputQueue, QueueEntry
from sensorium.engine.scheduler import shortest_prompt_first
from sensorium.engine.scheduler.policy import POLICIES, SchedulingPolicy, Submitted, make_policy
from sensorium.engine.worker.encoder_store import EncoderStore

LENGTHS = {"long": 30, "middle": 12, "short": 4, "urgent": 40}


def ended(toy, policy, **options):
    """Return the order in which requests end that arrive together, one of them with a more urgent priority."""
    core = toy.make_core(policy=policy, **options)
    for i, (name, length) in enumerate(LENGTHS.items()):
        core.add(toy.random_prompt(name, length, i, 2, priority=-1 if name == "urgent" else 0))
    names = []
    while core.scheduler.requests:
        names += [output.request_id for output in core.step().outputs if output.finish_reason]
    toy.assert_empty(core)
    return names


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("fcfs", ["urgent", "long", "middle", "short"]),
        ("priority", ["urgent", "long", "middle", "short"]),
        ("shortest_prompt_first", ["urgent", "short", "middle", "long"]),
    ],
)
def test_order_of_answers(toy, policy, expected):
    assert ended(toy, policy, seqs=1) == expected
    assert ended(toy, policy, seqs=4, budget=8) == expected


@pytest.mark.parametrize("blocks", [16, 200])
def test_every_policy_gives_the_same_answers(toy, blocks):
    """With few blocks, sequences are preempted, some of them while they wait."""
    requests = [toy.random_prompt(f"r{i}", 3 + 7 * i % 30, i, 20) for i in range(8)]
    for policy in POLICIES:
        core = toy.make_core(policy=policy, blocks=blocks, budget=16)
        for request in requests:
            core.add(request)
        outputs = toy.drain(core)
        for request in requests:
            assert toy.tokens_of(outputs[request.request_id]) == toy.alone(request)[0]
        assert (core.stats.preemptions > 0) == (blocks == 16)
        toy.assert_empty(core)


def test_remaining_tokens_count_not_the_whole_prompt(toy):
    """A cached or continued prompt comes first, although it is the longest."""
    core = toy.make_core(policy="shortest_prompt_first", seqs=1)
    live = toy.random_prompt("live", 40, 0, 2, hold_open=True)
    core.add(live)
    toy.drain(core)
    core.add(toy.random_prompt("blocks", 10, 1, 2))
    core.step()
    core.add(toy.random_prompt("other", 8, 2, 2))
    core.append("live", [5, 6])
    names = []
    for _ in range(12):
        names += [output.request_id for output in core.step().outputs if output.finish_reason]
    assert names == ["blocks", "live", "other"]
    core.append("live", [5] * 20)  # it waits; more tokens move it behind
    core.abort("live")
    toy.assert_empty(core)


def test_a_waiting_sequence_that_grows_moves_back(toy):
    core = toy.make_core(policy="shortest_prompt_first", seqs=1)
    core.add(toy.random_prompt("first", 6, 0, 3))
    core.step()
    core.add(toy.random_prompt("grows", 4, 1, 2, hold_open=True))
    core.add(toy.random_prompt("stays", 8, 2, 2))
    core.append("grows", [7] * 10)
    assert [request.request_id for request in core.scheduler.waiting] == ["stays", "grows"]
    core.truncate("grows", 3)
    assert [request.request_id for request in core.scheduler.waiting] == ["grows", "stays"]


def test_victims():
    policy = make_policy("fcfs")
    works = [Submitted(priority, arrival) for arrival, priority in enumerate([0, 2, 1])]
    assert policy.victim([works[0]], works[1:], []) is works[0]
    assert policy.victim([], works[:2], works) is works[1]
    assert policy.victim([], [], works) is works[1]
    assert policy.victim([], [], []) is None
    assert policy.preempts(works[0], works[1])
    assert not policy.preempts(works[0], works[0])


def test_the_encoder_core_takes_the_smallest_request_first(toy):
    model = toy.ToyModel()
    store = EncoderStore((), "toy", model.row_size, torch.float64, torch.device("cpu"))
    config = EngineConfig("toy", scheduling_policy="shortest_prompt_first", max_encoder_tokens=1, device="cpu")
    core = EncoderCore(model, config, 100, store, ("image",))
    for name, rows in {"large": 9, "small": 2, "middle": 4}.items():
        core.add(toy.request(name, [toy.PAD] * rows, [toy.item(0, rows)]))
    assert [core.step().outputs[0].request_id for _ in range(3)] == ["small", "middle", "large"]


def test_the_input_queue_asks_the_policy():
    class LastFirst(SchedulingPolicy):
        def order(self, work):
            turn, number = work.arrival
            return -turn, number

    order = []
    queue = InputQueue(1, 1, 1 << 20, LastFirst())
    entries = [QueueEntry(lambda i=i: order.append(i), lambda result: None) for i in range(4)]
    blocker = QueueEntry(lambda: queue.add(entries), lambda result: None)
    queue.add([blocker])
    while queue.num_waiting or len(order) < 4:
        for entry in (blocker, *entries):
            if entry.stage == "held":
                queue.drop(entry)
    queue.close()
    assert order == [3, 2, 1, 0]


def test_options():
    assert tuple(POLICIES) == SCHEDULING_POLICIES
    assert type(make_policy("priority")) is type(make_policy("fcfs")) is SchedulingPolicy
    assert len(getsource(shortest_prompt_first).splitlines()) < 40
    with pytest.raises(ConfigError) as caught:
        EngineConfig("model", scheduling_policy="lifo")
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_config", "scheduling_policy")


def test_llm_takes_the_option():
    with LLM("tiny-vl", max_model_len=128, max_num_seqs=2, scheduling_policy="shortest_prompt_first") as llm:
        assert llm.generate("one two", use_tqdm=False)[0].error is None
        info = llm.engine.loop.core.info
        assert info.scheduling_policy == "shortest_prompt_first"
        assert replace(info, scheduling_policy="fcfs") != info
