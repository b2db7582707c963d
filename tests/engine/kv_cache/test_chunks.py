"""Cache groups of layers that attend within chunks: rows of a batch, blocks held and prefix hits."""

import random
from dataclasses import replace

import pytest
import torch
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import EngineConfig
from sensorium.engine.kv_cache.block_pool import NULL_BLOCK
from sensorium.engine.setup.memory import MaxSizes, num_cache_blocks
from sensorium.engine.types import ScheduledRequest
from sensorium.engine.worker.batch import KVCaches, build_batch
from sensorium.engine.worker.sequence_state import SequenceState
from sensorium.models.interface import CacheSpec

CHUNK = 8
SPEC = CacheSpec("chunk", 1, 8, torch.float32, CHUNK)


@pytest.fixture
def core(toy):
    return lambda **options: toy.make_core(model=toy.ToyModel(chunk=CHUNK), block_size=4, **options)


def expected(toy, request):
    return toy.alone(request, toy.ToyModel(chunk=CHUNK))[0]


def test_each_chunk_of_a_sequence_is_a_request_of_the_metadata(toy):
    request = replace(toy.make_request("r", random.Random(0), media=False), prompt_token_ids=tuple(range(4, 30)))
    sequence = SequenceState(request, rope_axes=3)
    tasks = [ScheduledRequest("a", 6, 12, ((1, 2, 3, 4, 5),)), ScheduledRequest("b", 16, 1, ((-1, -1, -1, -1, 9),))]
    batch = build_batch([(sequence, task) for task in tasks], {}, KVCaches([], [0], [SPEC], 4), torch.from_numpy)
    attn = batch.attn[0]
    assert attn.query_start_loc == (0, 2, 10, 12, 13)  # tokens 6 and 7, 8 to 15, 16 and 17; token 16 of the other
    assert attn.seq_lens == (8, 8, 2, 1)
    assert attn.block_tables.tolist() == [[1, 2], [3, 4], [5, 0], [9, 0]]
    assert attn.slot_mapping.tolist() == [10, 11, *range(12, 20), 20, 21, 36]
    assert attn.window is None


@pytest.mark.parametrize("budget", [5, 40])
def test_a_sequence_holds_only_the_blocks_of_its_chunk_and_of_one_step(toy, core, budget):
    engine = core(budget=budget, caching=False)
    request = toy.random_prompt("r", 60, max_tokens=30)
    engine.add(request)
    seen, execute_model = [], engine.executor.runner.execute_model

    def watched(output, after=None):
        for task in output.scheduled:
            blocks = engine.scheduler.requests[task.request_id].block_ids[1]
            seen.append(sum(block != NULL_BLOCK for block in blocks))
        return execute_model(output, after)

    engine.executor.runner.execute_model = watched
    assert toy.tokens_of(toy.drain(engine)["r"]) == expected(toy, request)
    assert max(seen) <= -(-(CHUNK + budget) // 4)
    assert max(seen[-20:]) == 2
    toy.assert_empty(engine)


@pytest.mark.parametrize(("lost", "cached"), [((), 40), ((8,), 40), ((9,), 36), ((9, 8), 32), ((9, 8, 6), 32)])
def test_a_cached_prefix_needs_only_the_blocks_of_its_last_chunk(toy, core, lost, cached):
    """Tokens 40 on are in a chunk of their own, so a prefix of 40 needs none; one of 36 needs the block of tokens 32 to 35."""
    engine = core(blocks=40)
    first = toy.random_prompt("a", 41)
    engine.add(first)
    toy.drain(engine)
    near = engine.scheduler.block_pools.pools[1]
    hashes = list(near._block_of)
    full = engine.scheduler.block_pools.pools[0]
    for index in lost:
        near.remove_hash(near._block_of[hashes[index]])
    if cached < 40:
        full.remove_hash(full._block_of[hashes[cached // 4]])
    engine.add(replace(first, request_id="b"))
    (outputs,) = toy.drain(engine).values()
    assert outputs[-1].stats.cached_tokens == cached
    assert toy.tokens_of(outputs) == expected(toy, first)


def test_a_block_size_that_does_not_divide_a_chunk_is_refused():
    config, sizes = EngineConfig(model="m", block_size=3, device="cpu"), MaxSizes(64, 64)
    with pytest.raises(ConfigError, match=r"block_size=3 does not divide 8, .* give a divisor of 8, such as 8"):
        num_cache_blocks(config, [SPEC], sizes, torch.device("cpu"))
