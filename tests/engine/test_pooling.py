"""Requests for a vector or for logits, beside requests for an answer."""

from __future__ import annotations

import pytest
import torch
from sensorium.callers.errors import InputError
from sensorium.engine.pooling_params import PoolingParams
from sensorium.engine.pooling_requests import LikelyTokens, TokenLogits, keeps_rows
from sensorium.engine.sampling_params import SamplingParams
from sensorium.engine.worker.model_runner import NOT_FINITE
from sensorium.engine.worker.pooling import keep_rows, kept_rows, pool
from sensorium.engine.worker.sequence_state import SequenceState


def test_tokens_outside_the_vocabulary_are_refused_before_a_step(toy):
    core = toy.make_core()
    for token in (-1, core.executor.runner.model.vocab_size):
        with pytest.raises(InputError, match=rf"(pooling|token_ids) holds {token}; "):
            core.add(toy.request("bad", [5, 6], pooling=TokenLogits((5, token))))
    toy.assert_empty(core)


def test_logits_of_a_whole_vocabulary():
    assert len(PoolingParams(range(300_000)).token_ids) == 300_000
    with pytest.raises(InputError, match=r"^token_ids has 1048577 entries"):
        PoolingParams(range((1 << 20) + 1))


def test_logits_that_are_not_finite_end_that_prompt_alone(toy):
    core = toy.make_core()
    core.add(toy.request("scored", [5, 6, 7], pooling=TokenLogits((5, 6))))
    core.add(toy.request("vector", [5, 6, 8], pooling=PoolingParams().request("last")))
    core.add(toy.request("answered", [5, 6, 9]))
    real = core.executor.runner.model.compute_logits
    core.executor.runner.model.compute_logits = lambda hidden: real(hidden).index_fill(1, torch.tensor([5]), torch.inf)
    (scored, vector, answered) = core.step().outputs
    assert (scored.pooled, scored.error) == (None, NOT_FINITE)
    assert vector.error is None
    assert vector.pooled.norm() == pytest.approx(1.0)
    assert "not finite" in answered.error.message
    core.step()
    toy.assert_empty(core)


def test_likely_tokens_are_those_of_all_logits_after_the_processors(toy):
    """The processors see the last tokens of the prompt as the answer; a failing one fails its own request."""
    core = toy.make_core()
    suppress = {"suppress_tokens": {"tokens": [5], "first": [6]}}
    for name, prompt, seen in (("begun", [5, 6, 7], 1), ("new", [5, 6, 7], 0), ("plain", [5, 6, 8], 0)):
        params = SamplingParams(max_tokens=1, logits_processors=None if name == "plain" else suppress)
        core.add(toy.request(name, prompt, params=params, pooling=LikelyTokens(4, seen)))
    vocab = core.executor.runner.model.vocab_size
    core.add(toy.request("logits", [5, 6, 7], pooling=TokenLogits(tuple(range(vocab)))))
    found = {one.request_id: one.pooled for one in core.step().outputs}
    raw = found["logits"].log_softmax(-1)
    for name, forbidden in (("begun", [5]), ("new", [5, 6])):
        scores = raw.clone()
        scores[forbidden] = -torch.inf
        ids = found[name][0].long()
        assert ids.tolist() == scores.topk(4).indices.tolist()
        assert (found[name][1] - scores.log_softmax(-1)[ids]).abs().max() < 1e-5
        assert (found[name][2] - raw[ids]).abs().max() < 1e-5
    assert found["plain"].shape == (3, 4)
    core.step()
    toy.assert_empty(core)


@pytest.mark.parametrize("wrong", [{"candidates": 0}, {"candidates": 1025}, {"candidates": True}, {"answer_tokens": -1}])
def test_wrong_numbers_of_candidates(wrong):
    with pytest.raises(InputError, match="must be an integer"):
        PoolingParams(**wrong)


@pytest.mark.parametrize("other", [{"token_ids": (5,)}, {"dimensions": 4}, {"task": "embed"}, {"cross_attention": ((0, 0),)}])
def test_candidates_are_the_only_result(other):
    with pytest.raises(InputError, match="ask for different results; leave one out"):
        PoolingParams(candidates=3, **other)
    with pytest.raises(InputError, match="give candidates, too"):
        PoolingParams(answer_tokens=2)


WEIGHTS = torch.arange(1.0, 13.0)[:, None]
POOL = {
    "mean": lambda rows, first: rows[first:].mean(0),
    "cls": lambda rows, first: rows[first],
    "max": lambda rows, first: rows[first:].amax(0),
    "mean_sqrt_len_tokens": lambda rows, first: rows[first:].sum(0) / (12 - first) ** 0.5,
    "weightedmean": lambda rows, first: (rows * WEIGHTS)[first:].sum(0) / WEIGHTS[first:].sum(),
    "last": lambda rows, first: rows[-1],
    "tokens": lambda rows, first: rows,
}


@pytest.mark.parametrize("skipped", [0, 6])
@pytest.mark.parametrize("pooling", [*POOL, "cls+max+mean+last", "weightedmean+mean_sqrt_len_tokens"])
def test_row_pooling_keeps_no_hidden_states_of_a_prompt(toy, pooling, skipped):
    """Chunks add to a state for each mode, or to the vectors on the host. A repeated chunk or prompt changes nothing."""
    model, rows = toy.make_core().executor.runner.model, torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    params, modes = PoolingParams(pooling=pooling, skip_tokens=skipped), pooling.split("+")
    asked = params.request("last")
    sequence = SequenceState(toy.request("a", range(5, 17), pooling=asked), 3)
    if keeps_rows(asked):  # "last" alone keeps nothing
        for start, stop in ((0, 5), (5, 9), (0, 7), (7, 9), (7, 9), (9, 12)):
            keep_rows([(sequence, rows[start:stop], start)], model)
    kept = [*sequence.pooled_rows.values(), *([] if sequence.kept_rows is None else [sequence.kept_rows])]
    expected_shapes = {"tokens": [(12, 8)], "last": []}.get(pooling, [(len(modes), 8)] * 2)
    assert [one.shape for one in kept] == expected_shapes
    expected = torch.cat([POOL[mode](rows, skipped) for mode in modes], dim=-1)
    (found,) = pool([kept_rows(sequence, rows[-1:], model)], [asked], model)
    torch.testing.assert_close(found, torch.nn.functional.normalize(expected, dim=-1))
    assert not found.is_inference()


@pytest.mark.parametrize("wrong", ["sum", "cls+tokens", "", "mean+", 3, "mean+mean", "+".join(["cls"] * 100_000)])
def test_unknown_poolings(wrong):
    with pytest.raises(InputError) as caught:
        PoolingParams(pooling=wrong)
    assert (caught.value.info.code, caught.value.info.param) == ("invalid_value", "pooling")


@pytest.mark.parametrize(
    "wrong", [{"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {"truncation_side": "middle"}, {"skip_tokens": -1}]
)
def test_wrong_truncation(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        PoolingParams(**wrong)


@pytest.mark.parametrize("task", ["token_embed", "token_classify"])
def test_tasks_of_tokens_set_the_pooling_tokens(task):
    assert PoolingParams(task=task).pooling == "tokens"
    for other in ({"pooling": "mean"}, {"token_ids": (5,)}, {"cross_attention": ((0, 0),)}):
        with pytest.raises(InputError, match=f'task="{task}"'):
            PoolingParams(task=task, **other)
    if task == "token_classify":
        with pytest.raises(InputError, match="layer and token_classify ask for different results"):
            PoolingParams(task=task, layer=2)


@pytest.mark.parametrize("other", [{"dimensions": 4}, {"normalize": True}])
def test_hidden_states_of_a_layer_are_not_cut_or_scaled(other):
    assert PoolingParams(pooling="tokens", layer=2, normalize=False).layer == 2
    with pytest.raises(InputError, match="leave out dimensions and normalize=True"):
        PoolingParams(pooling="tokens", layer=2, **other)
