"""Routing and experts: choices by hand, sums row by row, and rows that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from sensorium.kernels.moe import loop_experts, route
from sensorium.kernels.moe.experts import RoutingConfig
from sensorium.kernels.moe.reference import loop_experts as loop_experts_reference

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(23, 16, generator=GENERATOR)
LOGITS = torch.randn(23, 12, generator=GENERATOR) * 2
MATRICES = torch.randn(12, 16, 16, generator=GENERATOR) / 4


def expert(number: int, x: torch.Tensor) -> torch.Tensor:
    return x[:, None].mul(MATRICES[number]).sum(-1)  # each row is summed by itself


def test_the_best_are_weighted_by_their_share() -> None:
    topk_weights, topk_ids = route(torch.tensor([[1.0, 3.0, 2.0]]), RoutingConfig(2))
    assert topk_ids.tolist() == [[1, 2]]
    torch.testing.assert_close(topk_weights, torch.tensor([[3.0, 2.0]]).softmax(-1))
    plain, _ = route(torch.tensor([[1.0, 3.0, 2.0]]), RoutingConfig(2, renormalize=False, routed_scaling_factor=2.0))
    torch.testing.assert_close(plain, 2 * torch.tensor([[1.0, 3.0, 2.0]]).softmax(-1)[:, [1, 2]])


def test_a_correction_takes_part_in_the_choice_alone() -> None:
    rule = RoutingConfig(1, scoring="sigmoid", renormalize=False)
    topk_weights, topk_ids = route(torch.tensor([[1.0, 2.0]]), rule, torch.tensor([0.5, 0.0]))
    assert topk_ids.tolist() == [[0]]
    torch.testing.assert_close(topk_weights, torch.tensor([[1.0]]).sigmoid())


def test_sparsemixer_weighs_each_choice_among_logits_near_it() -> None:
    """2.9 is near 3, 1 is not; after 3, the best is 2.9, with nothing near it."""
    topk_weights, topk_ids = route(torch.tensor([[1.0, 3.0, 2.9]]), RoutingConfig(2, scoring="sparsemixer", jitter=0.1))
    assert topk_ids.tolist() == [[1, 2]]
    torch.testing.assert_close(topk_weights, torch.stack((torch.tensor([3.0, 2.9]).softmax(-1)[0], torch.tensor(1.0)))[None])


@pytest.mark.parametrize(("score", "group"), [("max", 0), ("top2", 1)])
def test_groups_count_by_their_best(score: str, group: int) -> None:
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    _, topk_ids = route(logits, RoutingConfig(2, scoring="sigmoid", num_expert_group=2, topk_group=1, group_score=score))
    assert sorted(topk_ids[0].tolist()) == [2 * group, 2 * group + 1]


def test_every_group_gives_the_same_number() -> None:
    """The best two experts are in the first group, which gives only one of them."""
    logits = torch.tensor([[3.0, 2.0, -1.0, 0.0]])
    topk_weights, topk_ids = route(logits, RoutingConfig(2, num_expert_group=2, group_score="each"))
    assert topk_ids.tolist() == [[0, 3]]
    torch.testing.assert_close(topk_weights, torch.tensor([[3.0, 0.0]]).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_is_the_sum_of_its_rows(dtype: torch.dtype) -> None:
    topk_weights, topk_ids = route(LOGITS, RoutingConfig(3))
    x = X.to(dtype)

    def one(number: int, rows: torch.Tensor) -> torch.Tensor:
        return expert(number, rows.float()).to(dtype)

    torch.testing.assert_close(
        loop_experts(x, topk_weights, topk_ids, 12, one), loop_experts_reference(x, topk_weights, topk_ids, one)
    )


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sparsemixer"])
def test_the_batch_changes_no_bit(scoring: str) -> None:
    rule = RoutingConfig(4, scoring, num_expert_group=3, topk_group=2)
    topk_weights, topk_ids = route(LOGITS, rule)
    together = loop_experts(X, topk_weights, topk_ids, 12, expert)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 14)):
        own, same = route(LOGITS[rows], rule)
        assert torch.equal(own, topk_weights[rows])
        assert torch.equal(same, topk_ids[rows])
        assert torch.equal(loop_experts(X[rows], own, same, 12, expert), together[rows])
