"""Drafting on equals drafting off: random histories, every feature of sampling, both forms of the engine."""

import gc
import random
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from drafting import ALL, free_drafter, use
from sensorium import LLM, SamplingParams
from sensorium.engine.drafts.depth import StepCosts
from sensorium.engine.drafts.drafter import Drafter
from sensorium.engine.sampling_params import RepetitionDetectionParams
from sensorium.engine.speculative_config import DraftLimits
from sensorium.engine.stats import DraftStats
from sensorium.engine.structured_outputs import StructuredOutputsParams

OPTIONS = [
    {},
    {"temperature": 0.7, "logprobs": 2},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "seed": 3},
    {"temperature": 0.5, "min_p": 0.02, "logit_bias": {7: 2.0, 8: 3.0}, "min_tokens": 5, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 0.3, "stop_token_ids": list(range(4, 24)), "ignore_eos": True, "top_p": 0.6},
    {"repetition_detection": RepetitionDetectionParams(4, 2, 4, repair=True, max_repairs=2)},
]
KINDS = [
    {"model": {}, "core": {}},
    {"model": {"window": 6}, "core": {"blocks": 40}},
    {"model": {"chunk": 8}, "core": {"budget": 9}},
    {"model": {"levels": 3}, "core": {"blocks": 18, "budget": 30}},
    {"model": {"states": True}, "core": {"blocks": 18, "budget": 30}},
    {"model": {"states": True, "window": 6}, "core": {"caching": False}},
]


class History:
    """Requests that arrive, answer, go on, are cut and end, by a seed; what happens to one depends on its own answer only."""

    def __init__(self, toy, seed, answers=None):
        self.toy, self.rng, self.answers = toy, random.Random(seed), answers or {}
        self.requests = [self._request(i) for i in range(self.rng.randint(3, 7))]

    def _request(self, number):
        rng, options = self.rng, dict(self.rng.choice(OPTIONS))
        is_open = rng.random() < 0.4
        options |= {"max_tokens": rng.randint(1, 30)}
        options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
        request = self.toy.make_request(f"r{number}", rng, hold_open=is_open, **options)
        if rng.random() < 0.3:  # a prompt that repeats itself
            request = replace(request, prompt_token_ids=tuple(rng.randrange(4, 12) for _ in range(30)), features=())
        known = list(self.answers.get(request.request_id, [[]])[0])
        noise = random.Random(number)
        draft = [noise.randrange(101) if noise.random() < 0.2 else token for token in known]
        return replace(request, draft_token_ids=tuple(draft))

    def run(self, core):
        waiting = list(self.requests)
        turns = {one.request_id: random.Random(one.request_id) for one in waiting}
        found, left, prompts = {name: [[]] for name in turns}, {}, {}
        for _ in range(3000):
            while waiting and len(core.scheduler.requests) < 4:
                core.add(waiting.pop(0))
            if not (waiting or core.scheduler.running or core.scheduler.waiting):
                break
            for output in core.step().outputs:
                name, parts = output.request_id, found[output.request_id][-1]
                if output.num_removed:
                    del parts[len(parts) - output.num_removed :]
                entries = output.logprobs or [None] * len(output.token_ids)
                parts += output.token_ids if output.logprobs is None else zip(output.token_ids, entries, strict=True)
                if output.prompt_logprobs is not None:  # with drafts, the step that ends the prompt may end the answer
                    prompts[name] = output.prompt_logprobs
                if output.finish_reason is None:
                    continue
                found[name].append([output.finish_reason, output.stop_reason, prompts.pop(name, None)])
                if name in core.scheduler.sequences:
                    left[name] = left.get(name, 0) + 1
                    self._go_on(core, name, turns[name], left[name])
                    found[name].append([])
        core.step()
        return found

    def _go_on(self, core, name, rng, turn):
        length = len(core.scheduler.requests[name].token_ids)
        if turn == 3 or rng.random() < 0.2:
            core.append(name, [], close=True)
            return
        if rng.random() < 0.5:
            start = core.scheduler.requests[name].turn_start
            core.truncate(name, rng.randint(start, length))
        core.append(name, [rng.randrange(4, 101) for _ in range(rng.randint(1, 5))], close=rng.random() < 0.2)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_equal_those_without_drafts(toy, kind, seed):
    def run(drafter, answers=None):
        core = toy.make_core(model=toy.ToyModel(**kind["model"]), encoder_rows=60, **kind["core"])
        use(core.scheduler, drafter)
        found = History(toy, seed, answers).run(core)
        toy.assert_empty(core)
        return found, core.scheduler.stats

    plain, slow = run(None)
    answers = {name: [[t if isinstance(t, int) else t[0] for t in parts[0]]] for name, parts in plain.items()}
    drafted, fast = run(free_drafter(), answers)
    assert drafted == plain
    assert sum(stats.num_accepted for stats in fast.drafts) > 0
    assert sum(stats.num_accepted for stats in fast.drafts) <= sum(stats.num_drafted for stats in fast.drafts)
    assert fast.steps < slow.steps or fast.preemptions > slow.preemptions


def test_latent_attention_and_preemption(toy):
    rng = random.Random(1)
    requests = [toy.make_request(f"r{i}", rng, max_tokens=25, temperature=0.4, logprobs=1) for i in range(5)]

    def run(drafter):
        core = toy.make_core(model=toy.Stack(torch.float32), invariant=True, blocks=22)
        use(core.scheduler, drafter)
        for request in requests:
            core.add(request)
        outputs = toy.drain(core)
        toy.assert_empty(core)
        parts = {
            name: [(t, e) for o in part for t, e in zip(o.token_ids, o.logprobs or (), strict=True)]
            for name, part in outputs.items()
        }
        return parts, core.scheduler.stats.preemptions

    plain, preemptions = run(None)
    assert preemptions > 0
    assert run(free_drafter(101))[0] == plain


class Broken:
    name, matched = "broken", 0

    def __init__(self, tokens):
        self.tokens = tokens

    def propose(self, sequence, budget):
        if self.tokens is None:
            raise RuntimeError("broken")
        return self.tokens


@pytest.mark.parametrize(
    ("tokens", "failed"),
    [(None, 1), ([101], 0), ([-1], 0), ([5, "x"], 0), ([True], 0), (5, 1), ([7] * 1000, 0)],
)
def test_failures_of_a_proposer_touch_no_answer(toy, tokens, failed):
    request = toy.random_prompt("r", 9, 3, 20)
    answer, reason = toy.alone(request)
    core = toy.make_core()
    drafter = free_drafter(limits=DraftLimits(), proposers=[lambda message: Broken(tokens)])
    use(core.scheduler, drafter)
    core.add(request)
    outputs = toy.drain(core)["r"]
    assert (toy.tokens_of(outputs), outputs[-1].finish_reason) == (answer, reason)
    assert sum(stats.failed for stats in outputs[-1].stats.drafts) == failed
    toy.assert_empty(core)


def test_noise_is_switched_off_and_counted(toy):
    """The proposer says that a long match makes it sure, so it is tried."""
    core = toy.make_core()
    noise = Broken([9, 9])
    noise.matched = 40
    drafter = free_drafter(limits=DraftLimits(), proposers=[lambda message: noise], costs=(1.0, 1.01, 1.02))
    drafter.rates.rate = lambda name, matched: 0.9
    use(core.scheduler, drafter)
    model = core.executor.runner.model
    model.compute_logits = lambda hidden: torch.eye(101)[[21] * len(hidden)]
    core.add(toy.random_prompt("r", 9, 3, 40))
    (stats,) = toy.drain(core)["r"][-1].stats.drafts
    assert stats == DraftStats("broken", 8, (8, 8), (0, 0), switched_off=1)
    assert core.scheduler.stats.drafts == (stats,)


def test_a_finished_answer_is_a_draft_for_its_tenant_only(toy):
    core = toy.make_core(caching=False)
    use(core.scheduler, free_drafter(limits=replace(ALL, suffix=True, shortest=30, longest=30)))
    accepted = []
    for name, salt in ("a", "x"), ("b", "x"), ("c", "y"), ("d", ""):
        core.add(replace(toy.random_prompt(name, 9, 3, 20), salt=salt))
        accepted.append(sum(stats.num_accepted for stats in toy.drain(core)[name][-1].stats.drafts))
    assert accepted[1] > 15
    assert accepted[0] == accepted[2] == accepted[3]


def test_nothing_of_a_sequence_remains(toy):
    core = toy.make_core()
    use(core.scheduler, free_drafter())
    core.add(toy.random_prompt("r", 9, 3, 20, hold_open=True, draft_token_ids=(5, 6)))
    toy.drain(core)
    drafts = weakref.ref(core.scheduler.requests["r"].drafts)
    core.abort("r")
    toy.assert_empty(core)
    gc.collect()
    assert drafts() is None


PREDICTED = DraftLimits(depth=3, predicted=3, method="mtp")


def answer_with_predictions(toy, drafter, seconds, is_right, advance=lambda seconds: None):
    """Draft for 40 steps of 10 ms, after each of which the worker predicts for so many seconds. Return the statistics."""
    sequence = SimpleNamespace(
        message=toy.request("r", [5, 6]), token_ids=[5, 6], turn_start=2, predicted=(2, (7, 7, 7)), drafts=None
    )
    for _ in range(40):
        drafter.plan([sequence], 1)
        guesses = drafter.take(sequence, 3)
        drafter.start_step(1 + len(guesses))
        advance(0.01 + seconds)
        drafter.end_step(seconds, 1)
        sequence.token_ids += [7] * (1 + len(guesses)) if is_right else [8]
        sequence.predicted = (len(sequence.token_ids), (7, 7, 7)) if drafter.predicts(sequence) else sequence.predicted
        drafter.settle(sequence, len(guesses))
    (stats,) = sequence.drafts.stats()
    assert stats.proposer == "mtp"
    return stats


@pytest.mark.parametrize(
    ("seconds", "is_right", "pays"), [(0.002, True, True), (0.02, True, True), (0.04, True, False), (0.002, False, False)]
)
def test_predictions_are_used_while_they_save_more_than_they_take(toy, seconds, is_right, pays):
    """Three more tokens save 30 ms if they are always right."""
    now = [0.0]
    drafter = Drafter(PREDICTED, StepCosts((1.0,) * 16), 101, now=lambda: now[0])
    stats = answer_with_predictions(toy, drafter, seconds, is_right, lambda passed: now.__setitem__(0, now[0] + passed))
    assert stats.switched_off == (not pays)
    assert (stats.num_drafted > 100) == pays


def test_a_free_drafter_does_not_depend_on_the_seconds_of_predictions(toy):
    every = {answer_with_predictions(toy, free_drafter(limits=PREDICTED), seconds, True) for seconds in (0.0, 1e-9, 9.0)}
    (stats,) = every
    assert stats.switched_off == 0
    assert stats.num_drafted > 100


REGEX = StructuredOutputsParams(regex="[a-f ]{4,20}x?")
WHOLE = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "many": {"temperature": 1.0, "seed": 5, "logprobs": 2, "n": 3, "min_p": 0.01, "ignore_eos": True},
    "penalties": {
        "temperature": 0.7,
        "seed": 1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "prompt_logprobs": 1,
        "ignore_eos": True,
    },
    "grammar": {"temperature": 1.0, "seed": 2, "structured_outputs": REGEX, "logprobs": 0},
    "stop": {"temperature": 1.0, "seed": 3, "stop": ["e", "th", " s"], "min_tokens": 3},
    "words": {"temperature": 1.0, "seed": 6, "bad_words": ["the", "a b"], "min_tokens": 8, "logit_bias": {40: 3.0}},
    "allowed": {"temperature": 1.0, "seed": 7, "allowed_token_ids": list(range(30, 60))},
    "repair": {"temperature": 0.0, "repetition_detection": RepetitionDetectionParams(4, 3, 6, repair=True), "stop": ["zq"]},
}
PROMPTS = ["one two three one two three", "The sky is blue, the sky is", "a b a b a b"]


@pytest.fixture(scope="module", params=[False, True], ids=["in process", "own process"])
def engines(request):
    options = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "batch_invariant": True, "warm_up": False}
    options |= {"engine_process": request.param, "kv_cache_dtype": "int8" if request.param else "auto"}
    with (
        LLM("tiny-vl", speculative_config={"num_speculative_tokens": 0}, **options) as plain,
        LLM("tiny-vl", speculative_config={"method": "suffix"}, **options) as drafting,
    ):
        if not request.param:  # on a busy machine, measured costs may allow no drafts
            use(drafting.engine.loop.core.scheduler, free_drafter(drafting.engine.info.vocab_size))
        yield plain, drafting


@pytest.mark.parametrize("name", WHOLE)
def test_answers_of_an_engine_equal_those_without_drafts(engines, name):
    """Twice: the second time, the corpus has the answers, and a text with mistakes is given as well."""
    plain, drafting = engines
    params = SamplingParams(max_tokens=24, **WHOLE[name])
    expected = [output.outputs for output in plain.generate(PROMPTS, params, use_tqdm=False)]
    assert [output.outputs for output in drafting.generate(PROMPTS, params, use_tqdm=False)] == expected
    text = "".join(answers[0].text[:30] + "?" for answers in expected)
    for draft in (text, [token for answers in expected for token in answers[0].token_ids]):
        outputs = drafting.generate(PROMPTS, replace(params, draft_text=draft), use_tqdm=False)
        assert [output.error for output in outputs] == [None] * len(outputs)
        assert [output.outputs for output in outputs] == expected
    accepted = sum(stats.num_accepted for stats in drafting.stats.drafts)
    assert accepted > 0 or drafting.engine.config.engine_process
    assert drafting.stats.no_drafts == ""
    assert (plain.stats.no_drafts, plain.stats.drafts) == ("off", ())
