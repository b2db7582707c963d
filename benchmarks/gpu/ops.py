"""Measure speed and exactness of memory-bound ops: norms, rotary embeddings, activations, scatter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from sensorium.kernels.activation import act_and_mul, activation
from sensorium.kernels.backends import has_triton
from sensorium.kernels.dispatch import active_backends
from sensorium.kernels.norm import layer_norm, rms_norm
from sensorium.kernels.qkv_prepare import prepare_qkv
from sensorium.kernels.rope import rotary_cos_sin, rotate_
from sensorium.kernels.scatter import scatter_rows_
from torch import Tensor

from . import exact
from .attention import case, timed
from .machine import Bench
from .parts import Made
from .record import Figure, Lacks

_EPS = 1e-6


def ceilings(bench: Bench) -> Iterator[Made]:
    """Measure the card's peak rates, to which all other parts relate."""
    yield Figure("large copy, bytes read and written", bench.copy / 1e9, "GB/s")
    yield Figure(f"large product, {str(bench.dtype).removeprefix('torch.')}", bench.matmul / 1e12, "TFLOP/s")
    chosen = active_backends(bench.device, bench.dtype)
    others = ", ".join(f"{op}={name}" for op, name in chosen.items() if name != "triton")
    count = sum(name == "triton" for name in chosen.values())
    yield Figure("ops that run as Triton kernels", count, f"of {len(chosen)}", note=others)
    if bench.cuda and not has_triton():
        raise Lacks("Triton: pip install triton; without it all ops are torch's")


def norms(bench: Bench) -> Iterator[Made]:
    for rows, dim in bench.pick(((16384, 3584), (16384, 4096), (32768, 1280)), ((4, 32),)):
        x, weight = bench.randn(rows, dim), bench.randn(dim)
        kinds: dict[str, tuple[int, Callable[[], object]]] = {
            "RMSNorm": (2, partial(rms_norm, x, weight, _EPS)),
            "RMSNorm and sum": (4, partial(rms_norm, torch.zeros_like(x), weight, _EPS, x)),
            "LayerNorm": (2, partial(layer_norm, x, weight, weight, _EPS)),
        }
        for name, (passes, run) in kinds.items():
            yield partial(timed, bench, f"{name}, {rows} x {dim}", passes * x.nbytes, run, 0.80)


def rotary(bench: Bench) -> Iterator[Made]:
    """Measure rotary embeddings in place, alone and fused with head norms and the KV-cache write of a decoder layer."""
    rows = bench.pick(16384, 6)
    for heads, kv_heads, dim in bench.pick(((32, 8, 128), (28, 4, 128)), ((4, 2, 16),)):
        x, turn = bench.randn(rows, heads + kv_heads, dim), _turns(bench, rows, dim)
        moved = 2 * x.nbytes + 2 * turn[0].nbytes
        name = f"rotation, {rows} x {heads + kv_heads} heads of {dim}"
        yield partial(timed, bench, name, moved, partial(rotate_, x, *turn), 0.80)
        one = case(bench, [(0, rows)], heads, kv_heads, dim, bench.dtype)
        qkv, weight = bench.randn(rows, heads + 2 * kv_heads, dim), bench.randn(dim)
        moved = 2 * qkv.nbytes + 2 * turn[0].nbytes
        run = partial(prepare_qkv, qkv, one.cache, one.meta, turn, False, (weight, weight, _EPS, 0.0))
        yield partial(timed, bench, f"head norms, rotation, cache, {heads}/{kv_heads} heads of {dim}", moved, run, 0.80)


def activations(bench: Bench) -> Iterator[Made]:
    for rows, inner in bench.pick(((8192, 18944), (8192, 12288), (16384, 3420)), ((4, 30),)):
        x = bench.randn(rows, 2 * inner)
        yield partial(timed, bench, f"gated silu, {rows} x {inner}", 1.5 * x.nbytes, partial(act_and_mul, "silu", x), 0.80)
    rows, inner = bench.pick((32768, 4304), (4, 30))
    x = bench.randn(rows, inner)
    run = partial(activation, "gelu_pytorch_tanh", x)
    yield partial(timed, bench, f"gelu by tanh, {rows} x {inner}", 2 * x.nbytes, run, 0.80)


def scatter(bench: Bench) -> Iterator[Made]:
    """Measure scattering encoder rows into a batch, replacing rows and adding to them."""
    rows, dim = bench.pick((16384, 4096), (8, 16))
    x, made = bench.randn(2 * rows, dim), bench.randn(rows, dim)
    index = torch.randperm(2 * rows, device=bench.device)[:rows]
    for name, passes, add in (("in place", 2, False), ("on top", 3, True)):
        wanted = x.double()
        wanted[index] = wanted[index] + made.double() if add else made.double()
        yield partial(_near, f"rows {name}", partial(scatter_rows_, x.clone(), index, made, add), wanted)
        run = partial(scatter_rows_, x.clone(), index, made, add)
        yield partial(timed, bench, f"{rows} rows of {dim} {name}", passes * made.nbytes, run)


def exactness(bench: Bench) -> Iterator[Made]:
    """Compare norms, head norms and activations with float64 on the device."""
    rows = bench.pick(1000, 5)
    for dtype in bench.dtypes:
        for dim in bench.pick((3584, 1280, 72), (32,)):
            yield partial(_normed, bench, rows, dim, dtype)
        for dim in bench.pick((128, 80, 72), (16,)):
            yield partial(_turned, bench, rows, dim, dtype)
        yield partial(_placed, bench, dtype)
        for name, curve in exact.ACTIVATIONS.items():
            x = bench.randn(rows, bench.pick(2 * 3420, 30), dtype=dtype) * 3
            yield partial(_near, name, partial(activation, name, x), curve(x.double()))
            yield partial(_near, f"gated {name}", partial(act_and_mul, name, x), exact.gated(name, x))


def _near(name: str, run: Callable[[], Tensor], wanted: Tensor) -> Figure:
    return exact.checked(name, run(), wanted)


def _normed(bench: Bench, rows: int, dim: int, dtype: torch.dtype) -> Iterator[Figure]:
    x, add, weight = (bench.randn(*shape, dtype=dtype) for shape in ((rows, dim), (rows, dim), (dim,)))
    summed = x.clone()
    found = rms_norm(summed, weight, _EPS, add)
    yield exact.checked(f"RMSNorm and sum, {dim}", found, exact.rms_norm(summed, weight, _EPS))
    yield exact.checked(f"its sum, {dim}", summed, x.double() + add.double())
    found = layer_norm(x, weight, weight, _EPS)
    yield exact.checked(f"LayerNorm, {dim}", found, exact.layer_norm(x, weight, weight, _EPS))


def _turned(bench: Bench, rows: int, dim: int, dtype: torch.dtype) -> Figure:
    x, turn = bench.randn(rows, 5, dim, dtype=dtype), _turns(bench, rows, dim)
    found = x.clone()
    rotate_(found, *turn)
    return exact.checked(f"rotation, heads of {dim}", found, exact.rotate(x, *turn))


def _placed(bench: Bench, dtype: torch.dtype) -> Iterator[Figure]:
    """Compare queries and cached keys and values of the fused norm, rotary and cache-write kernel."""
    heads, kv_heads, dim = bench.pick((32, 8, 128), (4, 2, 16))
    one = case(bench, bench.pick([(100, 70), (0, 300), (511, 1)], [(9, 4), (0, 3)]), heads, kv_heads, dim, dtype)
    rows, weight = one.meta.num_rows, bench.randn(dim, dtype=dtype)
    qkv, turn = bench.randn(rows, heads + 2 * kv_heads, dim, dtype=dtype), _turns(bench, rows, dim)
    wanted = exact.rotate(exact.rms_norm(qkv[:, :-kv_heads], weight, _EPS), *turn)
    values = qkv[:, -kv_heads:].clone()
    q, k, v = prepare_qkv(qkv, one.cache, one.meta, turn, False, (weight, weight, _EPS, 0.0))
    if k is None:
        k, v = one.cache.flatten(1, 2)[:, one.meta.slot_mapping].unbind()
    yield exact.checked("placed queries", q, wanted[:, :heads])
    yield exact.checked("placed keys", k, wanted[:, heads:])
    yield exact.checked("placed values", v if v is not None else k, values.double())


def _turns(bench: Bench, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    positions = torch.randint(30_000, (3, rows), device=bench.device)
    axis = torch.arange(dim // 2, device=bench.device) % 3
    return rotary_cos_sin(positions, 10_000.0 ** -torch.linspace(0, 1, dim // 2, device=bench.device), axis)
