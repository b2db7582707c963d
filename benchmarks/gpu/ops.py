"""Ops that memory bounds: norms, rotation, activations, rows put in place, tokens drawn. How fast, and how exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from sensorium.kernels import sampling as tokens
from sensorium.kernels.activation import activation, gated
from sensorium.kernels.dispatch import active, has_triton
from sensorium.kernels.norm import layer_norm, rms_norm
from sensorium.kernels.placing import place
from sensorium.kernels.rope import rotary_cos_sin, rotate_
from sensorium.kernels.scatter import put_rows_
from torch import Tensor

from . import exact
from .attention import bandwidth, case
from .machine import Bench
from .record import Figure, Lacks

_EPS = 1e-6
_RULES = {  # temperature, top_k, top_p, logarithm of min_p
    "greedy": (0.0, 0, 1.0, -torch.inf),
    "temperature": (0.8, 0, 1.0, -torch.inf),
    "top_k 50, top_p 0.9": (0.8, 50, 0.9, -torch.inf),
    "top_p 0.9": (1.0, 0, 0.9, -torch.inf),
    "min_p 0.05": (1.0, 0, 1.0, -2.995732273553991),
}


def ceilings(bench: Bench) -> Iterator[Figure]:
    """What the card gives: shares of all other parts are of these."""
    yield Figure("copy of 4 GiB, read and written", bench.copy / 1e9, "GB/s")
    yield Figure(f"product of 8192 x 8192, {str(bench.dtype).removeprefix('torch.')}", bench.matmul / 1e12, "TFLOP/s")
    chosen = active(bench.device, bench.dtype)
    others = ", ".join(f"{op}={name}" for op, name in chosen.items() if name != "triton")
    count = sum(name == "triton" for name in chosen.values())
    yield Figure("ops that run as Triton kernels", count, f"of {len(chosen)}", note=others)
    if bench.cuda and not has_triton():
        raise Lacks("Triton: pip install triton; without it all ops are torch's")


def norms(bench: Bench) -> Iterator[Figure]:
    for rows, dim in bench.pick(((16384, 3584), (16384, 4096), (32768, 1280)), ((4, 32),)):
        x, weight = bench.randn(rows, dim), bench.randn(dim)
        sums = torch.zeros_like(x)
        kinds: dict[str, tuple[int, Callable[[], object]]] = {
            "RMSNorm": (2, lambda x=x, w=weight: rms_norm(x, w, _EPS)),
            "RMSNorm and sum": (4, lambda x=x, w=weight, y=sums: rms_norm(y, w, _EPS, x)),
            "LayerNorm": (2, lambda x=x, w=weight: layer_norm(x, w, w, _EPS)),
        }
        for name, (passes, run) in kinds.items():
            yield bandwidth(bench, f"{name}, {rows} x {dim}", passes * x.nbytes, bench.seconds(run), 0.80)


def rotary(bench: Bench) -> Iterator[Figure]:
    """Queries and keys in place; and with norms of heads and keys and values put into the cache, as a decoder's layer does."""
    rows = bench.pick(16384, 6)
    for heads, kv_heads, dim in bench.pick(((32, 8, 128), (28, 4, 128)), ((4, 2, 16),)):
        x, turn = bench.randn(rows, heads + kv_heads, dim), _turns(bench, rows, dim)
        moved = 2 * x.nbytes + 2 * turn[0].nbytes
        seconds = bench.seconds(lambda x=x, turn=turn: rotate_(x, *turn))
        yield bandwidth(bench, f"rotation, {rows} x {heads + kv_heads} heads of {dim}", moved, seconds, 0.80)
        one = case(bench, [(0, rows)], heads, kv_heads, dim, bench.dtype)
        qkv, weight = bench.randn(rows, heads + 2 * kv_heads, dim), bench.randn(dim)
        moved = 2 * qkv.nbytes + 2 * turn[0].nbytes
        norms = (weight, weight, _EPS, 0.0)
        seconds = bench.seconds(lambda a=qkv, one=one, turn=turn, n=norms: place(a, one.cache, one.meta, turn, False, n))
        yield bandwidth(bench, f"head norms, rotation, cache, {heads}/{kv_heads} heads of {dim}", moved, seconds, 0.80)


def activations(bench: Bench) -> Iterator[Figure]:
    for rows, inner in bench.pick(((8192, 18944), (8192, 12288), (16384, 3420)), ((4, 30),)):
        x = bench.randn(rows, 2 * inner)
        seconds = bench.seconds(lambda x=x: gated("silu", x))
        yield bandwidth(bench, f"gated silu, {rows} x {inner}", 1.5 * x.nbytes, seconds, 0.80)
    rows, inner = bench.pick((32768, 4304), (4, 30))
    x = bench.randn(rows, inner)
    seconds = bench.seconds(lambda: activation("gelu_pytorch_tanh", x))
    yield bandwidth(bench, f"gelu by tanh, {rows} x {inner}", 2 * x.nbytes, seconds, 0.80)


def scatter(bench: Bench) -> Iterator[Figure]:
    """Encoder rows in place of the rows of a batch, and on top of them."""
    rows, dim = bench.pick((16384, 4096), (8, 16))
    x, made = bench.randn(2 * rows, dim), bench.randn(rows, dim)
    index = torch.randperm(2 * rows, device=bench.device)[:rows]
    for name, passes, add in (("in place", 2, False), ("on top", 3, True)):
        before = x.clone()
        put_rows_(before, index, made, add)
        wanted = x.double()
        wanted[index] = wanted[index] + made.double() if add else made.double()
        yield exact.checked(f"rows {name}", before, wanted)
        seconds = bench.seconds(lambda add=add: put_rows_(x, index, made, add))
        yield bandwidth(bench, f"{rows} rows of {dim} {name}", passes * made.nbytes, seconds, None)


def sampling(bench: Bench) -> Iterator[Figure]:
    """Drawn tokens against the reference's, on the device; most rows must agree, all that no rounding can turn."""
    rows, vocab = bench.pick((64, 151_936), (6, 200))
    logits = bench.randn(rows, vocab, dtype=torch.float32) * 3
    number = torch.rand(rows, dtype=torch.float64, device=bench.device)
    for name, rule in _RULES.items():
        rules = torch.tensor(rule, dtype=torch.float64, device=bench.device).expand(rows, 4)
        rules = torch.cat((rules, number[:, None]), 1)
        drawn, wrong = tokens.draw(logits, rules)
        same = (drawn == tokens.draw_reference(logits, rules)[0]) & (wrong == 0)
        yield Figure(f"{name}, tokens of the reference", same.double().mean().item(), "of rows", least=0.96)
        seconds = bench.seconds(lambda rules=rules: tokens.draw(logits, rules))
        yield bandwidth(bench, f"{name}, {rows} x {vocab}", logits.nbytes, seconds, None)
    own, rank, _ = tokens.log_probs(logits, drawn)
    wide = logits.double()
    yield exact.checked("log probabilities", own[:, None], wide.log_softmax(-1).gather(1, drawn[:, None]))
    ranks = (wide > wide.gather(1, drawn[:, None])).sum(-1) + 1
    yield Figure("ranks that are right", (rank == ranks).double().mean().item(), "of rows", least=1.0)
    seconds = bench.seconds(lambda: tokens.log_probs(logits, drawn))
    yield bandwidth(bench, f"log probabilities, {rows} x {vocab}", logits.nbytes, seconds, None)
    yield _penalties(bench, logits)


def exactness(bench: Bench) -> Iterator[Figure]:
    """Rows, heads and activations against float64 on the device."""
    rows = bench.pick(1000, 5)
    for dtype in bench.dtypes:
        for dim in bench.pick((3584, 1280, 72), (32,)):
            x, add, weight = (bench.randn(*shape, dtype=dtype) for shape in ((rows, dim), (rows, dim), (dim,)))
            summed = x.clone()
            found = rms_norm(summed, weight, _EPS, add)
            yield exact.checked(f"RMSNorm and sum, {dim}", found, exact.rms_norm(summed, weight, _EPS))
            yield exact.checked(f"its sum, {dim}", summed, x.double() + add.double())
            found = layer_norm(x, weight, weight, _EPS)
            yield exact.checked(f"LayerNorm, {dim}", found, exact.layer_norm(x, weight, weight, _EPS))
        for dim in bench.pick((128, 80, 72), (16,)):
            x, turn = bench.randn(rows, 5, dim, dtype=dtype), _turns(bench, rows, dim)
            found = x.clone()
            rotate_(found, *turn)
            yield exact.checked(f"rotation, heads of {dim}", found, exact.rotate(x, *turn))
        yield from _placed(bench, dtype)
        for name, curve in exact.ACTIVATIONS.items():
            x = bench.randn(rows, bench.pick(2 * 3420, 30), dtype=dtype) * 3
            yield exact.checked(name, activation(name, x), curve(x.double()))
            yield exact.checked(f"gated {name}", gated(name, x), exact.gated(name, x))


def _placed(bench: Bench, dtype: torch.dtype) -> Iterator[Figure]:
    """Queries, and the keys and values that attention finds, of rows that are normed, turned and put into the cache."""
    heads, kv_heads, dim = bench.pick((32, 8, 128), (4, 2, 16))
    one = case(bench, bench.pick([(100, 70), (0, 300), (511, 1)], [(9, 4), (0, 3)]), heads, kv_heads, dim, dtype)
    rows, weight = one.meta.num_rows, bench.randn(dim, dtype=dtype)
    qkv, turn = bench.randn(rows, heads + 2 * kv_heads, dim, dtype=dtype), _turns(bench, rows, dim)
    wanted = exact.rotate(exact.rms_norm(qkv[:, :-kv_heads], weight, _EPS), *turn)
    values = qkv[:, -kv_heads:].clone()
    q, k, v = place(qkv, one.cache, one.meta, turn, False, (weight, weight, _EPS, 0.0))
    if k is None:
        k, v = one.cache.flatten(1, 2)[:, one.meta.slot_mapping].unbind()
    yield exact.checked("placed queries", q, wanted[:, :heads])
    yield exact.checked("placed keys", k, wanted[:, heads:])
    yield exact.checked("placed values", v if v is not None else k, values.double())


def _penalties(bench: Bench, logits: Tensor) -> Figure:
    rows, vocab = logits.shape
    each = bench.pick(500, 9)
    row = torch.arange(rows, device=bench.device).repeat_interleave(each)
    token = torch.stack([torch.randperm(vocab, device=bench.device)[:each] for _ in range(rows)]).flatten()
    counts = torch.randint(0, 3, (len(row),), device=bench.device).float()
    penalties = torch.tensor([1.3, 0.4, 0.2], device=bench.device).expand(rows, 3).contiguous()
    found, wanted = logits.clone(), logits.double()
    tokens.penalise_(found, row, token, counts, penalties)
    tokens.penalise_reference_(wanted, row, token, counts.double(), penalties.double())
    return exact.checked("penalties", found, wanted)


def _turns(bench: Bench, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    positions = torch.randint(30_000, (3, rows), device=bench.device)
    axis = torch.arange(dim // 2, device=bench.device) % 3
    return rotary_cos_sin(positions, 10_000.0 ** -torch.linspace(0, 1, dim // 2, device=bench.device), axis)
