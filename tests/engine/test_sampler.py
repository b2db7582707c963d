"""The vectorised sampler against a plain one that does a row at a time."""

import math
import random

import pytest
import torch
from sensorium.engine.sample_row import SampleRow
from sensorium.engine.sampler import gather_logprobs, sample, uniform_number
from sensorium.engine.sampling_params import SamplingParams

VOCAB = 50


def reference_weights(logits, row, words=()):
    """The probabilities a row is drawn from, one rule after the other, on Python floats."""
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
        rows.append(SampleRow(params, tokens, 6, 100 * seed + i, (1, 2), words[i]))
    logits = torch.randn(len(rows), VOCAB, generator=gen) * 2
    expected = [reference_weights(logits[i], row, words[i]) for i, row in enumerate(rows)]
    tokens = [found.token for found in sample(logits.clone(), rows)]
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        assert expected[i][token] > 0, f"case {i} drew a token its rules exclude"
        assert sample(logits[i : i + 1].clone(), [row])[0].token == token, "a row depends on nothing but itself"


@pytest.mark.parametrize("case", [c for c in CASES if c["temperature"] > 0])
def test_frequencies_are_the_references_probabilities(case):
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    rows = [SampleRow(SamplingParams(**case), [5, 6, 7, 6], 2, seed, (1, 2)) for seed in range(6000)]
    expected = torch.tensor(reference_weights(logits[0], rows[0]))
    tokens = [found.token for found in sample(logits.expand(len(rows), -1).clone(), rows)]
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB) / len(rows)
    assert counts[expected == 0].sum() == 0
    assert (counts - expected).abs().max() < 0.03


def test_a_seed_and_a_position_decide():
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
    rows = [SampleRow(params, [5], 1, i) for i in range(2)] + [SampleRow(SamplingParams(temperature=0.0), [5], 1, 0)]
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


def test_zero_logprobs_give_the_chosen_token_alone():
    (entry,) = gather_logprobs(torch.randn(1, VOCAB), [3], [0])
    assert list(entry) == [3]
