"""Cache groups of states: which states a sequence holds, saves and finds again. Answers are those of a sequence alone."""

from dataclasses import replace

import pytest
import torch
from sensorium.engine.config import EngineConfig
from sensorium.engine.kv_cache.block_pool import BlockPools
from sensorium.engine.setup.memory import MaxSizes, max_cached_blocks, num_cache_blocks
from sensorium.models.interface import CacheSpec


@pytest.fixture
def core(toy):
    return lambda **options: toy.make_core(model=toy.ToyModel(states=True), block_size=4, **options)


def expected(toy, request):
    return toy.alone(request, toy.ToyModel(states=True))[0]


def states(engine):
    return engine.scheduler.block_pools.pools[1]


def test_a_prompt_is_cut_where_its_state_is_cached_and_found_there(toy, core):
    engine = core()
    first = toy.random_prompt("a", 30)
    engine.add(first)
    seen = [toy.scheduled(engine)[0]["a"] for _ in range(2)]
    assert seen == [28, 2], "28 tokens are the most that a prompt with equal beginning can reuse"
    toy.drain(engine)
    engine.add(replace(first, request_id="b"))
    (outputs,) = toy.drain(engine).values()
    assert outputs[-1].stats.cached_tokens == 28
    assert toy.tokens_of(outputs) == expected(toy, first)
    toy.assert_empty(engine)


def test_a_prefix_without_its_state_is_computed(toy, core):
    """The keys of 28 tokens are cached, but a prompt that differs in the last 10 finds a state at 16 only."""
    engine = core(budget=16)
    first = toy.random_prompt("a", 30)
    engine.add(first)
    toy.drain(engine)
    tokens = first.prompt_token_ids[:20] + tuple(reversed(first.prompt_token_ids[20:]))
    other = replace(first, request_id="b", prompt_token_ids=tokens)
    engine.add(other)
    (outputs,) = toy.drain(engine).values()
    assert outputs[-1].stats.cached_tokens == 16
    assert toy.tokens_of(outputs) == expected(toy, other)


def test_no_state_is_searched_before_a_span_that_starts_in_the_first_block(toy, core):
    """Two cached blocks end inside the bidirectional span, so none of them can be used."""
    engine = core(prompt_attention="bidirectional_items")
    first = toy.request("a", [5, 6, *[toy.PAD] * 10, 7, 8, 9], [toy.item(2, 10)])
    engine.add(first)
    toy.drain(engine)
    other = replace(first, request_id="b", prompt_token_ids=first.prompt_token_ids[:12])
    engine.add(other)
    (outputs,) = toy.drain(engine).values()
    assert outputs[-1].stats.cached_tokens == 0
    assert toy.tokens_of(outputs) == toy.alone(other, toy.ToyModel(states=True), "bidirectional_items")[0]
    toy.assert_empty(engine)


def test_an_answer_saves_its_newest_state_only(toy, core):
    engine = core()
    request = toy.random_prompt("a", 18, max_tokens=30)
    engine.add(request)
    answer = toy.tokens_of(toy.drain(engine)["a"])
    assert states(engine).num_cached == 2, "after 16 tokens of the prompt, and after 44 of all"
    again = replace(request, request_id="b", prompt_token_ids=(*request.prompt_token_ids, *answer, 5, 6))
    engine.add(again)
    (outputs,) = toy.drain(engine).values()
    assert outputs[-1].stats.cached_tokens == 44
    assert toy.tokens_of(outputs) == expected(toy, again)


def test_a_long_prompt_caches_few_states_and_leaves_those_of_others(toy, core):
    engine = core(budget=4, blocks=64)
    short, long = toy.random_prompt("short", 18), toy.random_prompt("long", 150)
    engine.add(short)
    toy.drain(engine)
    before = states(engine).num_cached
    other = tuple(reversed(long.prompt_token_ids))
    engine.add(replace(long, prompt_token_ids=other))
    toy.drain(engine)
    assert states(engine).num_cached <= before + 6, "5 of the prompt, one of the answer"
    assert not states(engine).evictions
    for length, least in ((150, 148), (120, 40), (18, 16)):  # the whole prompt, a part of it, the first conversation
        again = replace(long, request_id=f"again{length}", prompt_token_ids=(*other[:length], 5, 5) if length > 18 else other)
        again = again if length > 18 else replace(short, request_id="again")
        engine.add(again)
        (outputs,) = toy.drain(engine).values()
        assert outputs[-1].stats.cached_tokens >= least
        assert toy.tokens_of(outputs) == expected(toy, again)


def test_the_states_of_a_conversation_outlive_the_earlier_ones_of_another(toy, core):
    engine = core(budget=4, max_cached=5)
    short = toy.random_prompt("short", 18)
    engine.add(short)
    toy.drain(engine)
    tokens = tuple(reversed(toy.random_prompt("long", 150).prompt_token_ids))
    engine.add(replace(toy.random_prompt("long", 150, max_tokens=30), prompt_token_ids=tokens))
    for _ in range(40):  # the whole prompt and a part of the answer
        toy.scheduled(engine)
    assert states(engine).evictions
    engine.add(replace(short, request_id="again"))
    outputs = toy.drain(engine)["again"]
    assert outputs[-1].stats.cached_tokens == 16
    assert toy.tokens_of(outputs) == expected(toy, short)


def test_usage_counts_the_bytes_of_a_state(toy):
    specs = [CacheSpec("full", 1, 8, torch.float32), CacheSpec("state", 1, 100, torch.float32)]
    pools = BlockPools(specs, [10, 4], 4, block_bytes=[50, 500])
    pools.pools[1].allocate(2)
    assert pools.usage == 2 * 500 / (10 * 50 + 4 * 500)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("back", [1, 3, 9, 30])
def test_a_rollback_begins_at_a_cached_state(toy, core, caching, back):
    engine = core(caching=caching)
    engine.add(toy.random_prompt("r", 40, hold_open=True, max_tokens=6))
    toy.drain(engine)
    engine.truncate("r", 46 - back)
    assert engine.scheduler.requests["r"].num_computed == ({1: 44, 3: 40, 9: 36, 30: 0}[back] if caching else 0)


def test_a_sequence_holds_two_states_and_the_pool_gets_them_back(toy, core):
    engine = core(caching=False)
    engine.add(toy.random_prompt("a", 30, max_tokens=9))
    toy.scheduled(engine)
    assert len(engine.scheduler.requests["a"].block_ids[1]) <= 2
    toy.drain(engine)
    assert states(engine).num_free == states(engine).num_blocks
    assert not states(engine).num_cached


def test_states_get_half_of_the_memory_and_other_groups_the_rest(toy):
    """A state is worth 50 blocks. One long sequence must fit; then half of the memory holds states, for short sequences."""
    specs = [CacheSpec("full", 1, 8, torch.float32), CacheSpec("state", 1, 8 * 2 * 16 * 50, torch.float32)]
    sizes = MaxSizes(max_model_len=1600, step_rows=64)
    block = specs[0].block_bytes(16)
    config = EngineConfig("model", max_num_seqs=64, kv_cache_memory_bytes=block * 2250, block_size=16)
    tokens, states = num_cache_blocks(config, specs, sizes, torch.device("cpu"))
    assert (tokens, states) == (100 + 1000, 3 + 20)
    whole = replace(config, kv_cache_memory_bytes=block * 10**6)
    assert num_cache_blocks(whole, specs, sizes, torch.device("cpu")) == (6400, 64 * 5)
    cached = replace(config, prefix_cache_bytes=block * 225)
    assert max_cached_blocks(cached, specs, (tokens, states)) == [110, 2]
