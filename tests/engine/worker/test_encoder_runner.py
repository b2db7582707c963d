"""Items encoded beside steps: who goes on meanwhile, what arrives when, and what becomes of rows nobody wants any more."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sensorium import LLM, SamplingParams


def requests(toy):
    """One that only answers, and two with items, one of them in both."""
    talks = toy.make_request("talks", random.Random(1), media=False, max_tokens=30, ignore_eos=True)
    sees = toy.of("sees", [5, 6, *[toy.PAD] * 4, 7], [toy.item(2, 4)])
    both = toy.of("both", [*[toy.PAD] * 4, 7, *[toy.PAD] * 5, 8], [toy.item(0, 4), toy.item(5, 5, 2)])
    return talks, sees, both


def told(outputs, name):
    return [output for output in outputs if output.request_id == name]


def test_others_answer_on_while_rows_are_made(toy):
    talks, sees, both = requests(toy)
    core = toy.make_core(overlaps=True, late=6)
    core.add(talks)
    got = [output for _ in range(3) for output in core.step()]
    early = core.stats.steps_ahead
    core.add(sees)
    core.add(both)
    for _ in range(6):
        before = len(told(got, "talks"))
        got += core.step()
        assert len(told(got, "talks")) == before + 1, "a token of each step"
    assert not toy.tokens_of(told(got, "sees"))
    assert core.stats.steps_ahead >= early + 4, "and its steps go on starting early"
    got += [output for outputs in toy.drain(core).values() for output in outputs]
    for request in (talks, sees, both):
        assert toy.tokens_of(told(got, request.request_id)) == toy.alone(request)[0]
    stats = core.stats
    assert (stats.encoder_calls, stats.encoder_hits) == (2, 1), "what one asked for is a hit of the other alone"
    assert told(got, "sees")[-1].stats.items == ("encoded",)
    assert told(got, "both")[-1].stats.items == ("cache", "encoded")
    toy.assert_empty(core)


def test_who_is_alone_waits_for_its_rows(toy):
    _, _, both = requests(toy)
    core = toy.make_core(overlaps=True, late=300)
    core.add(both)
    outputs = toy.drain(core)["both"]
    assert toy.tokens_of(outputs) == toy.alone(both)[0]
    assert outputs[-1].timings["encode"] > 0
    assert core.stats.steps <= 2 + both.params.max_tokens
    assert not core.idle


def test_who_waits_for_rows_does_not_keep_the_engine_from_others(toy):
    core = toy.make_core(overlaps=True, late=6)
    core.runner.encoding._moment = 0.0
    _, sees, both = requests(toy)
    core.add(replace(sees, prompt_token_ids=sees.prompt_token_ids[2:], features=(toy.item(0, 4),)))
    assert core.step() == core.step() == ()
    assert not core.idle, "nobody sleeps beside a device that works"
    core.abort("sees")
    core.add(both)
    assert toy.tokens_of(toy.drain(core)["both"]) == toy.alone(both)[0]
    toy.assert_empty(core)


@pytest.mark.parametrize("reads", [False, True])
def test_an_encoder_side_and_a_prompt_that_sees_itself_wait_too(toy, reads):
    model = toy.ToyModel(reads)
    prefill = "causal" if reads else "prompt_atomic"
    core = toy.make_core(overlaps=True, late=3, model=model, prefill=prefill)
    _, sees, both = requests(toy)
    asked = [replace(one, cross=toy.item(0, 6, 4)) if reads else one for one in (sees, both)]
    for request in asked:
        core.add(request)
    got = toy.drain(core)
    for request in asked:
        alone = toy.alone(request, toy.ToyModel(reads), prefill)
        assert toy.tokens_of(got[request.request_id]) == alone[0]
    toy.assert_empty(core)


def test_an_item_that_breaks_the_encoder_ends_its_own(toy):
    core = toy.make_core(overlaps=True, late=2)
    embed = core.runner.model.embed_multimodal

    def broken(modality, tensors):
        rows = embed(modality, tensors)
        if 2 in tensors["seed"].tolist():  # of which the whole call has none that are finite
            rows = [torch.full_like(one, torch.nan) for one in rows]
        return rows

    core.runner.model.embed_multimodal = broken
    talks, sees, both = requests(toy)
    for request in (talks, sees, both):
        core.add(request)
    got = toy.drain(core)
    assert got["both"][-1].error.startswith("image 1: encoding failed: the encoder made values that are not finite")
    for request in (talks, sees):
        assert toy.tokens_of(got[request.request_id]) == toy.alone(request)[0]
    assert core.stats.quarantined == 1
    toy.assert_empty(core)


def test_memory_that_runs_out_ends_who_asked_and_nobody_else(toy):
    core = toy.make_core(overlaps=True, late=2)
    embed, left = core.runner.model.embed_multimodal, [1]

    def short(modality, tensors):
        if left:
            left.pop()
            raise torch.OutOfMemoryError("out of memory")
        return embed(modality, tensors)

    core.runner.model.embed_multimodal = short
    _, sees, both = requests(toy)
    core.add(sees)
    (failed,) = (output for output in core.step() if output.error)
    assert failed.request_id == "sees"
    assert "image 0: encoding failed: " in failed.error
    assert "send fewer or smaller items at once" in failed.error
    core.add(both)
    got = toy.drain(core)
    assert toy.tokens_of(got["both"]) == toy.alone(both)[0]
    assert core.stats.quarantined == 0
    toy.assert_empty(core)


@pytest.mark.parametrize("again", [False, True])
def test_rows_that_nobody_waits_for_any_more(toy, again):
    """They come all the same, and stay until their room is needed; who asks again finds them, or asks anew."""
    _, sees, _ = requests(toy)
    core = toy.make_core(overlaps=True, late=3, encoder_rows=6)
    talks = toy.make_request("talks", random.Random(1), media=False, max_tokens=30, ignore_eos=True)
    core.add(talks)
    core.add(sees)
    core.step()
    core.abort("sees")
    other = toy.of("other", [*[toy.PAD] * 5, 8], [toy.item(0, 5, 2)])  # there is no room for both
    core.add(other)
    core.step()
    assert not core.runner.store.rows, "dropped on their way"
    if again:
        core.add(sees)
    got = toy.drain(core)
    for request in (talks, other, *[sees] * again):
        assert toy.tokens_of(got[request.request_id])[-4:] == toy.alone(request)[0][-4:]
    assert core.stats.encoder_calls == 2 + again
    assert not core._asked
    toy.assert_empty(core)
    core.step()
    assert set(core.runner.store.rows) <= set(core.scheduler.encoder._resident)


@pytest.mark.parametrize("where", ["load", "start", "look", "finite"])
def test_a_device_that_fails_ends_who_asked_and_nobody_else(toy, where, monkeypatch):
    core = toy.make_core(overlaps=True, late=2)
    encoding, left = core.runner.encoding, [1]

    def fails(*_):
        if left:
            left.pop()
            raise RuntimeError("the device is gone")

    event = toy.Late(0)
    if where == "load":
        load = encoding.store.load
        encoding.store.load = lambda *key: fails() or load(*key)
    elif where == "start":
        encoding._event = lambda: fails() or toy.Late(0)
    elif where == "look":
        event.query = lambda: fails() or True
        encoding._event = lambda: event
    else:
        monkeypatch.setattr("sensorium.engine.encoding.staging.fetch", lambda flags: lambda: fails() or flags.tolist())
    talks, sees, _ = requests(toy)
    core.add(talks)
    core.add(sees)
    got = toy.drain(core, 100)
    assert "the device is gone" in got["sees"][-1].error
    assert toy.tokens_of(got["talks"]) == toy.alone(talks)[0]
    assert encoding._call is None
    assert not encoding._queue
    assert not core._asked
    toy.assert_empty(core)


def test_an_encoder_step_that_cannot_be_started_ends_who_asked(toy):
    core = toy.make_core(overlaps=True)

    def broken(*_):
        raise RuntimeError("no step today")

    core.runner.launch = broken
    _, _, both = requests(toy)
    core.add(both)
    (failed,) = (output for _ in range(3) for output in core.step())
    assert failed.request_id == "both"
    assert "no step today" in failed.error
    assert not core.scheduler.requests


def test_one_call_at_a_time_and_hits_are_counted_once(toy):
    """Prompts that stand read their items at every step, and none of that is a hit."""
    core = toy.make_core(overlaps=True, late=4, prefill="prompt_atomic", encoder_rows=20)
    most, embed = [0], core.runner.model.embed_multimodal
    encoding = core.runner.encoding

    def counted(modality, tensors):
        most[0] += 1
        assert encoding._call is None
        return embed(modality, tensors)

    core.runner.model.embed_multimodal = counted
    first, second = toy.item(0, 4), toy.item(5, 5, 2)
    for i in range(3):
        core.add(toy.of(f"r{i}", [*[toy.PAD] * 4, 7, *[toy.PAD] * 5, 8 + i], [first, second]))
    core.step()
    core.add(toy.of("late", [*[toy.PAD] * 3, 9], [toy.item(0, 3, 3)]))
    toy.drain(core)
    stats = core.stats
    assert (stats.encoder_calls, stats.encoder_hits) == (3, 4)
    toy.assert_empty(core)


def test_asleep_nothing_is_on_its_way(toy):
    _, sees, _ = requests(toy)
    core = toy.make_core(overlaps=True, late=10**9)
    core.add(sees)
    core.step()
    core.abort("sees")
    core.runner.sleep(core.runner.model)
    assert core.runner.encoding._call is None
    assert not core.runner.store.rows


@pytest.mark.parametrize("late", [0, 2, 90])
def test_pictures_are_read_alike_either_way(toy, late):
    """The shipped model in float32, more pictures than one call takes, prompts cut in the middle of them."""
    model = Path(__file__).parents[2] / "assets" / "tiny-vl"
    prompt = "<|vision_start|><|image_pad|><|vision_end|>Read the text."
    pictures = [str(model.parent / "media" / f"line{i}.png") for i in (1, 2, 3, 1)]
    prompts = [{"prompt": prompt, "multi_modal_data": {"image": path}} for path in pictures]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for beside in (False, True):
        options = {"max_encoder_tokens": 50, "max_num_batched_tokens": 40, "dtype": "float32", "async_scheduling": beside}
        with LLM(model, **options) as llm:
            encoding = llm._driver.core.runner.encoding
            encoding._event = lambda: toy.Late(late)
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
            assert llm.stats.encoder_calls == 3
    assert found[0] == found[1]
    assert found[0][0] == found[0][3]
