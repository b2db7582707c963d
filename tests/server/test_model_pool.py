"""The pool of models, with models that are plain texts: what is unloaded, who waits, and what becomes of failures."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress
from itertools import combinations

import pytest
from sensorium.callers.errors import ConfigError, InputError
from sensorium.server.config import ServerConfig, split_options
from sensorium.server.errors import HttpError
from sensorium.server.eviction import Occupant, choose_victims
from sensorium.server.model_pool import ModelPool
from sensorium.server.pooled_model import Limits, PooledModel
from waiting import LONG


@pytest.mark.parametrize("seed", range(300))
def test_what_is_unloaded(seed):
    """The victims are idle, suffice, none is spared in vain, and there are none only if nothing would suffice."""
    chance = random.Random(seed)
    names = "abcdef"[: chance.randrange(7)]
    occupants = [Occupant(name, chance.randrange(6), chance.randrange(4), chance.random() < 0.3) for name in names]
    needed, budget = chance.randrange(8), chance.randrange(16)
    sizes = {one.name: one.num_bytes for one in occupants}
    idle = [one.name for one in occupants if not one.is_busy]

    def fits(victims):
        return sum(sizes.values()) - sum(sizes[name] for name in victims) + needed <= budget

    victims = choose_victims(occupants, needed, budget)
    possible = any(fits(some) for count in range(len(idle) + 1) for some in combinations(idle, count))
    assert (victims is not None) == possible
    if victims is None:
        return
    assert len(set(victims)) == len(victims)
    assert set(victims) <= set(idle)
    assert fits(victims)
    for victim in victims:
        assert not fits([name for name in victims if name != victim])
    if fits([]):
        assert victims == []
    last_used = {one.name: one.last_used for one in occupants}
    newest = max((last_used[name] for name in victims), default=0)
    older = [name for name in idle if last_used[name] < newest]
    assert not victims or not fits(older), "models that were not used for longer would have sufficed"


class Texts:
    """Loads models that are texts, and holds their memory to the budget."""

    def __init__(self, sizes, budget):
        self.sizes, self.budget, self.lock = sizes, budget, threading.Lock()
        self.in_memory, self.log, self.failing, self.dead = dict[str, int](), list[str](), set[str](), set[str]()
        self.go_on = threading.Event()
        self.go_on.set()

    def _hold(self, name, size):
        with self.lock:
            self.in_memory[name] = size
            assert sum(self.in_memory.values()) <= self.budget, self.in_memory

    def load(self, name):
        self.log.append(f"load {name}")
        assert name not in self.in_memory
        self._hold(name, self.sizes[name])
        assert self.go_on.wait(LONG)
        if name in self.failing:
            del self.in_memory[name]
            raise ConfigError("secret reason")
        return name

    def close(self, model):
        self.log.append(f"close {model}")
        del self.in_memory[model]
        self.dead.discard(model)

    def sleep(self, model, level):
        if model in self.failing:
            raise InputError("requests being served: 1")
        self.log.append(f"sleep {model}")
        self._hold(model, 1)

    def wake_up(self, model):
        self.log.append(f"wake {model}")
        self._hold(model, self.sizes[model])
        if model in self.failing:
            raise ConfigError("changed")

    def is_dead(self, model):
        return model in self.dead


def pool_of(budget=20, sizes=(10, 10, 10), **limits):
    loader = Texts(dict(zip("abc", sizes, strict=False)), budget)
    models = [PooledModel([name, name * 2], size, 1) for name, size in loader.sizes.items()]
    return ModelPool(models, loader, Limits(budget, **limits)), loader


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, LONG))


async def until(true):
    while not true():
        await asyncio.sleep(0.001)


async def used(pool, name):
    lease = await pool.acquire(name)
    lease.release()
    lease.release()  # counts once
    return lease.model


def test_models_are_loaded_once_and_the_oldest_makes_room():
    async def scenario():
        pool, loader = pool_of()
        assert await asyncio.gather(*(used(pool, name) for name in ("a", "aa", "a", None))) == ["a"] * 4
        assert [await used(pool, name) for name in "bacab"] == list("bacab")
        assert loader.log == ["load a", "load b", "close b", "load c", "close c", "load b"]
        assert [one.state for one in pool.models] == ["loaded", "loaded", "not_loaded"]
        assert [one.num_loads for one in pool.models] == [1, 2, 1]

    run(scenario())


def test_an_unknown_name_lists_the_names():
    pool, _ = pool_of()
    with pytest.raises(HttpError, match="'a', 'aa', 'b'") as error:
        pool.find("x")
    assert (error.value.status, error.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("seed", range(20))
def test_random_requests_get_their_models(seed):
    """The budget holds at any time, a leased model stays, and every request gets its model unless it leaves."""
    chance = random.Random(seed)

    async def request(pool, loader, name):
        lease = await pool.acquire(name)
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(chance.random() / 500)
                assert loader.in_memory[name] == loader.sizes[name]
            return lease.model
        finally:
            lease.release()

    async def leaving(pool, loader, name):
        with suppress(TimeoutError):
            async with asyncio.timeout(chance.random() / 100):
                await request(pool, loader, name)
        return name

    async def scenario():
        pool, loader = pool_of(budget=chance.choice([12, 21, 25]), sizes=(10, 12, 4), idle_seconds=chance.choice([None, 0.001]))
        names = [chance.choice("abc") for _ in range(60)]
        kinds = [chance.choice([request, request, leaving]) for _ in names]
        work = [kind(pool, loader, name) for kind, name in zip(kinds, names, strict=True)]
        assert await asyncio.gather(*work) == names
        await until(lambda: not any(one.task for one in pool.models))
        assert all(one.leases == one.waiting == 0 for one in pool.models)
        held = {one.name: one.held_bytes for one in pool.models if one.held_bytes}
        assert held == loader.in_memory

    run(scenario())


def test_a_busy_model_stays_and_the_wait_is_limited():
    async def scenario():
        pool, loader = pool_of(10, wait_seconds=0.05, queue=2)
        lease = await pool.acquire("a")
        waiting = [asyncio.create_task(pool.acquire(name)) for name in "bc"]
        await asyncio.sleep(0)
        with pytest.raises(HttpError, match="model_queue") as full:
            await pool.acquire("b")
        (await pool.acquire("a")).release()  # a model that is loaded has no queue
        for one in await asyncio.gather(*waiting, return_exceptions=True):
            assert (one.status, one.code) == (503, "overloaded")
            assert "max_models_bytes" in one.message
        assert full.value.status == 503
        assert loader.log == ["load a"]
        lease.release()
        assert await used(pool, "b") == "b"

    run(scenario())


def test_a_model_in_constant_use_makes_room_at_last(monkeypatch):
    monkeypatch.setattr("sensorium.server.model_pool._PATIENCE", 0.01)

    async def scenario():
        pool, _ = pool_of(10)
        served = []

        async def stream(name):
            while "c" not in served:  # two of them, so that one request at least is always in progress
                lease = await pool.acquire(name)
                await asyncio.sleep(0.003)
                lease.release()
                served.append(name)

        await asyncio.gather(stream("a"), later("a", stream), used_and_noted(pool, served))
        assert await used(pool, "a") == "a"

    async def later(name, stream):
        await asyncio.sleep(0.0015)
        await stream(name)

    async def used_and_noted(pool, served):
        await until(lambda: len(served) > 2)
        served.append(await used(pool, "c"))

    run(scenario())


def test_loads_that_take_longer_than_the_patience_serve_their_requests(monkeypatch):
    """Models that do not fit together take turns, and each load serves the requests that wait for it."""
    monkeypatch.setattr("sensorium.server.model_pool._PATIENCE", 0.01)

    async def several(pool, name):
        return [await used(pool, name) for _ in range(3)]

    async def scenario():
        pool, loader = pool_of(10)
        load, names = loader.load, ["a", "b", "c", "a", "b", "c"]

        def slow_load(name):
            threading.Event().wait(0.05)
            return load(name)

        loader.load = slow_load
        assert await asyncio.gather(*(used(pool, name) for name in names)) == names
        assert [entry for entry in loader.log if "load" in entry] == ["load a", "load b", "load c"]
        assert await asyncio.gather(several(pool, "a"), several(pool, "b")) == [["a"] * 3, ["b"] * 3]

    run(scenario())


def test_a_request_waits_once_for_a_model_that_is_to_make_room():
    async def scenario():
        pool, _ = pool_of(wait_seconds=0.02)
        await used(pool, "a")
        pool.find("a").is_retiring = True
        with pytest.raises(HttpError, match="max_models_bytes") as error:
            await pool.acquire("a")
        assert (error.value.status, error.value.code) == (503, "overloaded")

    run(scenario())


def test_a_sleeping_model_does_not_make_room_for_itself(monkeypatch):
    monkeypatch.setattr("sensorium.server.model_pool._PATIENCE", 0.01)

    async def scenario():
        pool, _ = pool_of(8, (6, 3, 3), wait_seconds=0.5)
        await used(pool, "a")
        await pool.sleep(pool.find("a"))
        leases = [await pool.acquire(name) for name in "bc"]
        task = asyncio.create_task(pool.acquire("a"))
        await until(lambda: task.done() or pool.find("b").is_retiring)
        assert [one.name for one in pool.models if one.is_retiring] == ["b", "c"]
        for lease in leases:
            lease.release()
        assert (await task).model == "a"

    run(scenario())


def test_a_load_that_fits_does_not_wait_for_another_one():
    async def scenario():
        pool, loader = pool_of(20, (10, 15, 5))
        lease = await pool.acquire("a")
        waiting = asyncio.create_task(pool.acquire("b"))
        await until(lambda: pool.find("b").is_queued)
        await asyncio.sleep(0)
        assert await used(pool, "c") == "c"
        assert pool.find("b").is_queued
        lease.release()
        assert (await waiting).model == "b"
        assert loader.log == ["load a", "load c", "close a", "load b"]

    run(scenario())


def test_models_are_unloaded_for_the_load_that_waits():
    """While they are, another load does not take their room, and they are not among the models of the server."""

    async def scenario():
        pool, loader = pool_of(20, (10, 15, 6))
        await used(pool, "a")
        close, go_on = loader.close, threading.Event()

        def held_close(model):
            assert go_on.wait(LONG)
            close(model)

        loader.close = held_close
        first = asyncio.create_task(used(pool, "b"))
        await until(lambda: pool.find("a").state == "unloading")
        second = asyncio.create_task(used(pool, "c"))
        await asyncio.sleep(0.01)
        assert (pool.find("a").model, [*pool.loaded]) == (None, [])
        assert pool.find("c").is_queued
        go_on.set()
        assert [await first, await second] == ["b", "c"]
        assert loader.log == ["load a", "close a", "load b", "close b", "load c"]

    run(scenario())


def test_a_server_that_ends_during_an_unload_closes_the_model():
    pool, loader = pool_of(10)
    go_on = threading.Event()
    loader.close = lambda model: go_on.wait(LONG)

    async def scenario():
        await used(pool, "a")
        task = asyncio.create_task(pool.acquire("b"))
        await until(lambda: pool.find("a").state == "unloading")
        task.cancel()

    run(scenario())
    go_on.set()
    assert [*pool.loaded] == ["a"]


def test_waiters_leave():
    """A load that waits for memory ends with its last waiter; one that has begun goes on for others."""

    async def scenario():
        pool, loader = pool_of(10)
        lease = await pool.acquire("a")
        first, second = (asyncio.create_task(pool.acquire("b")) for _ in range(2))
        await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.sleep(0.01)
        assert pool.find("b").is_queued
        second.cancel()
        await until(lambda: pool.find("b").task is None)
        lease.release()
        assert loader.log == ["load a"]
        loader.go_on.clear()
        third = asyncio.create_task(pool.acquire("c"))
        await until(lambda: "load c" in loader.log)
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        loader.go_on.set()
        assert await used(pool, "c") == "c"
        assert loader.log == ["load a", "close a", "load c"]

    run(scenario())


def test_a_failed_load_is_told_to_all_and_tried_again(monkeypatch, caplog):
    monkeypatch.setattr("sensorium.server.model_pool._BACKOFF_SECONDS", 0.05)

    async def scenario():
        pool, loader = pool_of()
        loader.failing.add("a")
        found = await asyncio.gather(*(pool.acquire("a") for _ in range(3)), return_exceptions=True)
        assert [(one.status, one.code) for one in found] == [(503, "model_load_failed")] * 3
        assert len(set(map(id, found))) == 3
        assert "secret" not in found[0].message
        assert "secret reason" in caplog.text
        with pytest.raises(HttpError, match="cannot be loaded now"):
            await pool.acquire("a")
        assert loader.log == ["load a"]  # the pause is not over
        loader.failing.clear()
        await asyncio.sleep(0.06)
        assert await used(pool, "a") == "a"
        assert await used(pool, "b") == "b"

    run(scenario())


def test_idle_models_sleep_and_wake():
    async def scenario():
        pool, loader = pool_of(idle_seconds=0.01)
        lease = await pool.acquire("a")
        await asyncio.sleep(0.03)
        assert pool.models[0].state == "loaded"
        lease.release()
        await until(lambda: pool.models[0].state == "asleep")
        assert await asyncio.gather(used(pool, "a"), used(pool, "a")) == ["a", "a"]
        assert loader.log == ["load a", "sleep a", "wake a"]
        loader.failing.add("a")  # a request that was cancelled is still in the engine
        await asyncio.sleep(0.05)
        assert pool.models[0].state == "loaded"
        with pytest.raises(InputError, match="being served"):
            await pool.sleep(pool.models[0])
        loader.failing.clear()
        await until(lambda: pool.models[0].state == "asleep")
        await pool.sleep(pool.models[0])  # as it is
        await pool.sleep(pool.models[1])  # not loaded
        loader.failing.add("a")
        with pytest.raises(HttpError, match="cannot be loaded"):
            await pool.acquire("a")
        assert (pool.models[0].state, loader.in_memory) == ("not_loaded", {})

    run(scenario())


def test_a_model_with_requests_is_not_put_to_sleep():
    async def scenario():
        pool, _ = pool_of()
        lease = await pool.acquire("a")
        with pytest.raises(InputError, match="requests being served: 1"):
            await pool.sleep(pool.models[0])
        lease.release()
        await pool.sleep(pool.models[0])
        assert pool.models[0].state == "asleep"

    run(scenario())


def test_a_dead_model_is_loaded_again():
    async def scenario():
        pool, loader = pool_of()
        await used(pool, "a")
        loader.dead.add("a")
        assert await used(pool, "a") == "a"
        assert loader.log == ["load a", "close a", "load a"]

    run(scenario())


def test_a_load_that_ends_after_the_server_is_discarded():
    pool, loader = pool_of()
    loader.go_on.clear()

    async def scenario():
        task = asyncio.create_task(pool.acquire("a"))
        await until(lambda: loader.log)
        task.cancel()

    run(scenario())  # cancels what loads the model
    loader.go_on.set()
    end = threading.Event()
    while loader.in_memory:
        end.wait(0.001)
    assert loader.log == ["load a", "close a"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "must be a list of objects"),
        ("tiny-vl", "must be a list of objects"),
        ([1], r"models\[0\]=1 must be an object"),
        ([{"name": "a"}], r"^models\[0\]\.path is missing; give a folder"),
        ([{"path": "p", "nam": "a"}], r"unknown key 'nam' of models\[0\]; did you mean name\?"),
        ([{"path": "p", "name": []}], r"models\[0\].name"),
        ([{"path": "p", "preload": 1}], r"models\[0\].preload=1 must be true or false"),
        ([{"path": "p", "options": [1]}], r"models\[0\].options"),
        ([{"path": "p", "options": {"max_modl_len": 1}}], r"models\[0\].options: unknown option 'max_modl_len'"),
        ([{"path": "p"}, {"path": "q", "name": ["b", "p"]}], "is the name of two models"),
    ],
)
def test_wrong_entries(models, message):
    with pytest.raises(ConfigError, match=message):
        split_options({"models": models})


def test_the_first_model_is_preloaded_unless_another_one_is():
    entries = ServerConfig(models=[{"path": "p", "options": {"max-model-len": 8}}, {"path": "q", "name": ["b", "c"]}]).models
    assert [(one.names, one.preload) for one in entries] == [(["p"], True), (["b", "c"], False)]
    assert entries[0].options == {"max_model_len": 8}
    entries = ServerConfig(models=[{"path": "p"}, {"path": "q", "preload": True}]).models
    assert [one.preload for one in entries] == [False, True]
    with pytest.raises(ConfigError, match="served_model_name"):
        ServerConfig(models=[{"path": "p"}], served_model_name="a")
