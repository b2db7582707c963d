"""The engine with a toy model: an answer is the same alone and with batching, chunks, preemptions and aborts around it."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.callers.errors import InputError


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
        assert (toy.tokens_of(got), got[-1].finish_reason) == toy.alone(request)
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
        for output in core.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    for name, request in requests.items():
        if name not in aborted:
            assert toy.tokens_of(outputs[name]) == toy.alone(request)[0]
    toy.assert_empty(core)


def test_preempted_sequences_are_computed_again(toy):
    rng = random.Random(1)
    requests = [toy.make_request(f"r{i}", rng, max_tokens=20, ignore_eos=True) for i in range(4)]
    core = toy.make_core(blocks=16, budget=64, max_len=64)
    for request in requests:
        core.add(request)
    outputs = toy.drain(core)
    assert sum(core.executor.runner.model.forward_rows) > sum(len(r.prompt_token_ids) + 19 for r in requests), (
        "nothing was preempted"
    )
    for request in requests:
        assert toy.tokens_of(outputs[request.request_id]) == toy.alone(request)[0]
    toy.assert_empty(core)


def test_sequences_are_served_by_priority_then_arrival(toy):
    rng = random.Random(2)
    core = toy.make_core(seqs=1)
    for i, priority in enumerate([1, 1, 0]):
        core.add(replace(toy.make_request(f"r{i}", rng, max_tokens=1), priority=priority))
    finished = [output.request_id for _ in range(3) for output in core.step().outputs]
    assert finished == ["r2", "r0", "r1"]


def test_decode_rows_are_scheduled_before_prompts(toy):
    rng = random.Random(3)
    core = toy.make_core(budget=4)
    short = toy.make_request("short", rng, media=False, max_tokens=5, ignore_eos=True)
    core.add(short)
    while not core.step().outputs[0].token_ids:
        pass
    core.add(toy.make_request("long", rng, max_tokens=1))
    core.step()
    assert core.executor.runner.model.forward_rows[-1] == 4
    output = core.scheduler.schedule()
    assert [task.request_id for task in output.scheduled] == ["short", "long"]
    assert [task.num_tokens for task in output.scheduled] == [1, 3]


def test_a_prompt_that_cannot_run_is_refused_and_changes_nothing(toy):
    core = toy.make_core(blocks=4, block_size=4)
    rng = random.Random(0)
    long = toy.make_request("long", rng, media=False)
    with pytest.raises(InputError, match="prompt has 16 tokens, but max_model_len is 16"):
        core.add(replace(long, prompt_token_ids=(5,) * 16))
    with pytest.raises(InputError, match="no tokens"):
        core.add(replace(long, prompt_token_ids=()))
    with pytest.raises(InputError, match="vocabulary"):
        core.add(replace(long, prompt_token_ids=(101,)))
    toy.assert_empty(core)


def test_an_answer_ends_at_max_model_len(toy):
    core = toy.make_core(blocks=4, block_size=4)
    core.add(toy.make_request("r", random.Random(0), media=False, max_tokens=None, ignore_eos=True))
    outputs = toy.drain(core)["r"]
    assert outputs[-1].finish_reason == "length"
    assert len(toy.tokens_of(outputs)) == 16 - len(toy.make_request("r", random.Random(0), media=False).prompt_token_ids)
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
    assert "failing item" in outputs["bad"][-1].error.message
    for request in good:
        assert toy.tokens_of(outputs[request.request_id]) == toy.alone(request)[0]
    toy.assert_empty(core)


def test_a_failing_step_ends_its_sequences_and_the_engine_goes_on(toy):
    rng = random.Random(0)
    core = toy.make_core()
    forward = core.executor.runner.model.forward
    for error, told in (
        (RuntimeError("out of memory"), "a step failed: RuntimeError: out of memory; ask for fewer"),
        (IndexError("two\nlines"), "internal error in a step: IndexError: two lines; report it"),
    ):
        core.add(toy.make_request("lost", rng))
        core.executor.runner.model.forward = lambda batch, error=error: (_ for _ in ()).throw(error)
        (output,) = core.step().outputs
        assert output.finish_reason == "error"
        assert output.error.message.startswith(told)
    core.executor.runner.model.forward = forward
    request = toy.make_request("next", rng)
    core.add(request)
    assert toy.tokens_of(toy.drain(core)["next"]) == toy.alone(request)[0]
    toy.assert_empty(core)


def test_misplaced_items_are_refused(toy):
    core = toy.make_core()
    request = toy.make_request("a", random.Random(0), media=False)
    ids = (*[toy.PAD] * 6, 7)
    for features in [(toy.item(4, 4),), (toy.item(0, 3), toy.item(2, 3))]:
        with pytest.raises(InputError, match="not inside"):
            core.add(replace(request, prompt_token_ids=ids, features=features))
    toy.assert_empty(core)


def test_an_urgent_request_preempts_the_least_urgent(toy):
    core = toy.make_core(seqs=2)
    for i, priority in enumerate([1, 2]):
        core.add(toy.request(f"r{i}", [5, 6, 7], priority=priority))
    core.step()
    core.add(toy.request("equal", [5, 6, 8], priority=2))
    assert set(toy.scheduled(core)[0]) == {"r0", "r1"}, "earlier goes before later"
    core.add(toy.request("urgent", [5, 6, 9], priority=0))
    assert set(toy.scheduled(core)[0]) == {"r0", "urgent"}
    outputs = toy.drain(core)
    assert outputs["r1"][-1].stats.preemptions == 1
    assert all(outputs[name][-1].finish_reason == "length" for name in ("r0", "r1", "equal", "urgent"))
    toy.assert_empty(core)


@pytest.mark.parametrize(
    "prompt_attention", ["bidirectional_items", "bidirectional_ranges", "bidirectional_media", "bidirectional_prompt"]
)
def test_bidirectional_spans_are_computed_in_one_step(toy, prompt_attention):
    core = toy.make_core(budget=20, seqs=3, prompt_attention=prompt_attention, block_size=4)
    prompt = [5, 6, *[toy.PAD] * 10, 7, 8, 9]
    whole = [(0, 15)] if prompt_attention == "bidirectional_prompt" else [(2, 12)]
    names = ("a", "b", "c", "d")
    for i, name in enumerate(names):
        core.add(toy.request(name, [*prompt, 10 + i], [toy.item(2, 10, seed=i % 2)]))
    done = dict.fromkeys(names, 0)
    schedule = core.scheduler.schedule

    def watched():
        output = schedule()
        for task in output.scheduled:
            stop = task.num_computed + task.num_tokens
            assert not any(first < edge < last for first, last in whole for edge in (task.num_computed, stop))
            done[task.request_id] = stop
        return output

    core.scheduler.schedule = watched
    toy.drain(core)
    assert min(done.values()) > 15
    hits = core.stats.prefix_hits
    assert hits == (0 if prompt_attention == "bidirectional_prompt" else 12), "d finds the 12 tokens that end with its item"


def test_a_bidirectional_span_that_no_step_has_room_for_is_refused(toy):
    core = toy.make_core(budget=10, seqs=4, prompt_attention="bidirectional_items")
    with pytest.raises(InputError, match="8 tokens have to be computed at once, but a step has room for 7; raise max_num"):
        core.add(toy.request("a", [*[toy.PAD] * 8, 6], [toy.item(0, 8)]))
    core = toy.make_core(encoder_rows=8, prompt_attention="bidirectional_prompt")
    with pytest.raises(InputError, match="10 encoder rows are needed at once, but there is room for 8"):
        core.add(toy.request("a", [*[toy.PAD] * 10, 6], [toy.item(0, 5), toy.item(5, 5, seed=2)]))
    toy.assert_empty(core)


def test_a_sequence_with_values_that_are_not_finite_ends_and_its_blocks_are_zeroed(toy):
    core = toy.make_core(blocks=8, block_size=4, budget=4)
    forward = core.executor.runner.model.forward

    def broken(batch):
        hidden = forward(batch)
        if (batch.input_ids == 99).any():
            core.executor.runner.model.forward = forward
            for cache in batch.kv_caches:
                cache.view(2, -1, 8)[:, batch.attn[0].slot_mapping] = torch.nan
            hidden[:] = torch.nan
        return hidden

    core.executor.runner.model.forward = broken
    core.add(toy.request("bad", [5, 6, 7, 8, 99, 9, 10, 11, 12]))
    outputs = toy.drain(core)["bad"]
    assert "not finite" in outputs[-1].error.message
    assert core.stats.blocks_cached == 1, "only the block before it is cached"
    good = toy.request("good", [5, 6, 7, 8, 98, 9, 10, 11, 12, 13])
    core.add(good)
    assert toy.tokens_of(toy.drain(core)["good"]) == toy.alone(good)[0]
    assert not any(cache.isnan().any() for cache in core.executor.runner.caches.tensors)


def test_a_closing_append_ends_a_held_sequence(toy):
    core = toy.make_core()
    core.add(toy.request("r", [5, 6], hold_open=True))
    toy.drain(core)
    core.append("r", [7, 8], close=True)
    toy.drain(core)
    toy.assert_empty(core)
    core.add(toy.request("r", [5, 6], hold_open=True))
    core.append("r", (), close=True)
    toy.drain(core)
    toy.assert_empty(core)
    core.add(toy.request("r", [5, 6], hold_open=True))
    toy.drain(core)
    with pytest.raises(InputError, match="nothing to append"):
        core.append("r", ())
    core.append("r", (), close=True)
    toy.assert_empty(core)


@pytest.mark.parametrize("place", ["_update_states", "_forward"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()])
def test_a_step_that_fails_loses_no_message_about_other_sequences(toy, place, error, monkeypatch):
    """New, updated and finished sequences are sent to the worker again with the next step."""
    rng = random.Random(0)
    core = toy.make_core(seqs=1, budget=4)
    running, waiting = (toy.make_request(name, rng, max_tokens=9, ignore_eos=True) for name in ("running", "waiting"))
    core.add(running)
    core.add(replace(waiting, prompt_token_ids=(5, 6), features=()))
    core.step()
    core.abort("waiting")
    core.add(waiting)
    core.truncate("waiting", len(waiting.prompt_token_ids) - 1)
    work = getattr(core.executor.runner, place)

    def broken(*arguments):
        if place == "_forward":
            work(*arguments)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(core.executor.runner, place, broken)
        if isinstance(error, Exception):
            (failed,) = core.step().outputs
            assert (failed.request_id, failed.finish_reason) == ("running", "error")
        else:
            with pytest.raises(KeyboardInterrupt):
                core.step()
    outputs = toy.drain(core)
    expected, _ = toy.alone(replace(waiting, prompt_token_ids=waiting.prompt_token_ids[:-1]))
    assert toy.tokens_of(outputs["waiting"]) == expected
    if not isinstance(error, Exception):
        assert toy.tokens_of(outputs["running"]) == toy.alone(running)[0]
    toy.assert_empty(core)
