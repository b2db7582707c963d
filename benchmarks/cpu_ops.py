"""Every op on this CPU beside torch's, for `python -m benchmarks.cpu --part ops`: the fastest of many calls, in turns.

Both sides have the same inputs. torch's side of a product is `torch.nn.functional.linear` with the weight as torch keeps it, of
other ops the torch backend (`kernels/backends.py`). An op that runs in torch already has no row.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from sensorium.kernels.activation import act_and_mul, activation
from sensorium.kernels.attention import paged_attention
from sensorium.kernels.dispatch import backend, use_backends
from sensorium.kernels.linear import linear, pack
from sensorium.kernels.linear.int4 import Int4Options
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.kernels.norm import rms_norm
from sensorium.kernels.rope import rotate_
from sensorium.kernels.sampling import sample
from sensorium.kernels.state import causal_conv, linear_recurrence
from sensorium.kernels.varlen import varlen_attention
from torch.nn import functional as F

Call = Callable[[], object]
_CPU = torch.device("cpu")
_ROWS = (1, 16, 256)
_SIDE, _DIM, _HEADS, _PAGE, _KEYS = 1024, 64, 8, 16, 512
_NOISE = 1.03  # ours is called slower if it takes so many times torch's time
_SECONDS = 0.3  # of each pair


@dataclass(frozen=True)
class Pair:
    """An op in one shape. `chosen`: the backend that it runs with."""

    name: str
    chosen: str
    ours: Call
    torch: Call


def compare(pairs: Iterator[Pair], seconds: float = _SECONDS) -> list[str]:
    """Return a table of the pairs' fastest calls in microseconds, and a line that names the ops which torch computes faster."""
    lines, slower = ["| op | backend | microseconds | torch | times as fast |", "|---|---|---|---|---|"], list[str]()
    for pair in pairs:
        ours, theirs = fastest((pair.ours, pair.torch), seconds)
        lines.append(f"| {pair.name} | {pair.chosen} | {ours * 1e6:.0f} | {theirs * 1e6:.0f} | {theirs / ours:.2f} |")
        slower += [pair.name] if ours > _NOISE * theirs else []
    return [*lines, "", f"Slower than torch: {'; '.join(slower) or 'none'}."]


def fastest(calls: Sequence[Call], seconds: float) -> list[float]:
    """Return the CPU seconds of the fastest call of each on this thread, made in turns; other programs disturb them little."""
    best = [float("inf")] * len(calls)
    for call in calls:
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for i, call in enumerate(calls):
            start = time.thread_time()
            call()
            best[i] = min(best[i], time.thread_time() - start)
    return best


def all_pairs() -> Iterator[Pair]:
    yield from products()
    for dtype in (torch.float32, torch.bfloat16):
        yield from attention(dtype)
        yield from others(dtype)


def products() -> Iterator[Pair]:
    """Products of each type of weight. torch's int8 quantises rows as ours does; it has no product with 4-bit weights."""
    for dtype, method in ((torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, "int8")):
        dense = torch.randn(_SIDE, _SIDE).to(dtype)
        weight = pack(dense, None, method)
        op, kind = ("linear", str(dtype).removeprefix("torch.")) if method is None else ("int8_linear", method)
        for rows in _ROWS:
            x = torch.randn(rows, _SIDE).to(dtype)
            plain: Call = partial(F.linear, x, dense)
            if method is not None:
                with use_backends("int8_linear=torch"):
                    codes = pack(dense, None, method)
                plain = partial(_with_torch, op, partial(linear, x, codes))
            yield Pair(f"{kind} product, {rows} rows", backend(op, _CPU, dtype), partial(linear, x, weight), plain)
    dense = torch.randn(_SIDE, _SIDE).bfloat16()
    for rows in _ROWS:
        x, options = torch.randn(rows, _SIDE).bfloat16(), Int4Options(int8_rows=True)
        run = partial(linear, x, pack(dense, None, options))
        yield Pair(f"int4 product, {rows} rows", backend("int4_linear", _CPU, x.dtype), run, partial(F.linear, x, dense))


def attention(dtype: torch.dtype) -> Iterator[Pair]:
    for name, rows, count in (("prompt", _KEYS, 1), ("decoding", 1, 4)):
        blocks = _KEYS // _PAGE
        tables = torch.arange(count * blocks, dtype=torch.int32).view(count, blocks)
        last = torch.arange(_KEYS - rows, _KEYS)
        slots = (torch.arange(count)[:, None] * _KEYS + last).flatten()
        starts = tuple(range(0, count * rows + 1, rows))
        meta = AttentionMetadata(starts, (_KEYS,) * count, tables, slots, _PAGE)
        q, k, v = (torch.randn(count * rows, heads, _DIM).to(dtype) for heads in (_HEADS, 2, 2))
        cache = torch.randn(2, count * blocks, _PAGE, 2, _DIM).to(dtype)
        run = partial(paged_attention, q, k, v, cache, meta, _DIM**-0.5)
        yield from _pair("attention", f"{name}, {count} x {rows} rows", dtype, run)
    q, k, v = (torch.randn(4 * 196, _HEADS, _DIM).to(dtype) for _ in range(3))
    run = partial(varlen_attention, q, k, v, [196] * 4, _DIM**-0.5)
    yield from _pair("varlen_attention", "4 segments of 196", dtype, run)


def others(dtype: torch.dtype) -> Iterator[Pair]:
    """Norms, rotary embeddings, activations, layers with states, and sampling."""
    for rows in (1, 256):
        x, wide = torch.randn(rows, _SIDE).to(dtype), torch.randn(rows, 2 * _SIDE).to(dtype)
        heads, angles = x.view(rows, -1, _DIM).clone(), torch.rand(rows, _DIM // 2)
        shape = f"{rows} rows"
        yield from _pair("rms_norm", shape, dtype, partial(rms_norm, x, x[0], 1e-6))
        yield from _pair("rotary", shape, dtype, partial(rotate_, heads, angles.cos(), angles.sin()))
        yield from _pair("activation", f"gelu, {shape}", dtype, partial(activation, "gelu", wide))
        yield from _pair("activation", f"tanh gelu, {shape}", dtype, partial(activation, "gelu_pytorch_tanh", wide))
        yield from _pair("act_and_mul", shape, dtype, partial(act_and_mul, "silu", wide))
        meta = AttentionMetadata((0, rows), (rows,), torch.tensor([[0, 1]], dtype=torch.int32), torch.zeros(0).long(), _PAGE)
        states = torch.zeros(2, 3 * _SIDE)
        run: Call = partial(causal_conv, x, torch.randn(4, _SIDE), torch.randn(_SIDE), states, meta)
        yield from _pair("causal_conv", shape, dtype, run)
        if dtype == torch.float32:
            q, decay = torch.randn(rows, _HEADS, _DIM) * 0.1, torch.rand(rows, _HEADS)
            run = partial(linear_recurrence, q, q, q, decay, decay, torch.zeros(2, _HEADS * _DIM**2), meta)
            yield from _pair("linear_recurrence", shape, dtype, run)
            logits, params = torch.randn(min(rows, 16), 32768), torch.tensor([[0.8, 50, 0.9, -torch.inf, 0.5]])
            params = params.double().repeat(len(logits), 1)
            yield from _pair("sample", f"{len(logits)} rows", dtype, lambda a=logits, b=params: sample(a.clone(), b))


def _pair(op: str, shape: str, dtype: torch.dtype, run: Call) -> Iterator[Pair]:
    chosen = backend(op, _CPU, dtype)
    if chosen != "torch":
        yield Pair(f"{op}, {str(dtype).removeprefix('torch.')}, {shape}", chosen, run, partial(_with_torch, op, run))


def _with_torch(op: str, run: Callable[[], object]) -> object:
    with use_backends(f"{op}=torch"):
        return run()


def tables() -> list[str]:
    """Return the table of all ops with torch's current number of threads."""
    print("ops take about half a minute", file=sys.stderr)
    return compare(all_pairs())
