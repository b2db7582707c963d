"""The engine around a toy model: whatever is batched, cut, preempted or aborted, a sequence reads as if it ran alone."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.mm.errors import InputError


def alone(toy, request):
    core = toy.make_core(blocks=64, budget=500)
    core.add(request)
    outputs = toy.drain(core)[request.request_id]
    return toy.tokens_of(outputs), outputs[-1].finish_reason


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
@pytest.mark.parametrize("blocks", [14, 64])
def test_batched_equals_alone_at_every_chunk_size(toy, chunk, blocks):
    rng = random.Random(5)
    requests = [toy.make_request(f"r{i}", rng) for i in range(12)]
    core = toy.make_core(blocks=blocks, budget=chunk)
    for request in requests:
        core.add(request)
    outputs = toy.drain(core)
    for request in requests:
        got = outputs[request.request_id]
        assert (toy.tokens_of(got), got[-1].finish_reason) == alone(toy, request)
    toy.assert_empty(core)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(12, 30), chunk=st.integers(1, 40), seqs=st.integers(1, 6))
def test_random_arrivals_and_aborts_leave_nothing_behind(toy, seed, blocks, chunk, seqs):
    rng = random.Random(seed)
    core = toy.make_core(blocks=blocks, budget=chunk, seqs=seqs)
    coming = [toy.make_request(f"r{i}", rng) for i in range(8)]
    requests, outputs, aborted = {r.request_id: r for r in coming}, {}, set()
    while coming or core.scheduler.requests:
        if coming and rng.random() < 0.4:
            core.add(coming.pop())
        if core.scheduler.requests and rng.random() < 0.05:
            aborted.add(name := rng.choice(list(core.scheduler.requests)))
            core.abort(name)
        for output in core.step():
            outputs.setdefault(output.request_id, []).append(output)
    for name, request in requests.items():
        if name not in aborted:
            assert toy.tokens_of(outputs[name]) == alone(toy, request)[0]
    toy.assert_empty(core)


def test_preemption_recomputes_and_keeps_order(toy):
    rng = random.Random(1)
    requests = [toy.make_request(f"r{i}", rng, max_tokens=20, ignore_eos=True) for i in range(4)]
    core = toy.make_core(blocks=16, budget=64, max_len=64)
    for request in requests:
        core.add(request)
    outputs = toy.drain(core)
    assert sum(core.runner.model.forward_rows) > sum(len(r.prompt_token_ids) + 19 for r in requests), "nothing was preempted"
    for request in requests:
        assert toy.tokens_of(outputs[request.request_id]) == alone(toy, request)[0]
    toy.assert_empty(core)


def test_priority_is_served_first(toy):
    rng = random.Random(2)
    core = toy.make_core(seqs=1)
    for i, priority in enumerate([1, 1, 0]):
        core.add(replace(toy.make_request(f"r{i}", rng, max_tokens=1), priority=priority))
    finished = [output.request_id for _ in range(3) for output in core.step()]
    assert finished == ["r2", "r0", "r1"]


def test_decode_rows_go_before_prompts(toy):
    rng = random.Random(3)
    core = toy.make_core(budget=4)
    short = toy.make_request("short", rng, media=False, max_tokens=5, ignore_eos=True)
    core.add(short)
    while not core.step()[0].token_ids:
        pass
    core.add(toy.make_request("long", rng, max_tokens=1))
    core.step()
    assert core.runner.model.forward_rows[-1] == 4
    output = core.scheduler.schedule()
    assert [task.request_id for task in output.scheduled] == ["short", "long"]
    assert [task.num_tokens for task in output.scheduled] == [1, 3]


def test_too_long_prompt_is_refused_and_changes_nothing(toy):
    core = toy.make_core(blocks=4, block_size=4)
    rng = random.Random(0)
    long = toy.make_request("long", rng, media=False)
    with pytest.raises(InputError, match="prompt has 16 tokens, max_model_len is 16"):
        core.add(replace(long, prompt_token_ids=(5,) * 16))
    with pytest.raises(InputError, match="no tokens"):
        core.add(replace(long, prompt_token_ids=()))
    with pytest.raises(InputError, match="vocabulary"):
        core.add(replace(long, prompt_token_ids=(101,)))
    toy.assert_empty(core)


def test_answer_ends_where_the_context_ends(toy):
    core = toy.make_core(blocks=4, block_size=4)
    core.add(toy.make_request("r", random.Random(0), media=False, max_tokens=None, ignore_eos=True))
    outputs = toy.drain(core)["r"]
    assert outputs[-1].finish_reason == "length"
    assert len(toy.tokens_of(outputs)) == 16 - len(toy.make_request("r", random.Random(0), media=False).prompt_token_ids)
    toy.assert_empty(core)


def test_an_item_used_twice_is_encoded_once(toy):
    core = toy.make_core()
    request = toy.make_request("r", random.Random(0), media=False)
    tokens = (5, *[toy.PAD] * 4, 6, *[toy.PAD] * 4, 7)
    request = replace(request, prompt_token_ids=tokens, features=(toy.item(1, 4), toy.item(6, 4)))
    core.add(request)
    core.add(replace(request, request_id="other"))
    toy.drain(core)
    assert core.runner.model.encode_calls == [1]
    toy.assert_empty(core)


def test_items_of_several_requests_are_encoded_in_one_call(toy):
    core = toy.make_core()
    request = toy.make_request("r", random.Random(0), media=False, max_tokens=1)
    for i in range(3):
        core.add(
            replace(request, request_id=f"r{i}", prompt_token_ids=(5, *[toy.PAD] * 4, 7), features=(toy.item(1, 4, seed=i),))
        )
    core.step()
    assert core.runner.model.encode_calls == [3]


def test_an_item_is_released_when_its_tokens_are_computed(toy):
    core = toy.make_core(budget=3)
    request = toy.make_request("r", random.Random(0), media=False)
    core.add(replace(request, prompt_token_ids=(5, *[toy.PAD] * 4, *[7] * 6), features=(toy.item(1, 4),)))
    (hash_,) = (feature.hash for feature in core.scheduler.requests["r"].features)
    other = replace(request, request_id="other", prompt_token_ids=(*[toy.PAD] * 40, 7), features=(toy.item(0, 40, seed=2),))
    core.add(other)
    core.step()
    assert hash_ in core.scheduler.encoder
    core.step()  # tokens 3-5: the item ends at 5
    assert hash_ in core.scheduler.encoder, "nobody reads it, and nobody needs its room"
    core.step()
    core.step()
    core.step()
    assert hash_ not in core.scheduler.encoder, "an item of the whole capacity took its place"
    assert hash_ not in core.runner.store.rows
    toy.drain(core)
    assert core.stats.encoder_evictions == 1
    toy.assert_empty(core)


def test_a_bad_item_ends_only_its_own_request(toy):
    rng = random.Random(0)
    core = toy.make_core()
    good = [toy.make_request(f"good{i}", rng) for i in range(3)]
    bad = replace(good[0], request_id="bad", prompt_token_ids=(5, *[toy.PAD] * 4, 7), features=(toy.item(1, 4, seed=666),))
    for request in (*good, bad):
        core.add(request)
    outputs = toy.drain(core)
    assert outputs["bad"][-1].finish_reason == "error"
    assert "poisoned item" in outputs["bad"][-1].error
    for request in good:
        assert toy.tokens_of(outputs[request.request_id]) == alone(toy, request)[0]
    toy.assert_empty(core)


def test_a_failing_step_ends_its_sequences_and_the_engine_goes_on(toy):
    rng = random.Random(0)
    core = toy.make_core()
    core.add(toy.make_request("lost", rng))
    forward = core.runner.model.forward
    core.runner.model.forward = lambda batch: (_ for _ in ()).throw(RuntimeError("out of memory"))
    (output,) = core.step()
    assert (output.finish_reason, output.error) == ("error", "RuntimeError: out of memory")
    core.runner.model.forward = forward
    request = toy.make_request("next", rng)
    core.add(request)
    assert toy.tokens_of(toy.drain(core)["next"]) == alone(toy, request)[0]
    toy.assert_empty(core)


def test_same_hash_with_other_rows_is_refused(toy):
    core = toy.make_core()
    request = toy.make_request("a", random.Random(0), media=False)
    core.add(replace(request, prompt_token_ids=(*[toy.PAD] * 4, 7), features=(toy.item(0, 4),)))
    other = replace(toy.item(0, 5), hash=toy.item(0, 4).hash)
    with pytest.raises(InputError, match="encoder rows"):
        core.add(replace(request, request_id="b", prompt_token_ids=(*[toy.PAD] * 5, 7), features=(other,)))
    toy.drain(core)
    toy.assert_empty(core)


def test_misplaced_items_are_refused(toy):
    core = toy.make_core()
    request = toy.make_request("a", random.Random(0), media=False)
    ids = (*[toy.PAD] * 6, 7)
    for features in [(toy.item(4, 4),), (toy.item(0, 3), toy.item(2, 3))]:
        with pytest.raises(InputError, match="not inside"):
            core.add(replace(request, prompt_token_ids=ids, features=features))
    toy.assert_empty(core)
