"""What a block is known by, and what sequences that begin alike save."""

import random
from dataclasses import replace

import pytest
from sensorium.engine.prefix_cache import block_items, block_key, cross_keys, extend_keys, root_key

ROOT = root_key("", "", "")


@pytest.mark.parametrize(
    ("start", "stop", "found"),
    [(0, 6, [("h1", 0)]), (3, 8, [("h1", -3)]), (6, 10, []), (0, 15, [("h1", 0), ("h2", 10)])],
)
def test_items_of_a_block(toy, start, stop, found):
    features = [replace(toy.item(0, 5), hash="h1"), replace(toy.item(10, 5), hash="h2")]
    assert list(block_items(features, start, stop)) == found


def test_another_picture_another_key_from_its_first_block_on(toy):
    tokens = list(range(4, 24))
    keys = {}
    for name in ("h1", "h2"):
        keys[name] = []
        extend_keys(keys[name], ROOT, tokens, [replace(toy.item(9, 3), hash=name)], 4)
    assert [a == b for a, b in zip(*keys.values(), strict=True)] == [True, True, False, False, False]


def test_tokens_place_salt_adapter_and_encoder_side_all_count():
    keys = [
        block_key(ROOT, (1, 2), ()),
        block_key(ROOT, (2, 1), ()),
        block_key(ROOT, (1, 2), (("h", 0),)),
        block_key(ROOT, (1, 2), (("h", 1),)),
        block_key(root_key("tenant", "", ""), (1, 2), ()),
        block_key(root_key("", "tenant", ""), (1, 2), ()),
        block_key(root_key("", "", "tenant"), (1, 2), ()),
        *cross_keys(root_key("", "", "h"), 2),
        *cross_keys(root_key("", "", "g"), 1),
    ]
    assert len(set(keys)) == len(keys)
    assert block_key(ROOT, [1, 2], ()) == keys[0]


def ask(toy, core, name, tokens, features=(), **changes):
    request = toy.make_request(name, random.Random(0), media=False, max_tokens=3, ignore_eos=True)
    core.add(replace(request, prompt_token_ids=tuple(tokens), features=tuple(features), **changes))
    outputs = toy.drain(core)[name]
    return toy.tokens_of(outputs), outputs[-1].stats


PICTURE = [5, *[3] * 10, 6, 7]  # the item is at 1


def test_same_picture_new_question_encodes_nothing_and_starts_at_the_first_new_block(toy):
    core = toy.make_core(block_size=4)
    _, cold = ask(toy, core, "a", [*PICTURE, 8, 9, 10], [toy.item(1, 10)])
    rows = len(core.runner.model.forward_rows)
    answer, warm = ask(toy, core, "b", [*PICTURE, 20, 21, 22], [toy.item(1, 10)])
    assert (cold.cached_tokens, cold.items) == (0, ("encoded",))
    assert (warm.cached_tokens, warm.items) == (12, ("prefix",))
    assert core.runner.model.encode_calls == [1]
    assert core.runner.model.forward_rows[rows] == 4
    assert answer == ask(toy, toy.make_core(caching=False), "b", [*PICTURE, 20, 21, 22], [toy.item(1, 10)])[0]
    assert core.stats.prefix_hits == 12


def test_a_prompt_that_is_all_there_still_computes_its_last_token(toy):
    core = toy.make_core(block_size=4)
    first = ask(toy, core, "a", range(10, 18))
    again = ask(toy, core, "b", range(10, 18))
    assert first[0] == again[0]
    assert again[1].cached_tokens == 4, "the block of the last token is computed anew, in a block of its own"


@pytest.mark.parametrize("changes", [{"salt": "other"}, {"adapter": "other"}])
def test_other_tenants_and_adapters_share_nothing(toy, changes):
    core = toy.make_core(block_size=4)
    ask(toy, core, "a", range(10, 24))
    assert ask(toy, core, "b", range(10, 24), **changes)[1].cached_tokens == 0
    assert ask(toy, core, "c", range(10, 24), **changes)[1].cached_tokens == 12


def test_answers_are_found_by_the_next_turn(toy):
    core = toy.make_core(block_size=4)
    answer, _ = ask(toy, core, "a", range(10, 20))
    _, stats = ask(toy, core, "b", [*range(10, 20), *answer, 5, 6])
    assert stats.cached_tokens == 12


def test_logprobs_of_a_prompt_are_of_all_its_tokens(toy):
    core = toy.make_core(block_size=4)
    ask(toy, core, "a", range(10, 24))
    request = toy.make_request("b", random.Random(0), media=False, max_tokens=1, prompt_logprobs=0)
    core.add(replace(request, prompt_token_ids=tuple(range(10, 24))))
    (output,) = toy.drain(core)["b"]
    assert len(output.prompt_logprobs) == 14
    assert output.stats.cached_tokens == 0


def test_off_means_off(toy):
    core = toy.make_core(block_size=4, caching=False)
    ask(toy, core, "a", range(10, 24))
    assert ask(toy, core, "b", range(10, 24))[1].cached_tokens == 0
    assert core.stats.blocks_kept == 0


def test_a_cap_on_what_is_kept(toy):
    core = toy.make_core(block_size=4, kept=2)
    ask(toy, core, "a", range(10, 30))
    assert core.stats.blocks_kept == 2
    assert ask(toy, core, "b", range(10, 30))[1].cached_tokens == 8, "the beginning stays longest"


def test_a_rollback_into_a_shared_block_leaves_it_to_the_others(toy):
    """Two live sequences share blocks; one goes back into a shared one and writes something else there."""
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
    expected = [
        ask(toy, toy.make_core(caching=False), "x", [*range(10, 16), 50, 51, 52])[0][:2],
        ask(
            toy, toy.make_core(caching=False), "x", [*range(10, 24), *ask(toy, toy.make_core(), "y", range(10, 24))[0][:2], 60]
        )[0][:2],
    ]
    assert [got, toy.tokens_of(toy.drain(core)["a"])] == expected
    for name in "ab":
        core.abort(name)
    toy.assert_empty(core)
