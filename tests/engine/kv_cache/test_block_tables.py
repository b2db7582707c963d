"""Cache groups with a window: blocks they hold, find and free. Answers are the same as with all blocks held."""

from dataclasses import replace

import pytest
from sensorium.engine.kv_cache.block_pool import NULL_BLOCK

WINDOW = 6


@pytest.fixture
def core(toy):
    return lambda **options: toy.make_core(model=toy.ToyModel(window=WINDOW), block_size=4, **options)


def expected(toy, request):
    return toy.alone(request, toy.ToyModel(window=WINDOW))[0]


def held(core, name):
    """Return the number of blocks in the full group and, without null blocks, in the window group."""
    full, near = core.scheduler.requests[name].block_ids
    return len(full), sum(block != NULL_BLOCK for block in near)


def test_a_long_sequence_holds_only_the_blocks_of_its_window(toy, core):
    """A sequence holds its window and the blocks of one step, at the worst alignment."""
    engine = core(budget=5, caching=False)
    request = toy.random_prompt("r", 60, max_tokens=30)
    engine.add(request)
    seen, execute_model = [], engine.executor.runner.execute_model

    def watched(output, after=None):
        seen.extend(held(engine, task.request_id) for task in output.scheduled)
        return execute_model(output, after)

    engine.executor.runner.execute_model = watched
    assert toy.tokens_of(toy.drain(engine)["r"]) == expected(toy, request)
    assert max(near for _, near in seen) == (WINDOW + 5 + 4 - 3) // 4 + 1 == 4
    assert seen[-1][0] == 23
    toy.assert_empty(engine)


def test_a_cached_prefix_needs_only_the_blocks_of_its_last_window(toy, core):
    engine = core(blocks=40)
    first = toy.random_prompt("a", 41)
    engine.add(first)
    toy.drain(engine)
    near = engine.scheduler.block_pools.pools[1]
    for index, block_hash in enumerate(list(near._block_of)):
        if index not in (8, 9):  # of the tokens 32 to 39, of which row 40 sees the last 5
            near.remove_hash(near._block_of[block_hash])
    again = replace(first, request_id="b")
    engine.add(again)
    (outputs,) = toy.drain(engine).values()
    assert outputs[-1].stats.cached_tokens == 40
    assert toy.tokens_of(outputs) == expected(toy, first)


def test_the_cached_prefix_is_shorter_where_a_block_of_its_last_window_is_missing(toy, core):
    engine = core(blocks=40)
    first = toy.random_prompt("a", 41)
    engine.add(first)
    toy.drain(engine)
    near = engine.scheduler.block_pools.pools[1]
    near.remove_hash(near._block_of[list(near._block_of)[8]])  # of the tokens 32 to 35
    engine.add(replace(first, request_id="b"))
    (outputs,) = toy.drain(engine).values()
    assert outputs[-1].stats.cached_tokens == 32
    assert toy.tokens_of(outputs) == expected(toy, first)


@pytest.mark.parametrize("blocks", [64, 18])
@pytest.mark.parametrize("keep", [41, 44, 58])
def test_a_running_sequence_goes_on_after_a_rollback(toy, core, blocks, keep):
    """The repair of a loop rolls back in the same way. With small pools, the sequence may have to wait for blocks first."""
    engine = core(blocks=blocks, budget=11, seqs=2)
    request, other = toy.random_prompt("r", 40, max_tokens=25), toy.random_prompt("other", 9, seed=4, max_tokens=30)
    answer = expected(toy, request)
    for added in (request, other):
        engine.add(added)
    outputs = {"r": [], "other": []}
    for _ in range(200):
        for output in engine.step().outputs if len(outputs["r"]) < 22 else ():
            outputs[output.request_id] += output.token_ids
    engine.truncate("r", keep)
    for name, more in toy.drain(engine).items():
        outputs[name] = outputs[name][: keep - 40] if name == "r" else outputs[name]
        outputs[name] += toy.tokens_of(more)
    assert outputs["r"] == answer
    assert outputs["other"] == expected(toy, other)
    toy.assert_empty(engine)
