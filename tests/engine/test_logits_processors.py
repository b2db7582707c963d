"""Registered logits processors: names, arguments, rows and batches; an error fails its own request only."""

import sys

import pytest
import torch
from sensorium import SamplingParams
from sensorium.callers.errors import InputError
from sensorium.engine.core.codec import decode, encode
from sensorium.engine.logits_processors import register_logits_processor
from sensorium.engine.worker.sampler import sample
from sensorium.engine.worker.sampling_state import SamplingState, TokenRules

VOCAB = 20
MISTAKES = {-1: ZeroDivisionError, -2: SystemExit, -3: KeyboardInterrupt}


class Only:
    """Allows one token, or fails."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, token_ids, logits):
        if self.token < 0:
            raise MISTAKES[self.token]("own mistake")
        kept = logits[self.token].clone()
        logits.fill_(-torch.inf)
        logits[self.token] = kept


class Together:
    calls = 0

    def __init__(self, token: int = 0) -> None:
        self.token = token

    def __call__(self, token_ids, logits):
        raise AssertionError("the batch form is there")

    @staticmethod
    def batch(processors, answers, logits):
        Together.calls += 1
        if min(p.token for p in processors) < 0:
            raise MISTAKES[min(p.token for p in processors)]("own mistake")
        for row, (p, answer) in enumerate(zip(processors, answers, strict=True)):
            logits[row, p.token + len(answer)] += 100


def broken(token_ids, logits):
    logits[3] = torch.nan


register_logits_processor("test only", Only)
register_logits_processor("test together", Together)
register_logits_processor("test together again", lambda: Together(9))
register_logits_processor("test broken", lambda: broken)
register_logits_processor("test exits", lambda: sys.exit(3))


def row(processors, seed=0, **params):
    return SamplingState(
        SamplingParams(temperature=0.0, logits_processors=processors, **params), [1, 2, 3], 1, seed, TokenRules((0,))
    )


def logits(rows):
    return torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(0))


def test_a_processor_changes_the_logits():
    rows = [row({"test only": {"token": t}}) for t in (4, 9)] + [row({"test together": {"token": 5}}), row(None)]
    x = logits(rows)
    tokens = [found.token for found in sample(x.clone(), rows)]
    assert tokens == [4, 9, 5 + 2, int(x[3].argmax())]


def test_rows_of_a_class_are_batched():
    Together.calls = 0
    rows = [row({"test together": {"token": t}}) for t in range(5)]
    assert [found.token for found in sample(logits(rows), rows)] == [2, 3, 4, 5, 6]
    assert Together.calls == 1
    twice = row({"test together": {"token": 3}, "test together again": {}}, logprobs=1, logit_bias={11: -1.0})
    x = logits([twice])
    (found,) = sample(x.clone(), [twice])
    assert found.token == (5 if x[0, 5] > x[0, 11] - 1 else 11)


@pytest.mark.parametrize("name", ["test only", "test together"])
def test_an_error_ends_its_own_row(name):
    rows = [row({name: {"token": 4}}), row({name: {"token": -1}}), row(None), row({name: {"token": 7}})]
    x = logits(rows)
    first, second, third, fourth = sample(x.clone(), rows)
    shift = 2 if name == "test together" else 0
    assert second.info.message == "a logits processor raised ZeroDivisionError: own mistake"
    assert second.info.param == "logits_processors"
    assert isinstance(second.__cause__, ZeroDivisionError)
    assert (first.token, third.token, fourth.token) == (4 + shift, int(x[2].argmax()), 7 + shift)


@pytest.mark.parametrize("name", ["test only", "test together"])
def test_an_exit_ends_its_own_row_and_an_interrupt_is_one(name):
    rows = [row({name: {"token": 4}}), row({name: {"token": -2}}), row(None)]
    first, second, third = sample(logits(rows), rows)
    assert isinstance(second, InputError)
    assert "SystemExit (own mistake)" in str(second)
    assert first.token >= 4
    assert third.token >= 0
    with pytest.raises(KeyboardInterrupt):
        sample(logits([0]), [row({name: {"token": -3}})])


def test_a_factory_that_exits_is_the_rows_error():
    first, second = sample(logits([0, 0]), [row({"test exits": {}}), row(None)])
    assert isinstance(first, InputError)
    assert "cannot be made from {}: SystemExit: 3" in str(first)
    assert second.token >= 0


def test_logits_that_are_not_finite_afterwards_are_an_error():
    first, second = sample(logits([0, 0]), [row(["test broken"]), row(None)])
    assert "not finite" in str(first)
    assert "logits_processors" in str(first)
    assert second.token >= 0


def test_arguments_a_factory_does_not_take():
    (found,) = sample(logits([0]), [row({"test only": {"tokn": 1}})])
    assert isinstance(found, InputError)
    assert "tokn" in str(found)


def test_names():
    with pytest.raises(InputError, match="did you mean test only"):
        SamplingParams(logits_processors=["test onyl"])
    with pytest.raises(InputError, match="must be names"):
        SamplingParams(logits_processors="test only")
    with pytest.raises(InputError, match="must map"):
        SamplingParams(logits_processors={"test only": 5})
    with pytest.raises(InputError, match="taken"):
        register_logits_processor("test only", Together)
    with pytest.raises(InputError, match="needs a name"):
        register_logits_processor("", Together)
    with pytest.raises(InputError, match="needs a class or a function"):
        register_logits_processor("test five", 5)
    with pytest.raises(InputError, match="must be names"):
        SamplingParams(logits_processors=[["test only"]])
    assert register_logits_processor("test only", Only) is Only
    params = SamplingParams(logits_processors={"test only": {"token": 4}})
    assert decode(encode(params)) == params
