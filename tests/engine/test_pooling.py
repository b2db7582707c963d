"""Requests for a vector or for logits, beside requests for an answer."""

from __future__ import annotations

import pytest
import torch
from sensorium.engine.pooling_params import PoolingParams
from sensorium.engine.worker.model_runner import NOT_FINITE
from sensorium.mm.errors import InputError


def test_tokens_outside_the_vocabulary_are_refused_before_a_step(toy):
    core = toy.make_core()
    for token in (-1, core.runner.model.vocab_size):
        with pytest.raises(InputError, match=rf"pooling(\.token_ids)? holds {token}; "):
            core.add(toy.request("bad", [5, 6], pooling=PoolingParams((5, token))))
    toy.assert_empty(core)


def test_logits_of_a_whole_vocabulary():
    assert len(PoolingParams(range(300_000)).token_ids) == 300_000
    with pytest.raises(InputError, match=r"pooling\.token_ids has 1048577 entries"):
        PoolingParams(range((1 << 20) + 1))


def test_logits_that_are_not_finite_end_that_prompt_alone(toy):
    core = toy.make_core()
    core.add(toy.request("scored", [5, 6, 7], pooling=PoolingParams((5, 6))))
    core.add(toy.request("vector", [5, 6, 8], pooling=PoolingParams()))
    core.add(toy.request("answered", [5, 6, 9]))
    real = core.runner.model.compute_logits
    core.runner.model.compute_logits = lambda hidden: real(hidden).index_fill(1, torch.tensor([5]), torch.inf)
    (scored, vector, answered) = core.step().outputs
    assert (scored.pooled, scored.error) == (None, NOT_FINITE)
    assert vector.error is None
    assert vector.pooled.norm() == pytest.approx(1.0)
    assert "not finite" in answered.error.message
    core.step()
    toy.assert_empty(core)
