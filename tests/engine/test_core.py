"""append and truncate: a continued or rolled back sequence equals a fresh one with the same tokens."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sensorium.callers.errors import InputError
from sensorium.engine.sampling_params import RepetitionDetectionParams, SamplingParams
from sensorium.engine.scheduler.request import Request
from sensorium.engine.structured_outputs import StructuredOutputsParams
from sensorium.engine.types import GrammarResult
from sensorium.mm.types import PlaceholderRange


def fresh(toy, request, tokens, features):
    core = toy.make_core(blocks=64, budget=500)
    core.add(replace(request, prompt_token_ids=tuple(tokens), features=tuple(features), hold_open=False))
    return toy.tokens_of(toy.drain(core)[request.request_id])


def turn(toy, core, name):
    got = []
    for _ in range(200):
        for output in core.step().outputs:
            if output.request_id == name:
                got += output.token_ids
                if output.finish_reason:
                    return got
    raise AssertionError("no answer")


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_append_equals_a_fresh_run(toy, chunk, temperature):
    rng = random.Random(4)
    core = toy.make_core(budget=chunk)
    request = toy.make_request("live", rng, hold_open=True, max_tokens=6, ignore_eos=True, temperature=temperature)
    core.add(request)
    tokens, features = list(request.prompt_token_ids), list(request.features)
    for seed in (None, 2, None):
        tokens += turn(toy, core, "live")
        more = [rng.randrange(4, 101) for _ in range(3)]
        added = []
        if seed is not None:
            added = [toy.item(len(tokens) + 3, 5, seed, edges=True)]
            more += [toy.PAD] * 7 + [9]
        core.append("live", more, added)
        tokens, features = tokens + more, features + added
        expected = fresh(toy, request, tokens, features)
        assert turn(toy, core, "live") == expected
        tokens += expected
        core.append("live", [11])
        tokens.append(11)
    core.abort("live")
    toy.assert_empty(core)


def test_truncate_then_append_equals_a_fresh_run(toy):
    rng = random.Random(6)
    core = toy.make_core()
    request = toy.make_request("live", rng, hold_open=True, max_tokens=9, ignore_eos=True)
    core.add(request)
    tokens = list(request.prompt_token_ids) + turn(toy, core, "live")
    used = core.scheduler.block_pools.num_free
    core.truncate("live", len(tokens) - 7)
    assert core.scheduler.block_pools.num_free > used, "rolled back blocks are free again"
    core.append("live", [8, 9])
    tokens = tokens[:-7] + [8, 9]
    assert turn(toy, core, "live") == fresh(toy, request, tokens, request.features)
    core.abort("live")
    toy.assert_empty(core)


def test_truncate_of_a_running_sequence_continues_at_the_cut(toy):
    core = toy.make_core()
    request = toy.make_request("r", random.Random(7), max_tokens=8, ignore_eos=True)
    expected = fresh(toy, request, request.prompt_token_ids, request.features)
    core.add(request)
    for _ in range(4):
        core.step()
    core.truncate("r", len(request.prompt_token_ids) + 1)
    assert turn(toy, core, "r") == expected[1:]
    toy.assert_empty(core)


@pytest.mark.parametrize("keep", [2, 5, 6, 7, 11])
def test_a_prompt_cut_while_it_is_computed_has_its_log_probabilities(toy, keep):
    """Log probabilities of the kept tokens are sent once. If they were sent before the cut, they are not sent again."""
    prompt = tuple(range(5, 17))

    def logprobs_of(core, steps):
        outputs = [output for _ in range(steps) for output in core.step().outputs]
        return [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]

    options = {"params": SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=4, ignore_eos=True)}
    core = toy.make_core(budget=3)
    core.add(toy.request("r", prompt, **options))
    assert not logprobs_of(core, 2)  # 6 of 12 tokens
    core.truncate("r", keep)
    cut = logprobs_of(core, 12)
    core.add(toy.request("s", prompt[:keep], **options))
    assert cut == logprobs_of(core, 12)
    assert len(cut) == 1
    assert len(cut[0]) == keep
    core = toy.make_core()
    core.add(toy.request("r", prompt, hold_open=True, **options))
    assert len(logprobs_of(core, 9)) == 1
    core.truncate("r", keep)
    core.append("r", [5, 6])
    assert not logprobs_of(core, 9)


def test_a_paused_sequence_continues_as_if_it_had_ended(toy):
    core = toy.make_core()
    request = toy.make_request("live", random.Random(3), hold_open=True, max_tokens=9, ignore_eos=True)
    core.add(request)
    tokens = [
        *request.prompt_token_ids,
        *(token for _ in range(4) for output in core.step().outputs for token in output.token_ids),
    ]
    core.pause("live")
    core.pause("live")
    assert core.step().outputs == ()
    core.append("live", [8, 9])
    tokens += [8, 9]
    assert turn(toy, core, "live") == fresh(toy, request, tokens, request.features)
    core.abort("live")
    with pytest.raises(InputError, match="not being served"):
        core.pause("live")
    toy.assert_empty(core)


def test_truncate_drops_items_after_the_cut_and_refuses_to_cut_through_one(toy):
    core = toy.make_core()
    request = toy.make_request("r", random.Random(0), media=False, hold_open=True, max_tokens=2, ignore_eos=True)
    ids, features = (5, *[toy.PAD] * 4, 6, *[toy.PAD] * 4, 7), (toy.item(1, 4), toy.item(6, 4, seed=2))
    request = replace(request, prompt_token_ids=ids, features=features)
    core.add(request)
    turn(toy, core, "r")
    with pytest.raises(InputError, match="inside image 1; truncate to 6 or fewer, or to 10 or more"):
        core.truncate("r", 8)
    core.truncate("r", 5)  # at the end of the first item, whose last row is needed again
    core.append("r", [50])
    assert turn(toy, core, "r") == fresh(toy, request, (*ids[:5], 50), features[:1])
    with pytest.raises(InputError, match="keep 1 or more"):
        core.truncate("r", 0)
    core.abort("r")
    toy.assert_empty(core)


def test_idle_sequences_are_preempted_and_recomputed(toy):
    core = toy.make_core(blocks=12)
    rng = random.Random(8)
    held = toy.make_request("held", rng, hold_open=True, max_tokens=6, ignore_eos=True)
    core.add(held)
    tokens = list(held.prompt_token_ids) + turn(toy, core, "held")
    others = [toy.make_request(f"r{i}", rng, max_tokens=12, ignore_eos=True) for i in range(4)]
    for request in others:
        core.add(request)
    outputs = toy.drain(core)
    for request in others:
        got = toy.tokens_of(outputs[request.request_id])
        assert got == fresh(toy, request, request.prompt_token_ids, request.features)
    core.append("held", [30, 31])
    assert turn(toy, core, "held") == fresh(toy, held, [*tokens, 30, 31], held.features)
    core.abort("held")
    toy.assert_empty(core)


def test_a_request_id_is_free_again_after_an_abort(toy):
    core = toy.make_core()
    old = toy.make_request("r", random.Random(1), hold_open=True)
    new = toy.make_request("r", random.Random(2), media=False)
    core.add(old)
    core.append("r", [5, 6])
    with pytest.raises(InputError, match="already being served"):
        core.add(new)
    core.abort("r")
    core.add(new)
    assert turn(toy, core, "r") == fresh(toy, new, new.prompt_token_ids, ())
    toy.assert_empty(core)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("chunk", [3, 64])
def test_append_with_an_adapter_equals_a_fresh_run_with_it(toy, chunk, running):
    """The whole sequence is computed again with the adapter, while another one continues without."""
    rng = random.Random(4)
    core = toy.make_core(budget=chunk)
    request = toy.make_request("live", rng, hold_open=True, max_tokens=6, ignore_eos=True)
    core.add(request)
    core.add(replace(request, request_id="mate"))
    tokens = [*request.prompt_token_ids]
    if not running:
        tokens += turn(toy, core, "live")
    for more, adapter in (([7, 8], "other"), ([9], None), ([10], "other"), ([11], ""), ([12], "a")):
        core.append("live", more, adapter=adapter)
        tokens += more
        named = replace(request, adapter={7: "other", 9: "other", 10: "other", 11: "", 12: "a"}[more[0]])
        expected = fresh(toy, named, tokens, request.features)
        assert turn(toy, core, "live") == expected
        tokens += expected
    for name in ("live", "mate"):
        core.abort(name)
    toy.assert_empty(core)


def test_an_unknown_adapter_is_refused(toy):
    core = toy.make_core()
    with pytest.raises(InputError, match=r"no adapter 'b'; .* a, other"):
        core.add(toy.request("r", [5, 6], adapter="b"))
    core.add(toy.request("r", [5, 6], adapter="a", hold_open=True))
    with pytest.raises(InputError, match=r"no adapter 'b'"):
        core.append("r", [7], adapter="b")


def test_unknown_sequences_are_named(toy):
    core = toy.make_core()
    for call in (lambda: core.append("nobody", [5]), lambda: core.truncate("nobody", 1)):
        with pytest.raises(InputError, match="'nobody' is not being served"):
            call()
    core.abort("nobody")


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), blocks=st.integers(26, 40), chunk=st.integers(1, 40))
def test_many_live_sequences_in_a_small_pool(toy, seed, blocks, chunk):
    """Sequences that are held open are continued and rolled back at random steps while other requests run."""
    rng = random.Random(seed)
    core = toy.make_core(blocks=blocks, budget=chunk, seqs=3, max_len=100)
    given_to: dict[str, tuple] = {}  # name -> request, tokens and items before the current answer
    answers: dict[str, list[int]] = {}
    for i in range(4):
        request = toy.make_request(f"r{i}", rng, hold_open=True, ignore_eos=True, max_tokens=rng.randint(1, 6))
        core.add(request)
        given_to[request.request_id] = (request, list(request.prompt_token_ids), list(request.features))
        answers[request.request_id] = []
    for _ in range(8):
        for output in (output for _ in range(rng.randint(1, 30)) for output in core.step().outputs):
            request, tokens, features = given_to[output.request_id]
            answers[output.request_id] += output.token_ids
            if output.finish_reason:
                assert answers[output.request_id] == fresh(toy, request, tokens, features)
        name = rng.choice(list(given_to))
        request, tokens, features = given_to[name]
        tokens = tokens + answers[name]
        if rng.random() < 0.5:
            keep = rng.randint(max(1, features[-1].range.end if features else 1), len(tokens))
            core.truncate(name, keep)
            tokens = tokens[:keep]
        more, added = [rng.randrange(4, 101) for _ in range(2)], []
        if rng.random() < 0.5:
            added = [toy.item(len(tokens) + 2, 3, rng.randint(1, 3))]
            more += [toy.PAD] * 3 + [8]
        if len(tokens) + len(more) < 90:
            core.append(name, more, added)
            given_to[name] = (request, tokens + more, features + added)
        else:
            core.abort(name)
            del given_to[name]
        answers[name] = []
    for name in list(given_to):
        core.abort(name)
    toy.assert_empty(core)


def test_a_loop_ends_the_answer(toy):
    core = looping(toy)
    core.add(replace(loop_request(toy, core), params=SamplingParams(temperature=0.0, max_tokens=60, repetition_detection=LOOP)))
    outputs = toy.drain(core)["r"]
    assert outputs[-1].finish_reason == "repetition"
    assert toy.tokens_of(outputs) == [20, 30, 31, 30, 31, 30, 31]
    toy.assert_empty(core)


def test_a_loop_is_repaired_without_another_encoder_call(toy):
    core = looping(toy)
    repair = replace(LOOP, repair=True, max_repairs=1)
    core.add(
        replace(loop_request(toy, core), params=SamplingParams(temperature=0.0, max_tokens=12, repetition_detection=repair))
    )
    answer, outputs = [], toy.drain(core)["r"]
    for output in outputs:
        answer = answer[: len(answer) - output.num_removed] + list(output.token_ids)
    assert answer[0] == 20, "rolled back to where the loop began"
    assert answer[1:] == [30, 0, 30, 0, 30, 0], "the forbidden tokens are not repeated; the next best ones are another loop"
    assert outputs[-1].finish_reason == "repetition", "and more than one is not repaired"
    assert core.executor.runner.model.encode_calls == [1]
    toy.assert_empty(core)


def test_a_repair_that_cannot_roll_back_ends_only_its_sequence(toy, monkeypatch):
    core = looping(toy)
    request = loop_request(toy, core)
    repair = SamplingParams(temperature=0.0, max_tokens=12, repetition_detection=replace(LOOP, repair=True))
    core.add(replace(request, params=repair))
    core.add(replace(request, request_id="other", params=SamplingParams(temperature=0.0, max_tokens=12)))

    def refuse(self, num_tokens, block_size):
        raise InputError("inside audio 0")

    monkeypatch.setattr(Request, "truncate", refuse)
    outputs = toy.drain(core)
    assert outputs["r"][-1].error.message == "inside audio 0"
    assert outputs["other"][-1].finish_reason == "length"
    toy.assert_empty(core)


def test_a_rollback_among_generated_tokens_keeps_the_item_with_their_rows(toy):
    request = loop_request(toy, looping(toy))
    (item,) = request.features
    ahead = replace(item, range=PlaceholderRange(1, 24), geometry=replace(item.geometry, ahead=20))
    sequence = Request(replace(request, features=(ahead,)), 0, ((),))
    sequence.token_ids += [30, 31] * 4
    sequence.truncate(8, 16)
    assert sequence.features == [ahead]
    with pytest.raises(InputError, match="truncate to 1 or fewer, or to 5 or more"):
        sequence.truncate(4, 16)


def test_truncate_refuses_to_remove_the_token_of_cross_attention(toy):
    request = loop_request(toy, looping(toy))
    (item,) = request.features
    cross = replace(item, range=PlaceholderRange(2, item.range.num_embeds))
    sequence = Request(replace(request, features=(), cross=(cross,)), 0, ((),))
    for length in (1, 2):
        with pytest.raises(InputError, match=f"to {length} tokens: that removes the image; truncate to 3 or more"):
            sequence.truncate(length, 16)
    sequence.truncate(3, 16)
    assert len(sequence.token_ids) == 3


LOOP = RepetitionDetectionParams(max_cycle=4, min_repeats=3, min_tokens=6)


def looping(toy):
    """Return a core whose model generates 20, then 30 31 30 31 ... for every prompt."""
    core = toy.make_core()
    model = core.executor.runner.model
    real = model.forward

    def forward(batch):
        hidden = real(batch)
        following = {30: 31, 31: 30, 20: 30}
        ends = torch.tensor(batch.attn[0].query_start_loc[1:]) - 1
        model.wanted = [following.get(token, 20 if token == 7 else 30) for token in batch.input_ids[ends].tolist()]
        return hidden

    def compute_logits(hidden):
        logits = torch.zeros(len(hidden), 101)
        logits[torch.arange(len(hidden)), model.wanted] = 5.0
        return logits

    model.forward, model.compute_logits = forward, compute_logits
    return core


def loop_request(toy, core):
    request = toy.make_request("r", random.Random(0), media=False)
    return replace(request, prompt_token_ids=(5, *[toy.PAD] * 4, 7), features=(toy.item(1, 4),))


def test_bad_words_that_requests_share_are_checked_once(toy):
    class Words(tuple):
        reads = 0

        def __iter__(self):
            type(self).reads += 1
            return super().__iter__()

    rng, core, words = random.Random(3), toy.make_core(), Words([(5, 6), (7,)])
    for name in "abc":
        core.add(replace(toy.make_request(name, rng, max_tokens=2), bad_word_ids=words))
    assert Words.reads == 1
    toy.drain(core)
    with pytest.raises(InputError, match="bad_words holds 100000"):
        core.add(replace(toy.make_request("d", rng), bad_word_ids=((5, 100_000),)))


def test_a_grammar_that_ends_while_another_request_is_released_is_not_lost(toy, monkeypatch):
    """The executor reports each compiled grammar once, in the reply to whichever message comes next."""
    core, compiling, waits = toy.make_core(), [], True

    def update(message):
        compiling.extend(task.request_id for task in message.compile)
        ended = () if waits else tuple(GrammarResult(name, None) for name in compiling)
        del compiling[: len(ended)]
        return ended

    monkeypatch.setattr(core.executor, "update", update)
    core.info = replace(core.info, structured_outputs=True)
    rng = random.Random(3)
    form = StructuredOutputsParams(regex="[0-9]")
    first, second = (
        toy.make_request(name, rng, max_tokens=3, ignore_eos=True, structured_outputs=form) for name in ("first", "second")
    )
    core.add(first)
    core.add(second)
    waits = False
    core.abort("first")  # the reply to its release reports the second one's grammar
    assert "second" in core.scheduler.sequences
    assert core.step().idle is False


def test_a_request_whose_adapter_is_lost_while_its_grammar_is_compiled_ends(toy, monkeypatch):
    core, compiling = toy.make_core(), []

    def update(message):
        compiling.extend(task.request_id for task in message.compile)
        return ()

    monkeypatch.setattr(core.executor, "update", update)
    for verb in ("sleep", "wake_up"):
        monkeypatch.setattr(core.executor, verb, lambda *_: None)
    core.info = replace(core.info, structured_outputs=True, can_sleep=True)
    core._adapters = {"lora:x": ("/nowhere", 1)}
    form = StructuredOutputsParams(regex="[0-9]")
    core.add(replace(toy.make_request("a", random.Random(3), structured_outputs=form), adapter="lora:x"))
    assert compiling == ["a"]
    core.sleep(keep_sequences=True)
    core.wake_up()
    (ended,) = core.step().outputs
    assert (ended.request_id, ended.finish_reason, ended.error.code) == ("a", "error", "unknown_name")
    assert core.stats.waiting == 0
