"""Block hashes, and what the prefix cache saves for sequences with equal prefixes."""

import random
from dataclasses import replace

import pytest
from sensorium.engine.kv_cache.block_hash import extend_block_hashes, hash_block, hash_cross_blocks, hash_root, items_in_block

ROOT = hash_root("", "", ())


@pytest.mark.parametrize(
    ("start", "stop", "found"),
    [(0, 6, [("h1", 0)]), (3, 8, [("h1", -3)]), (6, 10, []), (0, 15, [("h1", 0), ("h2", 10)])],
)
def test_items_in_a_block(toy, start, stop, found):
    features = [replace(toy.item(0, 5), hash="h1"), replace(toy.item(10, 5), hash="h2")]
    assert list(items_in_block(features, start, stop)) == found


def test_another_image_changes_the_hashes_from_its_first_block_on(toy):
    tokens = list(range(4, 24))
    hashes = {}
    for name in ("h1", "h2"):
        hashes[name] = []
        extend_block_hashes(hashes[name], ROOT, tokens, [replace(toy.item(9, 3), hash=name)], 4)
    assert [a == b for a, b in zip(*hashes.values(), strict=True)] == [True, True, False, False, False]


def test_tokens_offsets_salt_adapter_and_encoder_input_all_change_the_hash():
    hashes = [
        hash_block(ROOT, (1, 2), ()),
        hash_block(ROOT, (2, 1), ()),
        hash_block(ROOT, (1, 2), (("h", 0),)),
        hash_block(ROOT, (1, 2), (("h", 1),)),
        hash_block(hash_root("tenant", "", ()), (1, 2), ()),
        hash_block(hash_root("", "tenant", ()), (1, 2), ()),
        hash_block(hash_root("", "", ("tenant",)), (1, 2), ()),
        *hash_cross_blocks(hash_root("", "", ("h",)), 2),
        *hash_cross_blocks(hash_root("", "", ("g",)), 1),
        *hash_cross_blocks(hash_root("", "", ("h", "g")), 1),
        *hash_cross_blocks(hash_root("", "", ("g", "h")), 1),
        *hash_cross_blocks(hash_root("", "", ("hg",)), 1),
    ]
    assert len(set(hashes)) == len(hashes)
    assert hash_block(ROOT, [1, 2], ()) == hashes[0]


def generate(toy, core, name, tokens, features=(), **changes):
    request = toy.make_request(name, random.Random(0), media=False, max_tokens=3, ignore_eos=True)
    core.add(replace(request, prompt_token_ids=tuple(tokens), features=tuple(features), **changes))
    outputs = toy.drain(core)[name]
    return toy.tokens_of(outputs), outputs[-1].stats


IMAGE = [5, *[3] * 10, 6, 7]  # the item is at 1


def test_a_new_question_about_an_image_encodes_nothing_and_computes_from_the_first_new_block(toy):
    core = toy.make_core(block_size=4)
    _, cold = generate(toy, core, "a", [*IMAGE, 8, 9, 10], [toy.item(1, 10)])
    rows = len(core.executor.runner.model.forward_rows)
    answer, warm = generate(toy, core, "b", [*IMAGE, 20, 21, 22], [toy.item(1, 10)])
    assert (cold.cached_tokens, cold.items) == (0, ("encoded",))
    assert (warm.cached_tokens, warm.items) == (12, ("prefix",))
    assert core.executor.runner.model.encode_calls == [1]
    assert core.executor.runner.model.forward_rows[rows] == 4
    assert answer == generate(toy, toy.make_core(caching=False), "b", [*IMAGE, 20, 21, 22], [toy.item(1, 10)])[0]
    assert core.stats.prefix_hits == 12


def test_a_fully_cached_prompt_still_computes_its_last_token(toy):
    core = toy.make_core(block_size=4)
    first = generate(toy, core, "a", range(10, 18))
    again = generate(toy, core, "b", range(10, 18))
    assert first[0] == again[0]
    assert again[1].cached_tokens == 4, "the block of the last token is computed again, in a new block"


@pytest.mark.parametrize("changes", [{"salt": "other"}, {"adapter": "other"}])
def test_other_tenants_and_adapters_share_nothing(toy, changes):
    core = toy.make_core(block_size=4)
    generate(toy, core, "a", range(10, 24))
    assert generate(toy, core, "b", range(10, 24), **changes)[1].cached_tokens == 0
    assert generate(toy, core, "c", range(10, 24), **changes)[1].cached_tokens == 12


def test_the_next_turn_finds_the_blocks_of_the_answer(toy):
    core = toy.make_core(block_size=4)
    answer, _ = generate(toy, core, "a", range(10, 20))
    _, stats = generate(toy, core, "b", [*range(10, 20), *answer, 5, 6])
    assert stats.cached_tokens == 12


def test_prompt_logprobs_cover_all_tokens_although_they_are_cached(toy):
    core = toy.make_core(block_size=4)
    generate(toy, core, "a", range(10, 24))
    request = toy.make_request("b", random.Random(0), media=False, max_tokens=1, prompt_logprobs=0)
    core.add(replace(request, prompt_token_ids=tuple(range(10, 24))))
    (output,) = toy.drain(core)["b"]
    assert len(output.prompt_logprobs) == 14
    assert output.stats.cached_tokens == 0


def test_without_prefix_caching_nothing_is_cached(toy):
    core = toy.make_core(block_size=4, caching=False)
    generate(toy, core, "a", range(10, 24))
    assert generate(toy, core, "b", range(10, 24))[1].cached_tokens == 0
    assert core.stats.blocks_cached == 0


def test_the_number_of_cached_blocks_is_capped(toy):
    core = toy.make_core(block_size=4, max_cached=2)
    generate(toy, core, "a", range(10, 30))
    assert core.stats.blocks_cached == 2
    assert generate(toy, core, "b", range(10, 30))[1].cached_tokens == 8, "the first blocks are evicted last"


def test_a_rollback_into_a_shared_block_does_not_change_it_for_others(toy):
    """Two live sequences share blocks; one is rolled back into a shared block and continues differently."""
    core = toy.make_core(block_size=4)
    base = toy.make_request("a", random.Random(0), media=False, max_tokens=2, ignore_eos=True, hold_open=True)
    base = replace(base, prompt_token_ids=tuple(range(10, 24)))
    core.add(base)
    toy.drain(core)
    core.add(replace(base, request_id="b"))
    toy.drain(core)
    core.truncate("b", 6)
    core.append("b", [50, 51, 52])
    got = toy.tokens_of(toy.drain(core)["b"])
    core.append("a", [60])
    first_answer = generate(toy, toy.make_core(), "y", range(10, 24))[0][:2]
    histories = [[*range(10, 16), 50, 51, 52], [*range(10, 24), *first_answer, 60]]
    expected = [generate(toy, toy.make_core(caching=False), "x", tokens)[0][:2] for tokens in histories]
    assert [got, toy.tokens_of(toy.drain(core)["a"])] == expected
    for name in "ab":
        core.abort(name)
    toy.assert_empty(core)
