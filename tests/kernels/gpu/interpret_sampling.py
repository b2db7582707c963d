"""Sampling and log probabilities against their references: the same tokens are kept and drawn."""

from __future__ import annotations

import math

import pytest
import torch
from sensorium.kernels.gpu import launch_config
from sensorium.kernels.sampling import triton as sampling
from sensorium.kernels.sampling.reference import NO_TOKEN_ALLOWED, NOT_FINITE
from sensorium.kernels.sampling.reference import apply_penalties_ as apply_penalties_reference_
from sensorium.kernels.sampling.reference import log_probs as log_probs_reference
from sensorium.kernels.sampling.reference import sample as sample_reference

CASES = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 5, 0.5, 0.0),
    "all": (1.0, 0, 1.0, 0.0),
    "cool": (0.3, 0, 1.0, 0.0),
    "top_k": (0.8, 7, 1.0, 0.0),
    "one": (1.0, 1, 1.0, 0.0),
    "more than there are": (1.0, 100_000, 0.9, 0.0),
    "hot": (1e6, 2**31 - 1, 1.0, 0.0),
    "top_p": (1.3, 0, 0.8, 0.0),
    "little": (1.0, 0, 1e-6, 0.0),
    "min_p": (1.0, 0, 1.0, 0.2),
    "all rules": (0.9, 40, 0.7, 0.01),
}
NUMBERS = (1e-6, 0.5, 1 - 1e-6)


def rules(case: tuple[float, int, float, float], numbers: tuple[float, ...] = NUMBERS) -> torch.Tensor:
    temperature, top_k, top_p, min_p = case
    least = math.log(min_p) if min_p else -math.inf
    return torch.tensor([(temperature, top_k, top_p, least, number) for number in numbers], dtype=torch.float64)


def every(case: tuple[float, int, float, float], logits: torch.Tensor, numbers: tuple[float, ...] = NUMBERS) -> None:
    """Compare tokens with the reference for random numbers over the whole range."""
    wanted = rules(case, numbers)
    found, wrong = sampling.sample(logits.expand(len(wanted), -1), wanted)
    expected, _ = sample_reference(logits.expand(len(wanted), -1), wanted)
    assert found.tolist() == expected.tolist()
    assert not wrong.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 160])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_tokens(case: tuple[float, int, float, float], vocab: int, dtype: torch.dtype) -> None:
    """In bfloat16 many logits tie, some with the last one kept."""
    with (
        launch_config.override_config("gather_candidates", {"BLOCK": 64}),
        launch_config.override_config("sample", {"BLOCK": 32}),
    ):
        every(case, (torch.randn(1, vocab) * 3).to(dtype))


@pytest.mark.parametrize("scale", [0.01, pytest.param(2.0, marks=pytest.mark.full), 30.0])
@pytest.mark.parametrize("name", ["all", "top_k", pytest.param("top_p", marks=pytest.mark.full), "all rules"])
def test_flat_and_steep(name: str, scale: float) -> None:
    every(CASES[name], torch.randn(1, 3000) * scale, (0.2, 0.7))


def test_the_ends_of_the_range_draw_what_is_kept() -> None:
    logits = torch.tensor([[-200.0, 3.0, -1.0, 2.0, 1.0, -200.0]])
    assert sampling.sample(logits.expand(2, -1), rules(CASES["all"], (0.0, 1 - 2.0**-53)))[0].tolist() == [1, 4]
    assert sampling.sample(logits.expand(2, -1), rules((1.0, 2, 1.0, 0.0), (0.0, 1 - 2.0**-53)))[0].tolist() == [1, 3]


def test_those_equal_to_the_last_are_kept() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0, 1.0, -1.0]])
    for case in ((1.0, 2, 0.9, 0.0), (1.0, 0, 0.6, 0.0)):
        every(case, logits)
    found, _ = sampling.sample(logits.expand(6, -1), rules((1.0, 2, 1.0, 0.0), (0.1, 0.5, 0.6, 0.7, 0.8, 0.95)))
    assert set(found.tolist()) == {0, 1, 2, 4}


def test_rows_differ() -> None:
    wanted = torch.cat([rules(case, (0.6,)) for case in CASES.values()])
    logits = torch.randn(len(wanted), 150) * 2
    assert torch.equal(sampling.sample(logits, wanted)[0], sample_reference(logits, wanted)[0])


def test_only_what_is_allowed() -> None:
    logits, words = torch.randn(6, 75), torch.randint(-(2**31), 2**31 - 1, (6, 3), dtype=torch.int32)
    words[5] = 0
    wanted = torch.cat([rules(case, (0.4,)) for case in list(CASES.values())[:6]])
    found, wrong = sampling.sample(logits, wanted, words)
    expected, same = sample_reference(logits, wanted, words)
    assert torch.equal(found[:5], expected[:5])
    assert wrong.tolist() == same.tolist() == [0] * 5 + [NO_TOKEN_ALLOWED]


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rows_that_are_not_numbers_fail_alone() -> None:
    logits = torch.randn(5, 40)
    logits[0, 7], logits[1, 9], logits[2, 3], logits[3] = math.nan, math.inf, -math.inf, -math.inf
    for case in (CASES["greedy"], CASES["all rules"]):
        wanted = rules(case, (0.2,) * 5)
        found, wrong = sampling.sample(logits, wanted)
        assert (
            wrong.tolist() == sample_reference(logits, wanted)[1].tolist() == [NOT_FINITE, NOT_FINITE, 0, NO_TOKEN_ALLOWED, 0]
        )
        assert torch.equal(found[[2, 4]], sample_reference(logits, wanted)[0][[2, 4]])
        assert ((found >= 0) & (found < 40)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_log_probs(dtype: torch.dtype) -> None:
    logits, tokens = (torch.randn(4, 130) * 3).to(dtype), torch.randint(130, (4,))
    logits[0, 5] = -math.inf
    tokens[1] = logits[1].argmax()
    with launch_config.override_config("log_probs", {"BLOCK": 64}):
        for found, wanted in zip(sampling.log_probs(logits, tokens), log_probs_reference(logits, tokens), strict=True):
            torch.testing.assert_close(found, wanted)


def test_penalties() -> None:
    """Penalties change the listed tokens and nothing else."""
    logits = torch.randn(3, 70) * 3
    rows, tokens = torch.tensor([0] * 4 + [2] * 30), torch.cat([torch.tensor([3, 69, 0, 5]), torch.randperm(70)[:30]])
    counts, penalties = torch.randint(0, 3, (34,)).float(), torch.rand(3, 3) + 0.5
    found, wanted = logits.clone(), logits.clone()
    with launch_config.override_config("penalties", {"BLOCK": 16}):
        sampling.apply_penalties_(found, rows, tokens, counts, penalties)
    apply_penalties_reference_(wanted, rows, tokens, counts, penalties)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1], logits[1])
