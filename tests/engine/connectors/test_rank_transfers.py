"""KV blocks of which several ranks hold parts: a block is used only if all ranks have their parts of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kv_connectors import Faulty, make_store, play_histories, random_histories, run, stats_of
from sensorium.engine.connectors.memory import MemoryConnector
from sensorium.engine.connectors.tensor_store import TensorStore
from sensorium.engine.core import rank_executor, rank_server
from sensorium.engine.core.engine_core import EngineCore
from sensorium.engine.core.rank_executor import RankExecutor
from sensorium.engine.executor import LocalExecutor
from sensorium.engine.kv_cache.groups import group_layers
from sensorium.engine.types import KVLookup, KVTransfer
from sensorium.engine.worker.kv_block_store import KVBlockStore
from waiting import wait_until
from wire_executor import through_bytes

MODELS: dict[str, dict[str, Any]] = {"full": {}, "window": {"window": 9}, "states": {"states": True}}


class OtherRanks:
    """Further ranks in this process, which answer as `rank_server` does."""

    def __init__(self, executors: list[LocalExecutor]) -> None:
        self.children, self._replies = executors, list[Any]()

    def send(self, verb: str, *arguments: Any) -> None:
        self._replies = [self._reply(executor, verb, through_bytes(arguments)) for executor in self.children]

    def receive(self) -> list[Any]:
        return self._replies

    def _reply(self, executor: LocalExecutor, verb: str, arguments: Any) -> Any:
        try:
            return False, through_bytes(rank_server._answer(executor, verb, arguments))
        except OSError as error:
            return True, str(error)


def fail(peers: OtherRanks, reason: str) -> None:
    raise AssertionError(reason)


def make_ranks(toy: Any, stores: list[TensorStore], in_stages: bool = False, **options: Any) -> EngineCore:
    """Return a core whose ranks have these stores.

    Each rank computes the whole toy. `in_stages`: the first rank holds the first layer, the second one the others. They share
    the memory of the caches, so that the keys of both are there.
    """
    cores = [toy.make_core(kv_store=store, **options) for store in stores]
    runners = [core.executor.runner for core in cores]
    if in_stages:
        for number, runner in enumerate(runners):
            groups = group_layers(runner.model.cache_specs)
            local = [replace(group, layers=tuple(i for i in group.layers if (i >= 1) == number)) for group in groups]
            runner.kv_blocks = KVBlockStore(runner.kv_blocks.store, local, runner.caches.block_size)
            runner.caches = replace(runner.caches, tensors=runners[0].caches.tensors)
    core = cores[0]
    core.executor = RankExecutor(core.executor, OtherRanks([other.executor for other in cores[1:]]))
    core.executor.runner = runners[0]  # what `assert_empty` reads
    return core


def block_stores(core: EngineCore) -> list[KVBlockStore]:
    executors = [core.executor._local, *core.executor._peers.children]
    return [executor.runner.kv_blocks for executor in executors]


def assert_nothing_is_kept(core: EngineCore) -> None:
    assert not core.executor._ended
    assert not any(store._loads or store._arrived for store in block_stores(core))


@pytest.fixture(autouse=True)
def _fail_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_executor, "fail", fail)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("in_stages", [False, True])
def test_blocks_come_back_on_all_ranks(toy: Any, kind: str, in_stages: bool) -> None:
    """A stage holds a part of a group of layers, or none of it."""
    stores, model = [make_store(name=str(rank)) for rank in range(2)], toy.ToyModel(**MODELS[kind])
    core = make_ranks(toy, stores, in_stages, blocks=24, model=model)
    prompts = [toy.random_prompt(str(seed), 60, seed=seed) for seed in range(4)]
    expected = [toy.alone(prompt, model=model)[0] for prompt in prompts]
    assert [run(toy, core, prompt)[0] for prompt in prompts] == expected
    for store in stores:
        store.flush()
    core.reset_prefix_cache()
    again = [run(toy, core, replace(prompt, request_id=f"again {prompt.request_id}")) for prompt in prompts]
    assert [tokens for tokens, _ in again] == expected
    assert all(cached > 40 for _, cached in again)
    assert all(stats_of(store).hits > 0 for store in stores)
    (total,) = core.executor.transfer_stats()
    assert total.hits == sum(stats_of(store).hits for store in stores)
    assert_nothing_is_kept(core)
    toy.assert_empty(core)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("in_stages", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_histories_give_the_tokens_of_one_process(toy: Any, kind: str, in_stages: bool, seed: int) -> None:
    """The ranks have room for different numbers of blocks, so that they lose different ones."""
    model, histories = toy.ToyModel(**MODELS[kind]), random_histories(toy, seed)
    stores = [make_store(MemoryConnector(size), name=str(size)) for size in (1 << 16, 3 << 14)]
    ranks = make_ranks(toy, stores, in_stages, blocks=32, model=model, budget=32)
    alone = toy.make_core(blocks=32, model=model, budget=32, caching=False)
    assert play_histories(toy, ranks, histories) == play_histories(toy, alone, histories)
    assert_nothing_is_kept(ranks)


@pytest.mark.parametrize("fault", ["unreachable", "flipped", "truncated", "another", "gone", "slow"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_block_that_is_wrong_short_or_late_on_one_rank_is_computed_by_all(toy: Any, rank: int, fault: str) -> None:
    connectors = [Faulty(), Faulty()]
    stores = [make_store(connector, name=str(i)) for i, connector in enumerate(connectors)]
    core = make_ranks(toy, stores)
    prompt = toy.random_prompt("a", 40, seed=1)
    answer, _ = run(toy, core, prompt)
    for store in stores:
        store.flush()
    core.reset_prefix_cache()
    connectors[rank].fault = fault
    block_stores(core)[rank].load_seconds = 0.02 if fault == "slow" else 60
    again, cached = run(toy, core, replace(prompt, request_id="b"))
    assert again == answer == toy.alone(prompt)[0]
    assert cached == 0 if fault != "slow" else cached < 36
    counts = stats_of(stores[rank])
    assert (counts.failed > 0) == (fault == "unreachable")
    assert (counts.damaged > 0) == (fault in ("flipped", "truncated", "another"))
    assert (counts.late > 0) == (fault == "slow")
    assert stats_of(stores[1 - rank]).hits == 9
    assert_nothing_is_kept(core)
    toy.assert_empty(core)


def test_a_sequence_that_ends_while_one_rank_is_slow_leaves_nothing(toy: Any) -> None:
    connectors = [Faulty(), Faulty()]
    stores = [make_store(connector, name=str(i)) for i, connector in enumerate(connectors)]
    core = make_ranks(toy, stores)
    prompt = toy.random_prompt("a", 40, seed=1)
    run(toy, core, prompt)
    for store in stores:
        store.flush()
    core.reset_prefix_cache()
    connectors[1].fault = "slow"
    core.add(prompt)
    wait_until(lambda: core.step() and core.executor._ended)  # rank 0 has read its blocks
    assert core.stats.waiting == 1
    core.abort("a")
    core.step()
    assert_nothing_is_kept(core)
    toy.assert_empty(core)


@pytest.mark.parametrize("verb", ["_save", "_place", "_take_arrived"])
def test_a_rank_that_cannot_save_look_up_or_place_costs_time_only(toy: Any, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [make_store(name=str(rank)) for rank in range(2)]
    core = make_ranks(toy, stores)
    prompt = toy.random_prompt("a", 40, seed=1)
    answer, _ = run(toy, core, prompt)
    for store in stores:
        store.flush()
    core.reset_prefix_cache()

    def broken(*arguments: Any) -> None:
        if not arguments or arguments[-1]:  # a message without blocks saves nothing
            raise OSError("broken")

    monkeypatch.setattr(block_stores(core)[1], verb, broken)
    again, cached = run(toy, core, replace(prompt, request_id="b"))
    assert again == answer
    assert cached == (36 if verb == "_save" else 0)
    monkeypatch.undo()
    core.reset_prefix_cache()
    monkeypatch.setattr(rank_executor, "fail", fail)
    assert run(toy, core, replace(prompt, request_id="c")) == (answer, 36)
    assert_nothing_is_kept(core)
    toy.assert_empty(core)


def test_a_lookup_is_reported_when_it_has_ended_on_all_ranks(toy: Any) -> None:
    """Its blocks are those of which all ranks have read their parts, in order."""
    connectors = [Faulty(), Faulty()]
    stores = [make_store(connector, name=str(i)) for i, connector in enumerate(connectors)]
    core = make_ranks(toy, stores)
    prompt = toy.random_prompt("a", 40, seed=1)
    run(toy, core, prompt)
    for store in stores:
        store.flush()
    hashes = tuple(bytes.fromhex(key.partition("/")[2].partition(".")[0]) for key in connectors[0]._entries)
    connectors[1].delete(stores[1].key(f"{hashes[4].hex()}.0"))
    lookup = KVLookup(5, hashes, ((False,) * len(hashes),))
    found = core.executor.transfer(KVTransfer(look_up=(lookup,), poll_seconds=0.0))
    while not found:
        found = core.executor.transfer(KVTransfer(poll_seconds=0.005))
    assert [(result.number, result.blocks) for result in found] == [(5, tuple((0, index) for index in range(4)))]
    core.executor.transfer(KVTransfer(place=((5, ()),)))
    assert_nothing_is_kept(core)
