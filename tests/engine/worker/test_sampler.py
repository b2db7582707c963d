"""The sampler against a reference in Python floats."""

import math
import random

import numpy as np
import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.engine.sampling_params import SamplingParams
from sensorium.engine.structured_outputs import StructuredOutputsParams
from sensorium.engine.worker.sampler import gather_logprobs, sample, uniform_number
from sensorium.engine.worker.sampling_state import SamplingState, TokenRules
from sensorium.kernels.dispatch import use_backends
from sensorium.kernels.sampling import cpu as cpu_sampling
from sensorium.kernels.sampling import top_log_probs, top_log_probs_fused

VOCAB = 50


def reference_weights(logits, row, words=()):
    """Return the probabilities from which a row is sampled, by applying the rules one by one."""
    params, answer = row.params, row.token_ids[row.turn_start :]
    x = [float(v) for v in logits]
    if len(answer) < params.min_tokens:
        for token in row.end_ids:
            x[token] = -math.inf
    for word in words:
        if len(word) == 1 or tuple(answer[-(len(word) - 1) :]) == word[:-1]:
            x[word[-1]] = -math.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in set(row.token_ids):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(answer):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(answer).count(token)
    if params.temperature == 0:
        return [1.0 if v == max(x) else 0.0 for v in x]
    weights = [math.exp((v - max(x)) / params.temperature) for v in x]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    order = sorted(range(VOCAB), key=lambda token: -weights[token])
    if params.top_k > 0:
        for token in order[params.top_k :]:
            weights[token] = 0.0
    total, before = sum(weights), 0.0
    for token in order:
        share = weights[token] / total
        if before >= params.top_p and token != order[0]:
            weights[token] = 0.0
        before += share
    return [w / sum(weights) for w in weights]


CASES = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 12, "top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.0, "top_k": -1},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.0, "repetition_penalty": 1.7},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": -0.5, "top_p": 0.9},
    {"temperature": 0.0, "logit_bias": {3: 30.0, 4: -100.0}},
    {"temperature": 1.0, "min_tokens": 9, "top_k": 8},
]


@pytest.mark.parametrize("seed", range(4))
def test_every_rule_in_one_mixed_batch(seed):
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, words = [], []
    for i, case in enumerate(CASES):
        tokens = [rng.randrange(VOCAB) for _ in range(12)]
        words.append(((7,), (tokens[-1], 9), (tokens[-2], tokens[-1], 11), (48, 12)) if i % 2 else ())
        params = SamplingParams(**case, bad_words=["in words"] if i % 2 else [])
        rows.append(SamplingState(params, tokens, 6, 100 * seed + i, TokenRules((1, 2), words[i])))
    logits = torch.randn(len(rows), VOCAB, generator=gen) * 2
    expected = [reference_weights(logits[i], row, words[i]) for i, row in enumerate(rows)]
    tokens = [found.token for found in sample(logits.clone(), rows)]
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        assert expected[i][token] > 0, f"case {i} sampled a token that its rules exclude"
        assert sample(logits[i : i + 1].clone(), [row])[0].token == token, "a row must not depend on other rows"


@pytest.mark.parametrize("seed", range(4))
def test_numpy_and_the_reference_sample_the_same_tokens(seed):
    """The rows include log probabilities, grammars and rows that fail."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = []
    for i, case in enumerate((*CASES, {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.8, "min_tokens": 9})):
        params = SamplingParams(**case, **({"logprobs": i} if i % 3 == 0 else {}))
        ends = range(VOCAB) if i == 14 else (1, 2)
        tokens, rules = [rng.randrange(VOCAB) for _ in range(12)], TokenRules(ends, ((7,),) * (i % 2))
        rows.append(SamplingState(params, tokens, 6, 50 * seed + i, rules))
    grammar = torch.rand(VOCAB, generator=gen) < 0.2
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, structured_outputs=StructuredOutputsParams(choice=["a"]))
        rows.append(SamplingState(params, [5, 6, 7], 2, seed))
        rows[-1].allowed_tokens = lambda vocab: grammar.numpy()
    logits = torch.randn(len(rows), VOCAB, generator=gen) * 2
    logits[12, 5], logits[13, 6] = math.nan, math.inf
    wanted = sample(logits.clone(), rows)
    with use_backends("sample=torch"):
        found = sample(logits.clone(), rows)
    for i, (one, other) in enumerate(zip(wanted, found, strict=True)):
        assert isinstance(one, Exception) == isinstance(other, Exception) == (12 <= i < 15)
        if isinstance(one, Exception):
            assert str(one) == str(other)
            continue
        assert one.token == other.token
        assert (one.logprobs is None) == (other.logprobs is None)
        for token, entry in (one.logprobs or {}).items():
            assert other.logprobs[token].rank == entry.rank
            assert other.logprobs[token].logprob == pytest.approx(entry.logprob, abs=1e-5)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("case", [c for c in CASES if c["temperature"] > 0])
def test_frequencies_are_the_references_probabilities(case, backend):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    rows = [SamplingState(SamplingParams(**case), [5, 6, 7, 6], 2, seed, TokenRules((1, 2))) for seed in range(6000)]
    expected = torch.tensor(reference_weights(logits[0], rows[0]))
    logits = logits.expand(len(rows), -1).clone()
    with use_backends(f"sample={backend}"):
        tokens = [found.token for found in sample(logits, rows)]
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB) / len(rows)
    assert counts[expected == 0].sum() == 0
    assert (counts - expected).abs().max() < 0.03


def test_random_numbers_depend_on_seed_and_position():
    assert uniform_number(1, 5) == uniform_number(1, 5)
    draws = torch.tensor([uniform_number(seed, position) for seed in range(40) for position in range(40)])
    assert len(draws.unique()) == 1600
    assert abs(draws.mean() - 0.5) < 0.03
    assert 0 <= draws.min() < 0.01
    assert 0.99 < draws.max() < 1


def test_logprobs_are_of_the_raw_logits_with_ranks():
    logits = torch.randn(3, VOCAB)
    raw = logits.clone()
    params = SamplingParams(temperature=0.5, logprobs=4, logit_bias={8: 100.0})
    rows = [SamplingState(params, [5], 1, i) for i in range(2)] + [SamplingState(SamplingParams(temperature=0.0), [5], 1, 0)]
    results = sample(logits, rows)
    tokens, entries = [found.token for found in results], [found.logprobs for found in results]
    assert tokens[:2] == [8, 8]
    assert entries[2] is None
    table = raw.log_softmax(-1)
    for i in range(2):
        best = table[i].topk(4)
        assert next(iter(entries[i])) == 8
        assert entries[i][8].logprob == pytest.approx(table[i, 8].item())
        assert entries[i][8].rank == int((table[i] > table[i, 8]).sum()) + 1
        assert set(entries[i]) == {8, *best.indices.tolist()}
        for rank, token in enumerate(best.indices.tolist(), start=1):
            assert entries[i][token].rank == rank


def test_processed_logprobs_are_of_the_tokens_that_the_rules_allow():
    """Each row chooses; the temperature changes neither."""
    logits = torch.randn(3, VOCAB)
    rules = {"temperature": 0.5, "logprobs": 2, "logits_processors": {"suppress_tokens": {"tokens": [3, 4]}}}
    modes = ("raw_logprobs", "processed_logprobs", "processed_logprobs")
    params = [SamplingParams(**rules, logprobs_mode=mode) for mode in modes]
    params[2] = SamplingParams(logprobs=2, logprobs_mode=modes[2])
    expected = [logits[0], logits[1].clone().index_fill_(0, torch.tensor([3, 4]), -torch.inf), logits[2].clone()]
    results = sample(logits.clone(), [SamplingState(one, [5], 1, i) for i, one in enumerate(params)])
    for found, row in zip(results, expected, strict=True):
        for token, entry in found.logprobs.items():
            assert entry.logprob == pytest.approx(row.log_softmax(-1)[token].item(), abs=1e-5)
    with pytest.raises(InputError, match="raw_logprobs or processed_logprobs"):
        SamplingParams(logprobs_mode="raw_logits")


def test_processed_logprobs_are_of_the_tokens_that_the_grammar_allows(monkeypatch):
    monkeypatch.setattr(SamplingState, "allowed_tokens", lambda self, size: np.arange(size) == 2)
    grammar = StructuredOutputsParams(regex="a")
    params = SamplingParams(structured_outputs=grammar, logprobs=1, logprobs_mode="processed_logprobs")
    (found,) = sample(torch.randn(1, VOCAB), [SamplingState(params, [5], 1, 0)])
    assert found.token == 2
    assert (found.logprobs[2].logprob, found.logprobs[2].rank) == (0.0, 1)


def test_log_probabilities_of_a_kernel_equal_those_of_a_table():
    logits, tokens = torch.randn(5, VOCAB), torch.tensor([4, 9, 9, 0, 49])
    fused, table = top_log_probs_fused(logits, tokens, 50), top_log_probs(logits, tokens, 50)
    assert torch.equal(fused[1], table[1])
    assert torch.equal(fused[2], table[2])
    torch.testing.assert_close(fused[0], table[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(fused[3], table[3], rtol=0, atol=1e-5)


def test_each_row_has_as_many_log_probabilities_as_it_asked_for():
    counts, logits = [3, 0, None, 50, 7], torch.randn(5, VOCAB)
    rows = [SamplingState(SamplingParams(temperature=0.0, logprobs=count), [5], 1) for count in counts]
    for row, found, count in zip(logits, sample(logits, rows), counts, strict=True):
        expected = None if count is None else gather_logprobs(row[None], [found.token], count)[0]
        assert found.logprobs == expected
        assert count is None or len(found.logprobs) == max(1, count)


def test_zero_logprobs_give_the_chosen_token_alone():
    (entry,) = gather_logprobs(torch.randn(1, VOCAB), [3], 0)
    assert list(entry) == [3]


@pytest.mark.parametrize("scale", [0.5, 3.0, 12.0])
def test_a_large_vocabulary_keeps_the_tokens_that_a_full_sort_keeps(scale):
    """Every random number picks a token of the reference's set; the ends of the range pick its first and last token."""
    vocab, logits = 70_001, torch.randn(1, 70_001, generator=torch.Generator().manual_seed(1)) * scale
    for case in ({"top_p": 0.9}, {"top_p": 0.3}, {"top_k": 700}, {"top_k": 40, "top_p": 0.5}, {"min_p": 0.1, "top_p": 0.99}):
        params = SamplingParams(**case)
        probs = logits[0].double().softmax(-1)
        order = probs.argsort(descending=True)
        kept = probs[order]
        kept = kept[kept >= params.min_p * kept[0]][: params.top_k or vocab]
        before = (kept.cumsum(-1) - kept) / kept.sum()
        border = before - params.top_p
        kept = kept[border < 0]
        inside = order[: len(kept)].sort().values
        numbers = [0.0, *torch.rand(50, generator=torch.Generator().manual_seed(2)).tolist(), 1 - 2.0**-53]
        mass = probs[inside].cumsum(-1) / kept.sum()
        wanted = torch.searchsorted(mass, torch.tensor(numbers, dtype=torch.float64), right=True).clamp(max=len(inside) - 1)
        log_min_p = math.log(params.min_p) if params.min_p else -math.inf
        rules = torch.tensor([(1.0, params.top_k, params.top_p, log_min_p, number) for number in numbers], dtype=torch.float64)
        tokens = cpu_sampling.sample(logits.expand(52, -1), rules)[0].tolist()
        for number, found, index in zip(numbers, tokens, wanted, strict=True):
            near = inside[max(0, int(index) - 1) : int(index) + 2].tolist()  # float32 beside float64
            assert found in near or abs(mass[(inside <= found).sum() - 1] - number) < 1e-5


def test_rows_that_are_not_finite_fail_alone():
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[1, 7], logits[3, 9], logits[0, 4] = math.nan, math.inf, -math.inf
    whole = logits.clone()
    for params in (SamplingParams(temperature=0.0), SamplingParams(top_p=0.9, frequency_penalty=1.0, logprobs=2)):
        found = sample(logits.clone(), [SamplingState(params, [1, 2, 3], 1, i) for i in range(5)])
        assert [i for i, result in enumerate(found) if isinstance(result, Exception)] == [1, 3]
        assert all("logits are not finite" in str(found[i]) for i in (1, 3))
        for i in (0, 2, 4):
            assert [found[i]] == sample(whole[i : i + 1].clone(), [SamplingState(params, [1, 2, 3], 1, i)])


def test_a_row_with_nothing_left_is_an_error():
    early = SamplingState(SamplingParams(min_tokens=2), [1], 1, 0, TokenRules(range(VOCAB)))
    rows = [early, SamplingState(SamplingParams(), [1], 1, 0)]
    first, second = sample(torch.zeros(2, VOCAB), rows)
    assert "no token is allowed" in str(first)
    assert second.token < VOCAB


@pytest.mark.parametrize("seed", range(5))
def test_a_state_that_followed_its_sequence_samples_like_a_new_one(seed):
    """The histories are random: tokens, rollbacks, turns and loop repairs."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    params = SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.6, frequency_penalty=0.4, min_tokens=3, bad_words=["x"], logit_bias={5: 2}
    )
    tokens, words, forbidden = [rng.randrange(VOCAB) for _ in range(9)], ((7,), (8, 9)), ()
    row = SamplingState(params, tokens, 6, seed, TokenRules((1, 2), words))
    for _ in range(60):
        if rng.random() < 0.2:
            keep, restart = rng.randint(2, len(tokens)), rng.random() < 0.4
            del tokens[keep:]
            tokens += [rng.randrange(VOCAB) for _ in range(rng.randint(0, 70))]
            forbidden = () if restart else (*forbidden, (rng.randrange(VOCAB), rng.randrange(VOCAB)))
            row.rollback(keep, len(tokens) if restart else min(row.turn_start, keep), (*words, *forbidden))
        logits = torch.randn(1, VOCAB, generator=gen) * 2
        fresh = SamplingState(params, list(tokens), row.turn_start, seed, TokenRules((1, 2), (*words, *forbidden)))
        (mine,), (new,) = sample(left := logits.clone(), [row]), sample(right := logits.clone(), [fresh])
        assert torch.equal(left, right)
        assert mine == new
        tokens.append(mine.token)
