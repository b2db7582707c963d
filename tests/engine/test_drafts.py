"""Steps that sample several rows of a sequence: answers are those of one token a step, whatever is guessed."""

import random
from dataclasses import dataclass, replace

import pytest
import torch
from sensorium import LLM, SamplingParams
from sensorium.callers.errors import ErrorInfo
from sensorium.engine.core.engine_core import EngineCore
from sensorium.engine.frontend.output_processor import CompletionBuilder
from sensorium.engine.sampling_params import RepetitionDetectionParams
from sensorium.engine.structured_outputs import StructuredOutputsParams
from sensorium.engine.types import Logprob, StepHandle, StepOutput, TokenOutput

PROMPTS = ["one two three", "The sky is blue, the sky is", "a b a b a b", "1 2 3 4 5"]
LOOP = {"max_cycle": 4, "min_repeats": 3, "min_tokens": 6}


class Guesses:
    """Guesses the known answer of each sequence, and wrong tokens with a given probability."""

    def __init__(self, answers, wrong, vocab, seed=0):
        self._answers, self._wrong, self._vocab, self._random = answers, wrong, vocab, random.Random(seed)
        self.count = 0

    def __call__(self, request, most):
        answer = self._answers(request)
        guesses = answer[request.num_generated :][: min(most, self._random.randrange(5))]
        self.count += len(guesses)
        return [self._random.randrange(self._vocab) if self._random.random() < self._wrong else token for token in guesses]


def answers(toy, requests, guess=None, **options):
    core = toy.make_core(**options)
    core.scheduler.drafts.propose = guess
    for request in requests:
        core.add(request)
    outputs = toy.drain(core)
    steps = core.stats.steps
    toy.assert_empty(core)
    fields = ("token_ids", "logprobs", "prompt_logprobs")
    joined = {}
    for name, parts in outputs.items():
        values = [sum((getattr(part, field) or () for part in parts), ()) for field in fields]
        joined[name] = (*values, parts[-1].finish_reason, parts[-1].stop_reason, parts[-1].error)
    return joined, steps


OPTIONS = [
    {},
    {"temperature": 1.0, "top_k": 20, "logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "seed": 3},
    {"temperature": 1.0, "min_p": 0.02, "logit_bias": {7: 2.0}, "min_tokens": 5, "prompt_logprobs": 1, "logprobs": 0},
    {"temperature": 1.0, "stop_token_ids": list(range(4, 24)), "ignore_eos": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "greedy")
@pytest.mark.parametrize("core", [{}, {"blocks": 18}, {"budget": 9}], ids=str)
@pytest.mark.parametrize("wrong", [0.0, 0.4])
def test_answers_are_those_of_one_token_a_step(toy, options, core, wrong):
    """Log probabilities too. The decoder has latent attention and a window; with 18 blocks, sequences are preempted."""
    rng = random.Random(7)
    requests = [toy.make_request(f"r{i}", rng, max_tokens=14, **options) for i in range(5)]
    requests[0] = replace(requests[0], bad_word_ids=((9,), (11, 12), tuple(range(30, 33))))
    plain, slow = answers(toy, requests, model=toy.Stack(torch.float32), invariant=True, **core)
    guess = Guesses(lambda request: list(plain[request.request_id][0]), wrong, 101)
    guessed, fast = answers(toy, requests, guess, model=toy.Stack(torch.float32), invariant=True, **core)
    assert guessed == plain
    assert guess.count > 0
    assert wrong or fast < slow


@pytest.mark.parametrize("kind", [{"window": 6}, {"chunk": 8}, {"reads_encoder_side": False, "levels": 3}], ids=str)
def test_kinds_of_caches(toy, kind):
    requests = [toy.make_request(f"r{i}", random.Random(i), max_tokens=30, ignore_eos=True, temperature=0.5) for i in range(4)]
    plain, _ = answers(toy, requests, model=toy.ToyModel(**kind), encoder_rows=60)
    guess = Guesses(lambda request: list(plain[request.request_id][0]), 0.3, 101)
    guessed, _ = answers(toy, requests, guess, model=toy.ToyModel(**kind), encoder_rows=60)
    assert guessed == plain
    assert guess.count > 0


@pytest.mark.parametrize("repair", [False, True])
def test_loops_are_found_inside_a_step(toy, repair):
    """The loop may be complete in the middle of a step. After a repair, its tokens that were never returned are not removed."""

    def make():
        model = toy.ToyModel()
        model.compute_logits = lambda hidden: torch.eye(101)[[21] * len(hidden)]
        return model

    detection = RepetitionDetectionParams(**LOOP, repair=repair, max_repairs=1)
    params = SamplingParams(temperature=0.0, max_tokens=30, repetition_detection=detection)
    results = []
    for guess in (None, Guesses(lambda request: [21] * 40, 0.0, 101)):
        core = toy.make_core(model=make())
        core.scheduler.drafts.propose = guess
        core.add(toy.request("r", [5, 6, 7], params=params))
        kept = []
        for output in toy.drain(core)["r"]:
            del kept[len(kept) - output.num_removed :]
            kept += output.token_ids
        results.append((kept, output.finish_reason))
        toy.assert_empty(core)
    assert results[0] == results[1]


def test_models_with_states_get_guesses(toy):
    requests = [toy.random_prompt("r", 9, 0, 8)]
    expected, _ = answers(toy, requests, model=toy.ToyModel(states=True))
    for wrong in (0.0, 0.3, 1.0):
        guess = Guesses(lambda request: expected[request.request_id][0], wrong, 101)
        assert answers(toy, requests, guess, model=toy.ToyModel(states=True))[0] == expected
        assert guess.count > 0


def test_a_step_whose_guesses_fail_is_repeated_without(toy):
    """Token 50 makes the model's states infinite, and no answer has it."""

    def make():
        model = toy.ToyModel()
        forward, compute = model.forward, model.compute_logits

        def poisoned(batch):
            hidden = forward(batch)
            hidden[batch.input_ids == 50] = torch.nan
            return hidden

        model.forward = poisoned
        model.compute_logits = lambda hidden: compute(hidden).index_fill(1, torch.tensor([50]), -100.0)
        return model

    requests = [toy.random_prompt(f"r{i}", 9 + i, i, 8) for i in range(3)]
    plain, _ = answers(toy, requests, model=make())
    found, _ = answers(toy, requests, lambda request, most: [50][:most], model=make())
    assert found == plain


@dataclass(eq=False)
class Script:
    """An executor that returns the next tokens of a script: one, and one for each guess."""

    tokens: list

    def transfer_stats(self):
        return ()

    def execute(self, output):
        self.output = output
        return StepHandle(1)

    def poll(self, handle):
        done = []
        for task in self.output.scheduled:
            taken, self.tokens = self.tokens[: task.num_sampled], self.tokens[task.num_sampled :]
            logprobs = tuple({token: Logprob(-0.25 * token)} for token in taken)
            done.append(TokenOutput(task.request_id, tuple(taken), logprobs or None))
        return StepOutput(tuple(done))


@pytest.mark.parametrize(
    ("options", "kept", "reason"),
    [
        ({"max_tokens": 4}, 4, ("length", None)),
        ({"stop_token_ids": [13]}, 4, ("stop", 13)),
        ({}, 5, ("stop", None)),  # EOS
        ({"min_tokens": 6, "stop_token_ids": [13]}, 7, ("stop", None)),
        ({"max_tokens": 4, "stop_token_ids": [13]}, 4, ("stop", 13)),
    ],
)
def test_tokens_after_the_end_are_cut(toy, options, kept, reason):
    tokens = [10, 11, 12, 13, 2, 14, 2, 15, 16, 17]  # EOS is 2
    core, script = toy.make_core(), Script(tokens)
    core = EngineCore(core.scheduler, script, core.info)
    core.scheduler.drafts.propose = lambda request, most: [1, 1, 1][:most]
    params = SamplingParams(temperature=0.0, logprobs=0, **{"max_tokens": 20, **options})
    core.add(toy.request("r", [5, 6, 7], params=params, hold_open=True))
    pool = core.scheduler.block_pools.pools[0]
    outputs, used = [], []
    while not outputs or outputs[-1].finish_reason is None:
        outputs += core.step().outputs
        request = core.scheduler.requests["r"]
        used.append((pool.num_blocks - pool.num_free, -(-len(request.token_ids) // 4)))
    assert toy.tokens_of(outputs) == tokens[:kept]
    assert [entry for output in outputs for entry in output.logprobs] == [{t: Logprob(-0.25 * t)} for t in tokens[:kept]]
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == reason
    assert max(len(output.token_ids) for output in outputs) > 1
    assert len(request.token_ids) == 3 + kept
    assert request.num_computed == 2 + kept
    assert used[-1][0] == used[-1][1], "the blocks of tokens that were cut are free"
    core.append("r", [9])
    assert core.scheduler.requests["r"].remaining == 2
    core.abort("r")
    assert pool.num_free == pool.num_blocks


def test_an_error_of_a_script_without_guesses_ends_the_sequence(toy):
    core = toy.make_core()
    failing = Script([])
    failing.poll = lambda handle: StepOutput((TokenOutput("r", (), error=ErrorInfo("internal", "broken")),))
    core = EngineCore(core.scheduler, failing, core.info)
    core.add(toy.request("r", [5, 6, 7]))
    (output,) = core.step().outputs
    assert (output.finish_reason, output.error.message) == ("error", "broken")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("sizes", [[1] * 9, [4, 5], [2, 3, 4], [9]])
def test_stop_strings_and_deltas_do_not_depend_on_tokens_per_step(llm, sizes, include):
    tokenizer = llm.get_tokenizer()
    token_ids = tokenizer.encode("one two three four five", add_special_tokens=False)[:9]
    assert len(token_ids) == 9
    stop = tokenizer.decode(token_ids[4:6])
    params = SamplingParams(stop=[stop], logprobs=0, include_stop_str_in_output=include)
    builder, deltas, left = CompletionBuilder(0, params, tokenizer), [], list(token_ids)
    for size in sizes:
        part, left = left[:size], left[size:]
        ended = "length" if not left else None
        logprobs = tuple({token: Logprob(-1.0)} for token in part)
        must_stop = builder.add(TokenOutput("r", tuple(part), logprobs, finish_reason=ended))
        deltas.append(builder.output(delta=True))
        if builder.cut:
            break
    assert must_stop, "the core has more tokens, or computes them"
    assert (builder.finish_reason, builder.stop_reason) == ("stop", stop)
    assert builder.token_ids == token_ids[:6]
    assert len(builder.logprobs) == 6
    assert deltas[-1].cumulative_logprob == -6.0
    text = tokenizer.decode(token_ids[:4])
    assert builder.text == "".join(delta.text for delta in deltas) == text + stop * include
    assert [token for delta in deltas for token in delta.token_ids] == token_ids[:6]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny-vl", dtype="float32", max_model_len=256, max_num_seqs=4, batch_invariant=True, warm_up=False) as made:
        yield made


REGEX = StructuredOutputsParams(regex="[a-f ]{4,20}x?")
JSON = StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}})
WHOLE = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5, "logprobs": 2, "n": 2},
    "penalties": {"temperature": 0.7, "seed": 1, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logprobs": 1},
    "grammar": {
        "temperature": 1.0,
        "seed": 2,
        "structured_outputs": StructuredOutputsParams(regex="[a-f ]{4,20}x?"),
        "logprobs": 0,
    },
    "json": {
        "temperature": 1.0,
        "seed": 4,
        "structured_outputs": StructuredOutputsParams(json={"type": "array", "items": {"type": "integer"}}),
    },
    "stop": {"temperature": 1.0, "seed": 3, "stop": ["e", "th", " s"], "min_tokens": 3},
    "words": {"temperature": 1.0, "seed": 6, "bad_words": ["the", "a b"], "min_tokens": 8},
    "repair": {"temperature": 0.0, "repetition_detection": RepetitionDetectionParams(**LOOP, repair=True), "stop": ["zq"]},
    "loop": {"temperature": 0.0, "repetition_detection": RepetitionDetectionParams(**LOOP)},
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_the_engine_gives_the_same_with_guesses(llm, name, wrong):
    params = SamplingParams(max_tokens=24, **WHOLE[name])
    scheduler = llm.engine.loop.core.scheduler

    def outputs():
        llm.reset_prefix_cache()
        found = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.error for output in found] == [None] * len(found)
        return [output.outputs for output in found]

    plain = outputs()
    prompts = [tuple(output.prompt_token_ids) for output in llm.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)]

    def answer(request):
        number = prompts.index(tuple(request.token_ids[: request.turn_start]))
        return plain[number][int(request.request_id.rpartition(".")[2])].token_ids

    guess = scheduler.drafts.propose = Guesses(answer, wrong, llm.engine.loop.core.info.vocab_size)
    try:
        assert outputs() == plain
    finally:
        scheduler.drafts.propose = None
    assert guess.count > 0
