"""Measure speed and exactness of expert products and 8-bit products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sensorium.kernels.dispatch import backend
from sensorium.kernels.linear.eight_bit import Int8Weight
from sensorium.kernels.linear.fp8 import fp8_linear, pack_fp8, quantize_rows_fp8
from sensorium.kernels.linear.int8 import int8_linear, quantize_rows
from sensorium.kernels.moe import fused_experts, route
from sensorium.kernels.moe.experts import RoutingConfig, StackedExperts, StackedWeight
from sensorium.kernels.moe.reference import route as route_reference
from torch import Tensor

from . import exact
from .attention import bandwidth, rate
from .machine import Bench
from .parts import Made
from .record import Figure, Lacks

_MANY = 512  # tokens up to which an expert of a mixture has few
_DECODE = 64  # rows up to which reading the weights dominates


def mixture(bench: Bench) -> Iterator[Made]:
    """Measure Qwen3-VL-30B-A3B's experts: 8 of 128, hidden size 2048, intermediate size 768."""
    number, dim, inner, top_k = bench.pick((128, 2048, 768, 8), (4, 32, 16, 2))
    logits = bench.randn(1000, number, dtype=torch.float32)
    rule = RoutingConfig(top_k)
    weights, chosen = route(logits, rule)
    wide, wanted = route_reference(logits.double(), rule)
    yield Figure("choices", (chosen == wanted).double().mean().item(), "of the reference's", least=0.999)
    yield exact.checked("weights of choices", weights, wide)
    if backend("moe", bench.device, bench.dtype) != "triton":
        raise Lacks("Triton on a GPU: elsewhere each expert is a layer by itself")
    gate_up = bench.randn(number, 2 * inner, dim) / dim**0.5
    down = bench.randn(number, dim, inner) / inner**0.5
    for rows in bench.pick((1, 64, 512, 8192), (1, 9, 20)):
        yield partial(_mixed, bench, rows, rule, gate_up, down)


def _mixed(bench: Bench, rows: int, rule: RoutingConfig, gate_up: Tensor, down: Tensor) -> Iterator[Figure]:
    number, inner, dim = len(gate_up), down.shape[2], down.shape[1]
    experts, x = StackedExperts("silu", StackedWeight(gate_up), StackedWeight(down)), bench.randn(rows, dim)
    weights, chosen = route(bench.randn(rows, number, dtype=torch.float32), rule)
    found = fused_experts(x, weights, chosen.int(), experts)
    yield exact.checked(f"{rows} rows", found, exact.mixture(x, weights, chosen.long(), gate_up, down))
    seconds = bench.seconds(lambda: fused_experts(x, weights, chosen.int(), experts))
    used = len(chosen.unique())
    if rows <= _MANY:
        moved = used * (gate_up[0].nbytes + down[0].nbytes)
        yield bandwidth(bench, f"{rows} rows, weights of {used} experts", moved, seconds, None)
    else:
        yield rate(bench, f"{rows} rows", 6 * rows * rule.top_k * dim * inner, seconds, None)


def int8(bench: Bench) -> Iterator[Made]:
    """Compare int8 products: integer sums are exact, so only scales and one rounding differ."""
    for rows, weight, x in _shapes(bench):
        yield partial(_int8, bench, rows, weight, x)


def _int8(bench: Bench, rows: int, weight: Tensor, x: Tensor) -> Iterator[Figure]:
    whole, scales = quantize_rows(weight)
    packed = Int8Weight(whole, scales.flatten(), None)
    level, scale = quantize_rows(x)
    wanted = level.double() @ packed.weight.double().T * scale.double() * packed.scale.double()
    yield exact.checked(_name(rows, weight), int8_linear(x, packed), wanted)
    yield _speed(bench, rows, weight, packed.weight, bench.seconds(lambda: int8_linear(x, packed)))


def fp8(bench: Bench) -> Iterator[Made]:
    """Compare fp8 products; activations are fp8 too on cards that multiply fp8 (sm_89 and later)."""
    for rows, weight, x in _shapes(bench):
        yield partial(_fp8, bench, rows, weight, x)


def _fp8(bench: Bench, rows: int, weight: Tensor, x: Tensor) -> Iterator[Figure]:
    packed, seen = pack_fp8(weight, None), x.double()
    if bench.cuda and torch.cuda.get_device_capability(bench.device) >= (8, 9):
        level, scale = quantize_rows_fp8(x)
        seen = level.double() * scale.double()
    wanted = seen @ packed.weight.double().T * packed.scale.double()
    yield exact.checked(_name(rows, weight), fp8_linear(x, packed), wanted)
    yield _speed(bench, rows, weight, packed.weight, bench.seconds(lambda: fp8_linear(x, packed)))


def _shapes(bench: Bench) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Make activations and an MLP weight `[out, in]`."""
    for outer, inner in bench.pick(((24576, 4096), (4096, 12288)), ((48, 32),)):
        weight = bench.randn(outer, inner) / inner**0.5
        for rows in bench.pick((1, 64, 4096), (18,)):
            yield rows, weight, bench.randn(rows, inner)


def _name(rows: int, weight: Tensor) -> str:
    return f"{rows} rows, {weight.shape[1]} to {weight.shape[0]}"


def _speed(bench: Bench, rows: int, weight: Tensor, packed: Tensor, seconds: float) -> Figure:
    """Return the figure: for few rows the weight's bytes over bandwidth, for many the operations over the 16-bit peak rate."""
    if rows <= _DECODE:
        return bandwidth(bench, _name(rows, weight), packed.nbytes, seconds, None)
    return rate(bench, _name(rows, weight), 2 * rows * weight.numel(), seconds, None)
