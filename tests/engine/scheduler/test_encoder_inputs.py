"""Items of many requests: encoded once, in few calls, within budgets; cached, evicted, refused, found again."""

import random
from dataclasses import replace

import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.mm.embeddings import ROWS
from sensorium.mm.fields import BatchedField, FieldElem


def test_an_item_used_twice_is_encoded_once(toy):
    core = toy.make_core()
    request = toy.make_request("r", random.Random(0), media=False)
    tokens = (5, *[toy.PAD] * 4, 6, *[toy.PAD] * 4, 7)
    request = replace(request, prompt_token_ids=tokens, features=(toy.item(1, 4), toy.item(6, 4)))
    core.add(request)
    core.add(replace(request, request_id="other"))
    toy.drain(core)
    assert core.executor.runner.model.encode_calls == [1]
    toy.assert_empty(core)


def test_items_of_several_requests_are_encoded_in_one_call(toy):
    core = toy.make_core()
    request = toy.make_request("r", random.Random(0), media=False, max_tokens=1)
    for i in range(3):
        core.add(
            replace(request, request_id=f"r{i}", prompt_token_ids=(5, *[toy.PAD] * 4, 7), features=(toy.item(1, 4, seed=i),))
        )
    core.step()
    assert core.executor.runner.model.encode_calls == [3]


def test_an_item_is_released_when_its_tokens_are_computed(toy):
    core = toy.make_core(budget=3)
    request = toy.make_request("r", random.Random(0), media=False)
    core.add(replace(request, prompt_token_ids=(5, *[toy.PAD] * 4, *[7] * 6), features=(toy.item(1, 4),)))
    (hash_,) = (feature.hash for feature in core.scheduler.requests["r"].features)
    other = replace(request, request_id="other", prompt_token_ids=(*[toy.PAD] * 40, 7), features=(toy.item(0, 40, seed=2),))
    core.add(other)
    core.step()
    assert hash_ in core.scheduler.encoder_cache
    core.step()  # tokens 3-5: the item ends at 5
    assert hash_ in core.scheduler.encoder_cache, "no sequence pins it, and none needs its room"
    core.step()
    core.step()
    core.step()
    assert hash_ not in core.scheduler.encoder_cache, "an item of the whole capacity evicted it"
    assert hash_ not in core.executor.runner.store.rows
    toy.drain(core)
    assert core.stats.encoder_evictions == 1
    toy.assert_empty(core)


def test_an_item_whose_hash_belongs_to_another_number_of_rows_is_refused(toy):
    core = toy.make_core()
    request = toy.make_request("a", random.Random(0), media=False)
    core.add(replace(request, prompt_token_ids=(*[toy.PAD] * 4, 7), features=(toy.item(0, 4),)))
    other = replace(toy.item(0, 5), hash=toy.item(0, 4).hash)
    with pytest.raises(InputError, match="encoder rows"):
        core.add(replace(request, request_id="b", prompt_token_ids=(*[toy.PAD] * 5, 7), features=(other,)))
    toy.drain(core)
    toy.assert_empty(core)


def test_an_image_that_64_requests_share_is_encoded_in_one_call(toy):
    core = toy.make_core(blocks=1000, seqs=64, budget=4096)
    for i in range(64):
        core.add(toy.request(f"r{i}", [5, *[toy.PAD] * 6, 10 + i], [toy.item(1, 6)]))
    outputs = toy.drain(core)
    assert core.executor.runner.model.encode_calls == [1]
    assert core.stats.encoder_calls == 1
    assert [outputs[f"r{i}"][-1].stats.items for i in range(64)] == [("encoded",), *[("cache",)] * 63]


def test_the_encoder_budget_of_a_step_holds_except_for_a_single_large_item(toy):
    core = toy.make_core(encoder_budget=8)
    for i in range(3):
        core.add(toy.request(f"r{i}", [5, 6, *[toy.PAD] * 5, 7], [toy.item(2, 5, seed=i)]))
    core.add(toy.request("wide", [*[toy.PAD] * 20, 7], [toy.item(0, 20, seed=9)]))
    steps = [toy.scheduled(core) for _ in range(4)]
    assert [len(encoded) for _, encoded in steps] == [1, 1, 1, 1]
    assert steps[0][0] == {"r0": 8, "r1": 2, "r2": 2}, "the others are cut before their items"
    assert steps[3][0]["wide"] == 21


def test_a_prompt_is_cut_before_an_item_that_the_encoder_cache_has_no_room_for(toy):
    core = toy.make_core(encoder_rows=8, budget=9)
    core.add(toy.request("a", [5, *[toy.PAD] * 8, 6, 7], [toy.item(1, 8)]))
    core.add(toy.request("b", [5, *[toy.PAD] * 8, 6, 7], [toy.item(1, 8, seed=2)]))
    assert toy.scheduled(core)[0] == {"a": 9}
    assert toy.scheduled(core)[0] == {"a": 2, "b": 7}
    outputs = toy.drain(core)
    assert core.stats.encoder_evictions == 1
    assert core.stats.cut_items == 1
    for i, name in enumerate("ab"):
        got, request = toy.tokens_of(outputs[name]), toy.request(name, [5, *[toy.PAD] * 8, 6, 7], [toy.item(1, 8, seed=1 + i)])
        assert got == toy.alone(request)[0][-len(got) :]


def test_an_item_larger_than_the_cache_is_refused_by_name(toy):
    core = toy.make_core(encoder_rows=8)
    with pytest.raises(InputError, match=r"image 0: its 9 encoder rows take 576 bytes, but encoder_cache_bytes is 512"):
        core.add(toy.request("a", [*[toy.PAD] * 9, 6], [toy.item(0, 9)]))
    toy.assert_empty(core)


def test_preemption_does_not_evict_encoder_rows(toy):
    """Every sequence loses its blocks and is computed again; nothing is encoded twice, even without a prefix cache."""
    core = toy.make_core(blocks=9, block_size=4, caching=False)
    requests = [toy.request(f"r{i}", [5, *[toy.PAD] * 8, 6 + i], [toy.item(1, 8, seed=i)]) for i in range(3)]
    requests = [replace(request, params=replace(request.params, max_tokens=12)) for request in requests]
    for request in requests:
        core.add(request)
    outputs = toy.drain(core)
    assert core.stats.preemptions >= 2
    assert core.stats.encoder_calls == 3
    for request in requests:
        assert toy.tokens_of(outputs[request.request_id]) == toy.alone(request)[0]
    toy.assert_empty(core)


def encoder_decoder(toy, **options):
    return toy.make_core(model=toy.ToyModel(reads_encoder_side=True), **options)


@pytest.mark.parametrize("budget", [3, 64])
def test_an_encoder_input_is_encoded_once_written_once_and_shared(toy, budget):
    audios = [toy.item(0, 9, seed=1), toy.item(0, 9, seed=2)]
    requests = [toy.request(f"r{i}", [5, 6, 7, 8, 9, 10 + i], cross=(audios[i % 2],)) for i in range(4)]
    core = encoder_decoder(toy, budget=budget, seqs=2, block_size=4)
    for request in requests:
        core.add(request)
    outputs = toy.drain(core)
    assert core.stats.encoder_calls == 2
    for request in requests:
        single = encoder_decoder(toy, budget=500, caching=False)
        single.add(request)
        assert toy.tokens_of(outputs[request.request_id]) == toy.tokens_of(toy.drain(single)[request.request_id])
    cached = [outputs[f"r{i}"][-1].stats.cached_tokens for i in range(4)]
    assert cached == [0, 0, 4, 4], "blocks are shared only between equal audio and equal text"
    core.add(replace(requests[0], request_id="again"))
    writes = [task.write_cross for task in core.scheduler.schedule().scheduled]
    assert writes == [False], "its keys and values are still there"
    for other in ({"adapter": "a"}, {"salt": "s"}):
        own = encoder_decoder(toy, block_size=4)
        own.add(requests[0])
        toy.drain(own)
        own.add(replace(requests[0], request_id="again", **other))
        assert own.scheduler.schedule().scheduled[0].write_cross, "another adapter or tenant makes its own"
    other = toy.request("x", [5, 6, 7, 8, 9, 10], cross=(audios[1],))
    means = []
    for audio in audios:
        single = encoder_decoder(toy)
        single.add(replace(other, cross=(audio,), params=replace(other.params, logprobs=0)))
        means.append([entry for output in toy.drain(single)["x"] for entry in output.logprobs or ()])
    assert means[0] != means[1], "the answer is read from it"
    with pytest.raises(InputError, match="needs an encoder input"):
        core.add(replace(other, cross=()))
    with pytest.raises(InputError, match="takes no encoder input"):
        toy.make_core().add(other)


def test_a_failing_item_is_quarantined_and_fails_no_other_request(toy):
    core = toy.make_core(seqs=3)
    bad = [toy.request(f"bad{i}", [5, *[toy.PAD] * 4, 7 + i], [toy.item(1, 4, seed=666)]) for i in range(5)]
    good = [toy.request(f"good{i}", [5, *[toy.PAD] * 4, 7], [toy.item(1, 4, seed=i)]) for i in range(2)]
    for request in (bad[0], good[0], good[1], *bad[1:4]):
        core.add(request)
    outputs = toy.drain(core)
    assert [outputs[f"bad{i}"][-1].finish_reason for i in range(4)] == ["error"] * 4
    assert core.executor.runner.model.encode_calls == [3, 1, 2], (
        "all, the first half, the other half; the failing item is tried once"
    )
    for request in good:
        assert toy.tokens_of(outputs[request.request_id]) == toy.alone(request)[0]
    with pytest.raises(InputError, match="image 0: this item made the encoder fail"):
        core.add(bad[4])
    assert core.stats.quarantined == 1
    toy.assert_empty(core)


def test_encoder_rows_on_disk_are_found_by_the_next_engine(toy, tmp_path):
    request = toy.request("r", [5, *[toy.PAD] * 4, 7], [toy.item(1, 4)])
    answers = []
    for _ in range(2):
        core = toy.make_core(folder=str(tmp_path))
        core.add(request)
        answers.append(toy.drain(core)["r"])
        core.executor.runner.store.close()
    assert toy.tokens_of(answers[0]) == toy.tokens_of(answers[1])
    assert core.executor.runner.model.encode_calls == []
    assert (core.stats.encoder_calls, core.stats.encoder_disk_hits, answers[1][-1].stats.items) == (0, 1, ("disk",))


def test_precomputed_rows_are_cast_to_the_dtype_they_are_counted_with(toy):
    made = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    answers = []
    for dtype in (torch.float32, torch.float64):
        given = replace(toy.item(1, 5), kwargs={ROWS: FieldElem(made.to(dtype), BatchedField())})
        core = toy.make_core()
        core.add(toy.request("a", [5, *[toy.PAD] * 5, 6], [given]))
        answers.append(toy.tokens_of(toy.drain(core)["a"]))
        toy.assert_empty(core)
    assert answers[0] == answers[1] != []


def test_two_items_may_share_a_range(toy):
    core = toy.make_core(budget=3)
    request = toy.request("r", (5, *[toy.PAD] * 9, 7), toy.pair(1, 3))
    core.add(request)
    assert toy.tokens_of(toy.drain(core)["r"]) == toy.alone(request)[0]
    toy.assert_empty(core)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: [a, replace(b, range=replace(b.range, is_embed=a.range.is_embed))], "not inside"),
        (lambda a, b: [a, replace(b, range=replace(b.range, offset=2))], "not inside"),
        (lambda a, b: [a, b, b], "not inside"),
        (lambda a, b: [a, replace(b, geometry=replace(b.geometry, w=9))], "4 placeholder tokens stand for 9 encoder rows"),
    ],
)
def test_other_overlaps_of_items_are_refused(toy, change, message):
    core = toy.make_core()
    with pytest.raises(InputError, match=message):
        core.add(toy.request("r", (5, *[toy.PAD] * 9, 7, 7), change(*toy.pair(1, 3))))
    toy.assert_empty(core)


def test_items_that_share_a_range_must_fit_into_the_encoder_cache_together(toy):
    with pytest.raises(InputError, match="7 encoder rows are needed at once, but there is room for 6"):
        toy.make_core(encoder_rows=6).add(toy.request("r", (5, *[toy.PAD] * 9, 7), toy.pair(1, 3)))


@pytest.mark.parametrize("options", [{"encoder_rows": 8}, {"encoder_budget": 5}, {"encoder_rows": 8, "encoder_budget": 5}])
def test_a_sequence_does_not_pin_one_of_two_items_while_the_other_has_no_room(toy, options):
    """Otherwise sequences that share no item could block each other forever."""
    core = toy.make_core(budget=30, **options)
    requests = [toy.request(f"r{i}", (5, *[toy.PAD] * 9, 7), toy.pair(1, 3, seed=2 * i)) for i in range(4)]
    for request in requests:
        core.add(request)
    outputs = toy.drain(core)
    for request in requests:
        assert toy.tokens_of(outputs[request.request_id]) == toy.alone(request)[0]
    toy.assert_empty(core)


def test_deepstack_rows_count_whole_and_reach_their_layers(toy):
    """The result does not depend on how the item is cut into chunks."""
    with pytest.raises(InputError, match="its 4 encoder rows take 768 bytes, but encoder_cache_bytes is 576"):
        toy.make_core(encoder_rows=3, model=toy.ToyModel(levels=3)).add(
            toy.request("r", (5, *[toy.PAD] * 4, 7), [toy.item(1, 4)])
        )
    core = toy.make_core(budget=3, encoder_rows=4, model=toy.ToyModel(levels=3))
    request = toy.request("r", (5, *[toy.PAD] * 4, 7), [toy.item(1, 4)])
    core.add(request)
    answer = toy.tokens_of(toy.drain(core)["r"])
    assert core.stats.encoder_bytes == core.stats.encoder_capacity == 4 * 3 * 64
    assert answer == toy.alone(request, toy.ToyModel(levels=3))[0]
    assert answer != toy.alone(request)[0]
    toy.assert_empty(core)
