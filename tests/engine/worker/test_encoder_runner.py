"""Items that are encoded beside steps: other sequences go on, rows arrive later, and rows no longer needed are dropped."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sensorium import LLM, SamplingParams


def requests(toy):
    """Return a request of text and two with items; they share one item."""
    talks = toy.make_request("talks", random.Random(1), media=False, max_tokens=30, ignore_eos=True)
    sees = toy.request("sees", [5, 6, *[toy.PAD] * 4, 7], [toy.item(2, 4)])
    both = toy.request("both", [*[toy.PAD] * 4, 7, *[toy.PAD] * 5, 8], [toy.item(0, 4), toy.item(5, 5, 2)])
    return talks, sees, both


def outputs_of(outputs, name):
    return [output for output in outputs if output.request_id == name]


def test_other_sequences_decode_while_items_are_encoded(toy):
    talks, sees, both = requests(toy)
    core = toy.make_core(async_scheduling=True, late=6)
    core.add(talks)
    got = [output for _ in range(3) for output in core.step().outputs]
    early = core.stats.steps_ahead
    core.add(sees)
    core.add(both)
    for _ in range(6):
        before = len(outputs_of(got, "talks"))
        got += core.step().outputs
        assert len(outputs_of(got, "talks")) == before + 1, "a token of each step"
    assert not toy.tokens_of(outputs_of(got, "sees"))
    assert core.stats.steps_ahead >= early + 4, "and its steps go on starting early"
    got += [output for outputs in toy.drain(core).values() for output in outputs]
    for request in (talks, sees, both):
        assert toy.tokens_of(outputs_of(got, request.request_id)) == toy.alone(request)[0]
    stats = core.stats
    assert (stats.encoder_calls, stats.encoder_hits) == (2, 1), "the shared item is a hit of the second request"
    assert outputs_of(got, "sees")[-1].stats.items == ("encoded",)
    assert outputs_of(got, "both")[-1].stats.items == ("cache", "encoded")
    toy.assert_empty(core)


def test_a_lone_request_waits_for_its_rows(toy):
    _, _, both = requests(toy)
    core = toy.make_core(async_scheduling=True, late=300)
    step, idle = core.step, []

    def look():
        done = step()
        idle.append(done.idle)
        return done

    core.step = look
    core.add(both)
    outputs = toy.drain(core)["both"]
    assert toy.tokens_of(outputs) == toy.alone(both)[0]
    assert outputs[-1].timings["encode"] > 0
    assert core.stats.steps <= 2 + both.params.max_tokens
    assert not any(idle)


def test_a_request_that_waits_for_rows_does_not_block_others(toy):
    core = toy.make_core(async_scheduling=True, late=6)
    core.executor.runner.encoder_runner._poll_seconds = 0.0
    _, sees, both = requests(toy)
    core.add(replace(sees, prompt_token_ids=sees.prompt_token_ids[2:], features=(toy.item(0, 4),)))
    first, second = core.step(), core.step()
    assert first.outputs == second.outputs == ()
    assert not second.idle, "the loop must not sleep while the device works"
    core.abort("sees")
    core.add(both)
    assert toy.tokens_of(toy.drain(core)["both"]) == toy.alone(both)[0]
    toy.assert_empty(core)


@pytest.mark.parametrize("reads", [False, True])
def test_cross_attention_and_bidirectional_prompts_wait_too(toy, reads):
    model = toy.ToyModel(reads)
    prompt_attention = "causal" if reads else "bidirectional_prompt"
    core = toy.make_core(async_scheduling=True, late=3, model=model, prompt_attention=prompt_attention)
    _, sees, both = requests(toy)
    asked = [replace(one, cross=(toy.item(0, 6, 4),)) if reads else one for one in (sees, both)]
    for request in asked:
        core.add(request)
    got = toy.drain(core)
    for request in asked:
        alone = toy.alone(request, toy.ToyModel(reads), prompt_attention)
        assert toy.tokens_of(got[request.request_id]) == alone[0]
    toy.assert_empty(core)


def test_an_item_that_breaks_the_encoder_fails_only_its_request(toy):
    core = toy.make_core(async_scheduling=True, late=2)
    embed = core.executor.runner.model.embed_multimodal

    def broken(modality, tensors):
        rows = embed(modality, tensors)
        if 2 in tensors["seed"].tolist():  # of which the whole call has none that are finite
            rows = [torch.full_like(one, torch.nan) for one in rows]
        return rows

    core.executor.runner.model.embed_multimodal = broken
    talks, sees, both = requests(toy)
    for request in (talks, sees, both):
        core.add(request)
    got = toy.drain(core)
    assert got["both"][-1].error.message.startswith("image 1: encoding failed: the encoder returned values that are not finite")
    for request in (talks, sees):
        assert toy.tokens_of(got[request.request_id]) == toy.alone(request)[0]
    assert core.stats.quarantined == 1
    toy.assert_empty(core)


def test_running_out_of_memory_fails_only_the_requests_of_the_call(toy):
    core = toy.make_core(async_scheduling=True, late=2)
    embed, left = core.executor.runner.model.embed_multimodal, [1]

    def short(modality, tensors):
        if left:
            left.pop()
            raise torch.OutOfMemoryError("out of memory")
        return embed(modality, tensors)

    core.executor.runner.model.embed_multimodal = short
    _, sees, both = requests(toy)
    core.add(sees)
    (failed,) = (output for output in core.step().outputs if output.error)
    assert failed.request_id == "sees"
    assert "image 0: encoding failed: " in failed.error.message
    assert "send fewer or smaller items at once" in failed.error.message
    core.add(both)
    got = toy.drain(core)
    assert toy.tokens_of(got["both"]) == toy.alone(both)[0]
    assert core.stats.quarantined == 0
    toy.assert_empty(core)


@pytest.mark.parametrize("again", [False, True])
def test_rows_of_an_aborted_request(toy, again):
    """They are stored until their space is needed; a later request finds them, or encodes the item again."""
    _, sees, _ = requests(toy)
    core = toy.make_core(async_scheduling=True, late=3, encoder_rows=6)
    talks = toy.make_request("talks", random.Random(1), media=False, max_tokens=30, ignore_eos=True)
    core.add(talks)
    core.add(sees)
    core.step()
    core.abort("sees")
    other = toy.request("other", [*[toy.PAD] * 5, 8], [toy.item(0, 5, 2)])  # there is no room for both
    core.add(other)
    core.step()
    assert not core.executor.runner.store.rows, "dropped while being computed"
    if again:
        core.add(sees)
    got = toy.drain(core)
    for request in (talks, other, *[sees] * again):
        assert toy.tokens_of(got[request.request_id])[-4:] == toy.alone(request)[0][-4:]
    assert core.stats.encoder_calls == 2 + again
    assert not core.scheduler.encoding
    toy.assert_empty(core)
    core.step()
    assert set(core.executor.runner.store.rows) <= set(core.scheduler.encoder_cache._resident)


@pytest.mark.parametrize("where", ["load", "start", "look", "finite"])
def test_a_device_error_fails_only_the_requests_of_the_call(toy, where, monkeypatch):
    core = toy.make_core(async_scheduling=True, late=2)
    encoder_runner, left = core.executor.runner.encoder_runner, [1]

    def fails(*_):
        if left:
            left.pop()
            raise RuntimeError("the device is gone")

    event = toy.Late(0)
    if where == "load":
        load = encoder_runner.store.load
        encoder_runner.store.load = lambda *key: fails() or load(*key)
    elif where == "start":
        encoder_runner._event = lambda: fails() or toy.Late(0)
    elif where == "look":
        event.query = lambda: fails() or True
        encoder_runner._event = lambda: event
    else:
        monkeypatch.setattr(
            "sensorium.engine.worker.encoder_runner.copy_to_host", lambda flags: lambda: fails() or flags.tolist()
        )
    talks, sees, _ = requests(toy)
    core.add(talks)
    core.add(sees)
    got = toy.drain(core, 100)
    assert "the device is gone" in got["sees"][-1].error.message
    assert toy.tokens_of(got["talks"]) == toy.alone(talks)[0]
    assert encoder_runner._inflight is None
    assert not encoder_runner._queue
    assert not core.scheduler.encoding
    toy.assert_empty(core)


def test_a_step_that_cannot_start_fails_the_requests_of_its_items(toy):
    core = toy.make_core(async_scheduling=True)

    def broken(*_):
        raise RuntimeError("no step today")

    core.executor.runner.execute_model = broken
    _, _, both = requests(toy)
    core.add(both)
    (failed,) = (output for _ in range(3) for output in core.step().outputs)
    assert failed.request_id == "both"
    assert "no step today" in failed.error.message
    assert not core.scheduler.requests


def test_one_call_runs_at_a_time_and_hits_are_counted_once(toy):
    """Waiting prompts look up their rows at every step; these lookups do not count as hits."""
    core = toy.make_core(async_scheduling=True, late=4, prompt_attention="bidirectional_prompt", encoder_rows=20)
    most, embed = [0], core.executor.runner.model.embed_multimodal
    encoder_runner = core.executor.runner.encoder_runner

    def counted(modality, tensors):
        most[0] += 1
        assert encoder_runner._inflight is None
        return embed(modality, tensors)

    core.executor.runner.model.embed_multimodal = counted
    first, second = toy.item(0, 4), toy.item(5, 5, 2)
    for i in range(3):
        core.add(toy.request(f"r{i}", [*[toy.PAD] * 4, 7, *[toy.PAD] * 5, 8 + i], [first, second]))
    core.step()
    core.add(toy.request("late", [*[toy.PAD] * 3, 9], [toy.item(0, 3, 3)]))
    toy.drain(core)
    stats = core.stats
    assert (stats.encoder_calls, stats.encoder_hits) == (3, 4)
    toy.assert_empty(core)


@pytest.mark.parametrize("late", [0, 3])
def test_items_are_reported_until_their_own_result(toy, late):
    """If the process dies, the report names exactly the items that were being encoded."""
    core, reported = toy.make_core(async_scheduling=True, late=late, encoder_budget=4), []
    core.report_encoding = lambda keys: reported.append(set(keys))
    for i in range(3):
        core.add(toy.request(f"r{i}", [*[toy.PAD] * 4, 7 + i], [toy.item(0, 4, i)]))
    while core.scheduler.requests:
        core.step()
        assert not reported or reported[-1] == core.scheduler.encoder_cache.pending
    assert len(set().union(*reported)) == 3


def test_sleep_drops_the_running_call(toy):
    _, sees, _ = requests(toy)
    core = toy.make_core(async_scheduling=True, late=10**9)
    core.add(sees)
    core.step()
    core.abort("sees")
    core.executor.runner.sleep(core.executor.runner.model)
    assert core.executor.runner.encoder_runner._inflight is None
    assert not core.executor.runner.store.rows


@pytest.mark.parametrize("late", [0, 2, 90])
def test_answers_are_the_same_with_and_without_async_scheduling(toy, late):
    """The shipped model runs in float32, with more images than one call takes, and prompts cut within images."""
    model = Path(__file__).parents[3] / "assets" / "tiny-vl"
    prompt = "<|vision_start|><|image_pad|><|vision_end|>Read the text."
    images = [str(model.parent / "media" / f"line{i}.png") for i in (1, 2, 3, 1)]
    prompts = [{"prompt": prompt, "multi_modal_data": {"image": path}} for path in images]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for beside in (False, True):
        options = {"max_encoder_tokens": 50, "max_num_batched_tokens": 40, "dtype": "float32", "async_scheduling": beside}
        with LLM(model, **options) as llm:
            encoder_runner = llm.engine.loop.core.executor.runner.encoder_runner
            encoder_runner._event = lambda: toy.Late(late)
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.stats.encoder_calls == 3
    assert found[0] == found[1]
    assert found[0][0] == found[0][3]
