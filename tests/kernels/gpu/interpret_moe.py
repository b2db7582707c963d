"""Mixtures on the device against their row-by-row references."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sensorium.kernels.dispatch import using
from sensorium.kernels.fp8 import round_rows
from sensorium.kernels.gpu import moe
from sensorium.kernels.int8 import quantize_rows
from sensorium.kernels.moe import Experts, Routing, Stacked, expert_reference, mix_reference, route_reference
from sensorium.models.layers.linear import Linear
from sensorium.models.layers.moe import Mixture, MixtureByKind
from sensorium.models.text.spec import MoeSpec
from sensorium.models.weights import fill, named_layers
from torch import Tensor, nn

RULES = {
    "plain": (Routing(1, normalise=False), 5),
    "normalised": (Routing(3, scale=2.5), 12),
    "sigmoid": (Routing(2, "sigmoid"), 8),
    "groups of two": (Routing(4, "sigmoid", groups=3, top_groups=2), 12),
    "groups of one": (Routing(3, groups=4, top_groups=2, group_score="max"), 20),
}
SHAPES = {  # rows, experts, top_k, dim, inner, with biases
    "one row": (1, 8, 2, 32, 16, False),
    "more experts than pairs": (3, 19, 2, 24, 40, True),
    "odd": (9, 3, 2, 72, 20, False),
    "full tiles": (40, 2, 2, 64, 48, False),
}


def made(experts: int, dim: int, inner: int, biased: bool, dtype: torch.dtype, act: str = "silu") -> Experts:
    gate_up, down = torch.randn(experts, 2 * inner, dim) / dim**0.5, torch.randn(experts, dim, inner) / inner**0.5
    layers = (Stacked(w.to(dtype), torch.randn(w.shape[:2]).to(dtype) if biased else None) for w in (gate_up, down))
    return Experts(act, *layers)


def in_8_bits(layer: Stacked, kind: str) -> Stacked:
    weight, scale = {"int8": quantize_rows, "fp8": round_rows}[kind](layer.weight.flatten(0, 1))
    return Stacked(weight.view(layer.weight.shape), layer.bias, scale.view(layer.weight.shape[:2]))


def reference(x: Tensor, weights: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
    return mix_reference(x, weights, chosen, partial(expert_reference, experts))


@pytest.mark.parametrize("rows", [1, 23])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_routing(name: str, corrected: bool, rows: int) -> None:
    rule, experts = RULES[name]
    logits, correction = torch.randn(rows, experts) * 2, torch.randn(experts) if corrected else None
    weights, chosen = moe.route(logits, rule, correction)
    wanted, best = route_reference(logits, rule, correction)
    assert torch.equal(chosen, best.int())
    torch.testing.assert_close(weights, wanted)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_numbers_of_experts_are_numbers_of_experts_whatever_the_logits() -> None:
    _, chosen = moe.route(torch.full((2, 5), torch.nan), Routing(2), None)
    assert ((chosen >= 0) & (chosen < 5)).all()


@pytest.mark.parametrize(("pairs", "experts", "tile"), [(1, 4, 16), (300, 3, 16), (300, 40, 32), (129, 200, 16)])
def test_pairs_lie_in_tiles_of_one_expert_in_order(pairs: int, experts: int, tile: int) -> None:
    chosen = torch.randint(-1, experts, (pairs, 1), dtype=torch.int32)
    slots, owners = moe._order(chosen, experts, tile)
    found = []
    for own, owner in zip(slots.view(-1, tile).tolist(), owners.tolist(), strict=True):
        held = [pair for pair in own if pair >= 0]
        assert own == held + [-1] * (tile - len(held))
        assert bool(held) == (owner >= 0)
        assert all(chosen[pair] == owner for pair in held)
        found += held
    wanted = [pair for number in range(experts) for pair in (chosen == number).flatten().nonzero().flatten().tolist()]
    assert found == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SHAPES)
def test_experts(name: str, dtype: torch.dtype) -> None:
    rows, number, top_k, dim, inner, biased = SHAPES[name]
    experts = made(number, dim, inner, biased, dtype)
    x = torch.randn(rows, dim).to(dtype)
    weights, chosen = route_reference(torch.randn(rows, number), Routing(top_k))
    out = moe.mix_experts(x, weights, chosen.int(), experts)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.0, "atol": 2 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out, reference(x, weights, chosen, experts), **near)


@pytest.mark.parametrize("act", ["gelu", "quick_gelu", "gelu_pytorch_tanh"])
def test_activations(act: str) -> None:
    experts = made(2, 16, 24, False, torch.float32, act)
    x = torch.randn(3, 16) * 3
    weights, chosen = route_reference(torch.randn(3, 2), Routing(2))
    out = moe.mix_experts(x, weights, chosen.int(), experts)
    torch.testing.assert_close(out, reference(x, weights, chosen, experts))


def test_rows_of_nobody_stay_as_they_are() -> None:
    experts, x = made(4, 16, 24, False, torch.float32), torch.randn(6, 16)
    weights, chosen = route_reference(torch.randn(6, 4), Routing(2))
    mine = torch.tensor([True, False, True, True, False, False])
    out = torch.full_like(x, 7.0)
    moe.mix_experts(x, weights, chosen.int().masked_fill(~mine[:, None], -1), experts, out)
    torch.testing.assert_close(out[mine], reference(x, weights, chosen, experts)[mine])
    assert (out[~mine] == 7.0).all()


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_8_bits(dtype: torch.dtype, kind: str) -> None:
    plain = made(5, 72, 40, True, dtype)
    experts = Experts(plain.act, in_8_bits(plain.gate_up, kind), in_8_bits(plain.down, kind))
    x = torch.randn(7, 72).to(dtype)
    weights, chosen = route_reference(torch.randn(7, 5), Routing(2))
    out = moe.mix_experts(x, weights, chosen.int(), experts)
    torch.testing.assert_close(out, reference(x, weights, chosen, experts), rtol=1e-2, atol=1e-2)


class Root(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


def filled(kind: type[nn.Module], spec: MoeSpec, wanted: str, quantization: str | None) -> nn.Module:
    with using(wanted):
        root = Root(kind(32, spec, torch.float32, torch.device("cpu")))
        if quantization is not None:
            for module in root.modules():
                if isinstance(module, Linear) and not module.exact:
                    module.quantization = quantization
        gen = torch.Generator().manual_seed(1)
        shapes = {name: views[name].shape for name, (_, views) in named_layers(root).items()}
        fill(root, [(name, torch.randn(shape, generator=gen) / 4) for name, shape in shapes.items()], (), {})
    return root.mlp


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")  # rows of nobody hold poison, which is quantised too
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
@pytest.mark.parametrize("kinds", [("all",), ("text", "vision")])
def test_a_mixture_as_a_layer(kinds: tuple[str, ...], quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filled from the same tensors, quantised or not; a choice is read nowhere."""
    made = Mixture if len(kinds) == 1 else MixtureByKind
    spec = MoeSpec(6, 2, (24, 16)[: len(kinds)], shared_inner=40, correction=True, scoring="sigmoid", kinds=kinds)
    numbers = torch.tensor([0, 1, 1, 0, 1, 0, 0]) if len(kinds) > 1 else None
    x = torch.randn(7, 32)
    apart = filled(made, spec, "moe=torch,int8_linear=torch", quantization)(x, numbers)
    layer = filled(made, spec, "moe=triton,int8_linear=torch", quantization)
    monkeypatch.setattr(Tensor, "tolist", None)
    with using("moe=triton"):
        torch.testing.assert_close(layer(x, numbers), apart, rtol=1e-4, atol=1e-4)
