"""Keys of prompts whose items see each other: every row has one range of places, which holds the keys that it sees."""

import random
from dataclasses import replace

import numpy as np
import pytest
from prompt_attention import ATTENTIONS
from sensorium.engine.bidirectional_spans import find_spans
from sensorium.models.families.molmo2.rules import media_runs, order_keys, order_runs


def seen(runs):
    """Return which tokens see which, by definition: causal, and tokens of items see all of them."""
    stop = runs[-1][1]
    inside = np.array([any(first <= token < last for first, last in runs) for token in range(stop)])
    return np.tri(stop, dtype=bool) | (inside[:, None] & inside)


@pytest.mark.parametrize("seed", range(30))
def test_every_row_has_one_range(seed):
    rng = random.Random(seed)
    runs, at = [], rng.randint(0, 3)
    for _ in range(rng.randint(2, 5)):
        runs.append((at, at + rng.randint(1, 5)))
        at = runs[-1][1] + rng.randint(1, 4)
    order, mask = order_runs(runs), seen(runs)
    assert sorted(order.places) == list(range(runs[-1][1]))
    first, stop = order.key_range[:, :, None]
    assert np.array_equal((order.places >= first) & (order.places < stop), mask)


def test_runs_that_touch_are_one(toy):
    features = [toy.item(2, 3), toy.item(5, 2), toy.item(9, 4, edges=True)]
    assert media_runs(features) == [(2, 7), (10, 14)]
    attention = ATTENTIONS["bidirectional_media"]
    assert find_spans(attention, 20, features) == [(0, 14)]
    assert find_spans(attention, 20, features[:2]) == [(2, 7)]
    assert find_spans(attention, 20, []) == []
    assert order_keys(features[:2]) is None
    assert len(order_keys(features).places) == 14


def answers(toy, requests, **options):
    core = toy.make_core(prompt_attention="bidirectional_media", **options)
    for request in requests:
        core.add(request)
    outputs = toy.drain(core)
    return core, {name: toy.tokens_of(several) for name, several in outputs.items()}


def two_items(toy, name, second=2, **changes):
    prompt = [5, 6, *[toy.PAD] * 6, 7, 8, *[toy.PAD] * 6, *range(9, 16)]
    return toy.request(name, prompt, [toy.item(2, 6), toy.item(10, 6, seed=second)], **changes)


def test_a_prefix_is_shared_only_if_all_items_are(toy):
    one = toy.request("one", two_items(toy, "").prompt_token_ids[:10], [toy.item(2, 6)])
    requests = [two_items(toy, "a"), one, two_items(toy, "b", second=3), two_items(toy, "c")]
    core, together = answers(toy, requests, seqs=1)
    for request in requests:
        assert together[request.request_id] == toy.alone(request, prompt_attention="bidirectional_media")[0]
    assert core.stats.prefix_hits == 20, "only c finds its blocks, those of a"


def test_the_first_item_sees_the_second(toy):
    """The answer to a text after the first of two items depends on the second, which comes later."""
    first, other = two_items(toy, "a"), two_items(toy, "a", second=3)
    causal = [
        toy.alone(replace(one, prompt_token_ids=one.prompt_token_ids[:10], features=one.features[:1])) for one in (first, other)
    ]
    assert causal[0] == causal[1]
    alone = [toy.alone(one, prompt_attention="bidirectional_media") for one in (first, other)]
    assert alone[0] != alone[1]


def test_an_item_that_is_appended_is_seen_by_earlier_ones(toy):
    whole = two_items(toy, "whole")
    begin = replace(
        whole, request_id="s", prompt_token_ids=whole.prompt_token_ids[:10], features=whole.features[:1], hold_open=True
    )
    core, _ = answers(toy, [replace(begin, params=replace(begin.params, max_tokens=1))])
    core.truncate("s", 10)
    core.append("s", whole.prompt_token_ids[10:], whole.features[1:])
    assert toy.tokens_of(toy.drain(core)["s"])[:1] == toy.alone(whole, prompt_attention="bidirectional_media")[0][:1]
