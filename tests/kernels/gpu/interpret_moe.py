"""Mixture-of-experts kernels against their row-by-row references."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sensorium.kernels.activation.reference import IN_TORCH
from sensorium.kernels.dispatch import use_backends
from sensorium.kernels.linear.fp8 import quantize_rows_fp8
from sensorium.kernels.linear.int8 import quantize_rows
from sensorium.kernels.moe import triton as moe
from sensorium.kernels.moe.experts import RoutingConfig, StackedExperts, StackedWeight
from sensorium.kernels.moe.reference import loop_experts as loop_experts_reference
from sensorium.kernels.moe.reference import route as route_reference
from sensorium.kernels.moe.reference import run_expert as expert_reference
from sensorium.models.layers.linear import Linear
from sensorium.models.layers.moe import Mixture, ModalityMixture
from sensorium.models.text.spec import MoeSpec
from sensorium.models.weights import fill, named_layers
from torch import Tensor, nn

RULES = {
    "plain": (RoutingConfig(1, renormalize=False), 5),
    "normalised": (RoutingConfig(3, routed_scaling_factor=2.5), 12),
    "sigmoid": (RoutingConfig(2, "sigmoid"), 8),
    "groups of two": (RoutingConfig(4, "sigmoid", num_expert_group=3, topk_group=2), 12),
    "groups of one": (RoutingConfig(3, num_expert_group=4, topk_group=2, group_score="max"), 20),
}
SHAPES = {  # rows, experts, top_k, dim, inner, with biases
    "one row": (1, 8, 2, 32, 16, False),
    "more experts than pairs": (3, 19, 2, 24, 40, True),
    "odd": (9, 3, 2, 72, 20, False),
    "full tiles": (40, 2, 2, 64, 48, False),
}


def made(experts: int, dim: int, inner: int, biased: bool, dtype: torch.dtype, act: str = "silu") -> StackedExperts:
    wide = inner if act in IN_TORCH else 2 * inner
    gate_up, down = torch.randn(experts, wide, dim) / dim**0.5, torch.randn(experts, dim, inner) / inner**0.5
    layers = (StackedWeight(w.to(dtype), torch.randn(w.shape[:2]).to(dtype) if biased else None) for w in (gate_up, down))
    return StackedExperts(act, *layers)


def in_8_bits(layer: StackedWeight, kind: str) -> StackedWeight:
    weight, scale = {"int8": quantize_rows, "fp8": quantize_rows_fp8}[kind](layer.weight.flatten(0, 1))
    return StackedWeight(weight.view(layer.weight.shape), layer.bias, scale.view(layer.weight.shape[:2]))


def reference(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, experts: StackedExperts) -> Tensor:
    return loop_experts_reference(x, topk_weights, topk_ids, partial(expert_reference, experts))


@pytest.mark.parametrize("rows", [1, 23])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_routing(name: str, corrected: bool, rows: int) -> None:
    rule, experts = RULES[name]
    logits, correction_bias = torch.randn(rows, experts) * 2, torch.randn(experts) if corrected else None
    topk_weights, topk_ids = moe.route(logits, rule, correction_bias)
    wanted, best = route_reference(logits, rule, correction_bias)
    assert torch.equal(topk_ids, best.int())
    torch.testing.assert_close(topk_weights, wanted)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_numbers_of_experts_are_numbers_of_experts_whatever_the_logits() -> None:
    _, topk_ids = moe.route(torch.full((2, 5), torch.nan), RoutingConfig(2), None)
    assert ((topk_ids >= 0) & (topk_ids < 5)).all()


@pytest.mark.parametrize(("pairs", "experts", "tile"), [(1, 4, 16), (300, 3, 16), (300, 40, 32), (129, 200, 16)])
def test_pairs_lie_in_tiles_of_one_expert_in_order(pairs: int, experts: int, tile: int) -> None:
    topk_ids = torch.randint(-1, experts, (pairs, 1), dtype=torch.int32)
    slots, owners = moe._sort_pairs(topk_ids, experts, tile)
    found = []
    for own, owner in zip(slots.view(-1, tile).tolist(), owners.tolist(), strict=True):
        held = [pair for pair in own if pair >= 0]
        assert own == held + [-1] * (tile - len(held))
        assert bool(held) == (owner >= 0)
        assert all(topk_ids[pair] == owner for pair in held)
        found += held
    wanted = [pair for number in range(experts) for pair in (topk_ids == number).flatten().nonzero().flatten().tolist()]
    assert found == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_experts(name: str, dtype: torch.dtype) -> None:
    rows, number, top_k, dim, inner, biased = SHAPES[name]
    experts = made(number, dim, inner, biased, dtype)
    x = torch.randn(rows, dim).to(dtype)
    topk_weights, topk_ids = route_reference(torch.randn(rows, number), RoutingConfig(top_k))
    out = moe.fused_experts(x, topk_weights, topk_ids.int(), experts)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.0, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out, reference(x, topk_weights, topk_ids, experts), **near)


@pytest.mark.parametrize("act", ["gelu", "quick_gelu", "gelu_pytorch_tanh", "swigluoai", "relu2"])
def test_activations(act: str) -> None:
    experts = made(2, 16, 24, False, torch.float32, act)
    x = torch.randn(3, 16) * 3
    topk_weights, topk_ids = route_reference(torch.randn(3, 2), RoutingConfig(2))
    out = moe.fused_experts(x, topk_weights, topk_ids.int(), experts)
    torch.testing.assert_close(out, reference(x, topk_weights, topk_ids, experts))


def test_rows_of_nobody_stay_as_they_are() -> None:
    experts, x = made(4, 16, 24, False, torch.float32), torch.randn(6, 16)
    topk_weights, topk_ids = route_reference(torch.randn(6, 4), RoutingConfig(2))
    mine = torch.tensor([True, False, True, True, False, False])
    out = torch.full_like(x, 7.0)
    moe.fused_experts(x, topk_weights, topk_ids.int().masked_fill(~mine[:, None], -1), experts, out)
    torch.testing.assert_close(out[mine], reference(x, topk_weights, topk_ids, experts)[mine])
    assert (out[~mine] == 7.0).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_8_bits(dtype: torch.dtype, kind: str) -> None:
    plain = made(5, 72, 40, True, dtype)
    experts = StackedExperts(plain.act, in_8_bits(plain.gate_up, kind), in_8_bits(plain.down, kind))
    x = torch.randn(7, 72).to(dtype)
    topk_weights, topk_ids = route_reference(torch.randn(7, 5), RoutingConfig(2))
    out = moe.fused_experts(x, topk_weights, topk_ids.int(), experts)
    torch.testing.assert_close(out, reference(x, topk_weights, topk_ids, experts), rtol=1e-2, atol=1e-2)


class Root(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


def filled(kind: type[nn.Module], spec: MoeSpec, wanted: str, quantization: str | None) -> nn.Module:
    with use_backends(wanted):
        root = Root(kind(32, spec, torch.float32, torch.device("cpu")))
        if quantization is not None:
            for module in root.modules():
                if isinstance(module, Linear) and not module.exact:
                    module.quantization = quantization
        gen = torch.Generator().manual_seed(1)
        shapes = {name: views[name].shape for name, (_, views) in named_layers(root).items()}
        fill(root, [(name, torch.randn(shape, generator=gen) / 4) for name, shape in shapes.items()], ())
    return root.mlp


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # skipped rows hold NaN, which is quantised too
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
@pytest.mark.parametrize("kinds", [("all",), ("text", "vision")])
def test_a_mixture_as_a_layer(kinds: tuple[str, ...], quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both layers have the same weights, quantised or not; choices are never read on the host."""
    made = Mixture if len(kinds) == 1 else ModalityMixture
    spec = MoeSpec(6, 2, (24, 16)[: len(kinds)], shared_inner=40, correction=True, scoring="sigmoid", modality_experts=kinds)
    numbers = torch.tensor([0, 1, 1, 0, 1, 0, 0]) if len(kinds) > 1 else None
    x = torch.randn(7, 32)
    apart = filled(made, spec, "moe=torch,int8_linear=torch", quantization)(x, numbers)
    layer = filled(made, spec, "moe=triton,int8_linear=torch", quantization)
    monkeypatch.setattr(Tensor, "tolist", None)
    with use_backends("moe=triton"):
        torch.testing.assert_close(layer(x, numbers), apart, rtol=1e-4, atol=1e-4)
