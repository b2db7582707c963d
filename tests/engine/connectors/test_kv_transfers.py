"""KV blocks that leave the KV cache and come back: the same tokens, whatever the connectors do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from kv_connectors import Faulty, make_store, play_histories, random_histories, run, stats_of
from sensorium.engine.connectors.disk import DiskConnector
from sensorium.engine.connectors.memory import MemoryConnector
from sensorium.engine.connectors.peer import PeerConnector
from sensorium.engine.connectors.peer_server import PeerServer
from sensorium.mm.fields import BatchedField, FieldElem

MODELS = {
    "full": {},
    "cross": {"reads_encoder_side": True},
    "window": {"window": 9},
    "chunk": {"chunk": 8},
    "states": {"states": True},
}


def test_a_prefix_that_was_evicted_comes_back_from_memory(toy):
    store = make_store()
    core = toy.make_core(blocks=20, kv_store=store)
    first = toy.random_prompt("a", 40, seed=1)
    answer, cached = run(toy, core, first)
    assert cached == 0
    for seed in range(2, 5):  # they take its blocks
        run(toy, core, toy.random_prompt(str(seed), 60, seed=seed))
    store.flush()
    again, cached = run(toy, core, replace(first, request_id="b"))
    assert again == answer == toy.alone(first)[0]
    assert cached == 36  # all full blocks before the last token
    assert stats_of(store).hits == 9
    toy.assert_empty(core)


@pytest.mark.parametrize("kind", MODELS)
def test_another_engine_reads_what_one_has_computed(toy, tmp_path, kind):
    prompts = [toy.make_request(f"r{i}", random.Random(i), max_tokens=9, ignore_eos=True) for i in range(6)]
    if kind == "cross":
        prompts = [replace(prompt, features=(), cross=(toy.item(0, 5, i),)) for i, prompt in enumerate(prompts)]
    prompts = [replace(prompt, prompt_token_ids=prompt.prompt_token_ids + tuple(range(4, 30))) for prompt in prompts]
    model = toy.ToyModel(**MODELS[kind])
    expected = [toy.alone(prompt, model=model)[0] for prompt in prompts]
    producer = make_store(DiskConnector(tmp_path, 1 << 24))
    core = toy.make_core(model=model, kv_store=producer)
    assert [run(toy, core, prompt)[0] for prompt in prompts] == expected
    producer.close()
    consumer = make_store(DiskConnector(tmp_path, 1 << 24))
    core = toy.make_core(model=model, kv_store=consumer)
    results = [run(toy, core, prompt) for prompt in prompts]
    assert [tokens for tokens, _ in results] == expected
    assert all(cached > 0 for _, cached in results)
    assert stats_of(consumer, "disk").damaged == 0


def test_preempted_sequences_get_their_blocks_back(toy):
    prompts = [toy.random_prompt(str(i), 24, seed=i, max_tokens=20) for i in range(4)]
    store = make_store()
    core = toy.make_core(blocks=24, kv_store=store)
    for prompt in prompts:
        core.add(prompt)
    outputs = toy.drain(core, 20_000)
    assert all(toy.tokens_of(outputs[prompt.request_id]) == toy.alone(prompt)[0] for prompt in prompts)
    assert core.stats.preemptions > 0
    assert stats_of(store).hits > 0
    toy.assert_empty(core)


def test_an_idle_session_that_lost_its_blocks_gets_them_back(toy):
    model, store = toy.ToyModel(), make_store()
    core = toy.make_core(blocks=20, model=model, kv_store=store)
    core.add(toy.random_prompt("session", 40, seed=1, hold_open=True))
    answer = toy.tokens_of(toy.drain(core)["session"])
    for seed in range(2, 5):
        run(toy, core, toy.random_prompt(str(seed), 60, seed=seed))
    assert not any(core.scheduler.requests["session"].block_ids)
    model.forward_rows.clear()
    core.append("session", (5, 6, 7))
    outputs = toy.drain(core, 20_000)["session"]
    assert sum(model.forward_rows) <= 4 + 3 + 4  # of the last block, of the appended tokens, and of the answer
    whole = toy.random_prompt("whole", 40, seed=1)
    whole = replace(whole, prompt_token_ids=(*whole.prompt_token_ids, *answer, 5, 6, 7))
    assert toy.tokens_of(outputs) == toy.alone(whole)[0]


@pytest.mark.parametrize("kind", ["full", "window", "states"])
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_give_the_same_tokens(toy, kind, seed):
    """Prompts share prefixes, memory for offloading is small, and sessions are held open, appended to and truncated."""
    model, histories = toy.ToyModel(**MODELS[kind]), random_histories(toy, seed)

    def play(**options) -> dict[str, list[int]]:
        return play_histories(toy, toy.make_core(blocks=32, model=model, budget=32, **options), histories)

    assert play(kv_store=make_store(MemoryConnector(1 << 16))) == play(caching=False)


@pytest.mark.parametrize("kind", MODELS)
def test_a_decode_engine_gets_what_a_prefill_engine_has_computed(toy, kind):
    """The consumer finds a prompt's blocks as soon as the producer has answered; without the producer, it computes."""
    model = toy.ToyModel(**MODELS[kind])
    prompts = [toy.random_prompt(str(i), 40, seed=i, max_tokens=8) for i in range(4)]
    if kind == "cross":
        prompts = [replace(prompt, cross=(toy.item(0, 5, i),)) for i, prompt in enumerate(prompts)]
    memory = MemoryConnector(1 << 24)
    server = PeerServer([memory], "127.0.0.1:0", "secret")
    producer = toy.make_core(model=model, kv_store=make_store(memory))
    producer.executor.runner.kv_blocks.save_seconds = 60.0
    connectors = [MemoryConnector(1 << 24), PeerConnector(f"127.0.0.1:{server.port}", "secret", 20.0)]
    store = make_store(*connectors)
    consumer = toy.make_core(model=model, kv_store=store)
    for prompt in prompts[:3]:
        run(toy, producer, replace(prompt, params=replace(prompt.params, max_tokens=1)))
        answer, cached = run(toy, consumer, prompt)
        assert answer == toy.alone(prompt, model=model)[0]
        assert cached > 30
    hits = stats_of(store, "peer").hits
    assert hits > 0
    server.close()
    answer, cached = run(toy, consumer, prompts[3])
    assert (answer, cached) == (toy.alone(prompts[3], model=model)[0], 0)
    assert stats_of(store, "peer").failed > 0
    assert stats_of(store, "peer").hits == hits
    store.close()
    producer.close()


@pytest.mark.parametrize("fault", ["unreachable", "flipped", "truncated", "another", "gone", "slow"])
def test_a_wrong_short_or_late_block_is_computed(toy, fault):
    connector = Faulty("")
    store = make_store(connector)
    prompt = toy.random_prompt("a", 40, seed=1)
    answer, _ = run(toy, toy.make_core(kv_store=store), prompt)
    store.flush()
    connector.fault = fault
    core = toy.make_core(kv_store=store)
    core.executor.runner.kv_blocks.load_seconds = 0.02 if fault == "slow" else 60
    again, cached = run(toy, core, prompt)
    assert again == answer
    assert cached == 0 if fault != "slow" else cached < 36
    counts = stats_of(store)
    assert (counts.failed > 0) == (fault == "unreachable")
    assert (counts.damaged > 0) == (fault in ("flipped", "truncated", "another"))
    assert (counts.late > 0) == (fault == "slow")
    toy.assert_empty(core)


def test_a_sequence_that_ends_while_it_waits_leaves_nothing(toy):
    connector = Faulty("")
    store = make_store(connector)
    prompt = toy.random_prompt("a", 40, seed=1)
    run(toy, toy.make_core(kv_store=store), prompt)
    store.flush()
    connector.fault = "slow"
    core = toy.make_core(kv_store=store)
    core.add(prompt)
    core.step()
    assert core.stats.waiting == 1
    assert core.stats.idle == 0
    core.abort("a")
    assert (core.stats.waiting, core.stats.idle) == (0, 0)
    core.step()
    assert not core.executor.runner.kv_blocks._loads
    toy.assert_empty(core)
    held = replace(prompt, hold_open=True)
    core.add(held)
    core.step()
    core.append("a", (5, 6))  # changes the tokens that it waits for
    assert toy.tokens_of(toy.drain(core, 100_000)["a"])
    core.abort("a")
    toy.assert_empty(core)


def test_adapters_salts_and_items_have_blocks_of_their_own(toy):
    store = make_store()
    prompt = toy.request("a", [*range(4, 30), toy.PAD, toy.PAD, *range(4, 20)], [toy.item(26, 2, seed=1)])
    run(toy, toy.make_core(kv_store=store), prompt)
    store.flush()
    others = [replace(prompt, salt="s"), replace(prompt, adapter="a"), replace(prompt, features=(toy.item(26, 2, seed=2),))]
    for other, cached in zip(others, (0, 0, 24), strict=True):
        core = toy.make_core(kv_store=store)
        assert run(toy, core, other) == (toy.alone(other)[0], cached)


def test_live_streams_are_saved_nowhere(toy):
    store = make_store()
    item = toy.item(2, 4)
    item = replace(item, kwargs={**item.kwargs, "audio_stream": FieldElem(torch.tensor([1]), BatchedField())})
    assert item.stream == 1
    run(toy, toy.make_core(kv_store=store), toy.request("a", [5, 6, *[toy.PAD] * 4, *range(5, 30)], [item]))
    store.flush()
    assert stats_of(store).writes == 0


def test_memory_is_bounded(toy):
    connector = MemoryConnector(40_000)
    store = make_store(connector)
    core = toy.make_core(blocks=60, kv_store=store)
    for i in range(30):
        run(toy, core, toy.random_prompt(str(i), 100, seed=i))
        store.flush()
        assert connector.num_bytes <= 40_000
    assert sum(len(data) for data in connector._entries.values()) <= connector.num_bytes
    assert not MemoryConnector(100).put("key", b"x" * 100)


def test_what_was_saved_before_an_update_of_weights_is_not_found(toy):
    store = make_store()
    core = toy.make_core(kv_store=store)
    prompt = toy.random_prompt("a", 40)
    run(toy, core, prompt)
    store.flush()
    core.reset_prefix_cache()
    core.executor.runner.kv_blocks.forget_saved()
    assert run(toy, core, prompt)[1] == 0
