"""Measure speed and exactness of paged attention and of attention over packed segments, at the shapes of published models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import torch
from sensorium.kernels import kv_quant
from sensorium.kernels.attention import paged_attention
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.kernels.varlen import varlen_attention
from torch import Tensor

from . import exact
from .machine import Bench
from .parts import Made
from .record import Figure

_PAGE = 16
Mask = Callable[[AttentionMetadata], AttentionMetadata]


@dataclass(frozen=True, eq=False)
class Case:
    """Queries, a KV cache with scattered pages, and the metadata of who attends to what."""

    q: Tensor
    cache: Tensor
    meta: AttentionMetadata


def case(
    bench: Bench, requests: Sequence[tuple[int, int]], heads: int, kv_heads: int, dim: int, dtype: torch.dtype, planes: int = 2
) -> Case:
    """Make a case; `requests` holds (cached tokens, tokens of this step) of each request."""
    device, lengths = bench.device, [done + rows for done, rows in requests]
    needs = [-(-length // _PAGE) for length in lengths]
    pages = torch.randperm(sum(needs), device=device).int() + 1
    tables = torch.zeros(len(requests), max(needs), dtype=torch.int32, device=device)
    for i, own in enumerate(pages.split(needs)):
        tables[i, : needs[i]] = own
    slots = []
    for i, (done, rows) in enumerate(requests):
        token = torch.arange(done, done + rows, device=device)
        slots.append(tables[i].long()[token // _PAGE] * _PAGE + token % _PAGE)
    starts = (0, *accumulate(rows for _, rows in requests))
    cache = bench.randn(planes, sum(needs) + 1, _PAGE, kv_heads, dim, dtype=dtype)
    q = bench.randn(starts[-1], heads, dim, dtype=dtype)
    return Case(q, cache, AttentionMetadata(starts, tuple(lengths), tables, torch.cat(slots), _PAGE))


def in_codes(one: Case, codes: torch.dtype) -> Case:
    """Return the same case with keys and values in 8 bits."""
    kv_heads, dim = one.cache.shape[3:]
    cache = torch.zeros(*one.cache.shape[:4], kv_quant.bytes_per_head(kv_heads, dim), dtype=codes, device=one.cache.device)
    for plane, numbers in zip(cache.flatten(1, 2), one.cache.flatten(1, 2), strict=True):
        kv_quant.write_quantized(numbers, plane, torch.arange(len(plane), device=plane.device))
    return replace(one, cache=cache)


def prompt(bench: Bench) -> Iterator[Made]:
    """Measure prefill with head size 128; only needed operations count (half for causal attention)."""
    heads = bench.pick((32, 8), (4, 2))
    for dim, length, least in bench.pick(((128, 8192, 0.60), (64, 8192, None), (256, 4096, None)), ((16, 40, 0.60),)):
        yield partial(_contiguous, bench, heads[0], dim, length, least)
    for count, length, dim, least in bench.pick(((8, 4096, 128, 0.45), (8, 4096, 64, None)), ((2, 40, 16, 0.45),)):
        name = f"paged, causal, {count} x {length} rows, {heads[0]}/{heads[1]} heads of {dim}"
        yield partial(_paged, bench, name, [(0, length)] * count, *heads, dim, least)
    done, rows = bench.pick((30000, 2048), (100, 20))
    yield partial(
        _paged, bench, f"a chunk of {rows} rows behind {done} keys", [(done, rows)], *heads, bench.pick(128, 16), None
    )


def decode(bench: Bench) -> Iterator[Made]:
    """Measure decode, one token per sequence: bytes of keys and values read, relative to the bandwidth of a copy."""
    wide = (32, 8, 128)
    full = ((64, 4096, *wide), (64, 4096, 28, 4, 128), (1, 32768, *wide), (8, 16384, 14, 2, 64), (256, 512, *wide))
    for count, length, heads, kv_heads, dim in bench.pick(full, ((3, 50, 4, 2, 16),)):
        yield partial(_rows, bench, count, length, heads, kv_heads, dim)
    for name, codes in kv_quant.CACHE_DTYPES.items():
        yield partial(_rows, bench, *bench.pick(full[0], (3, 50, 4, 2, 16)), name, codes)


def towers(bench: Bench) -> Iterator[Made]:
    """Measure head sizes of vision towers on whole images and windows of 64 patches; only useful operations count."""
    full = (
        ("Qwen2.5-VL, whole", [4096] * 4, 16, 80),
        ("Qwen3-VL and SigLIP, whole", [4096] * 4, 16, 72),
        ("CLIP, whole", [576] * 16, 16, 64),
        ("head size 128, whole", [4096] * 4, 16, 128),
    )
    for name, lengths, heads, dim in bench.pick(full, (("tiny", [20, 20, 20], 2, 20),)):
        yield partial(_tower, bench, name, lengths, heads, dim, 0.50)
    windows = bench.pick([64] * 256, [4] * 6)
    yield partial(_tower, bench, "Qwen2.5-VL, windows", windows, bench.pick(16, 2), bench.pick(80, 20), None)


def exactness(bench: Bench) -> Iterator[Made]:
    """Compare with float64 on the device, in every dtype: prompts, chunks and decode tokens together, all kinds of masks."""
    step = bench.pick([(0, 700), (1000, 1), (300, 129), (0, 1), (2047, 1), (65, 64)], [(0, 5), (37, 1), (20, 13)])
    shapes = bench.pick(((32, 8, 128), (28, 4, 128), (14, 2, 64), (10, 2, 80), (4, 1, 256)), ((4, 2, 16),))
    masks: dict[str, Mask] = {
        "window of 100": lambda meta: replace(meta, window=100),
        "everything seen": lambda meta: replace(meta, causal=False),
        "items see themselves": _atoms,
    }
    for dtype in bench.dtypes:
        for heads, kv_heads, dim in shapes if dtype == torch.bfloat16 else shapes[:1]:
            yield partial(_exact, bench, f"paged, {heads}/{kv_heads} heads of {dim}", step, (heads, kv_heads, dim), dtype)
        for name, mask in masks.items():
            yield partial(_exact, bench, f"paged, {name}", step, shapes[0], dtype, mask)
        yield partial(_exact, bench, "paged, soft cap", step, shapes[0], dtype, soft_cap=20.0)
        long = bench.pick([(16000, 1), (5, 1)], [(90, 1), (5, 1)])
        yield partial(_exact, bench, "paged, a long row in shares", long, shapes[0], dtype)
        for kind, codes in kv_quant.CACHE_DTYPES.items() if dtype != torch.float16 else ():  # weights are not 16-bit
            yield partial(_exact, bench, f"paged, {kind}", step, shapes[0], dtype, codes=codes)
        latent = bench.pick((16, 1, 576), (2, 1, 48))
        yield partial(_exact, bench, "paged, latent rows", step, latent, dtype, planes=1)
        for heads, dim in bench.pick(((16, 80), (16, 72), (16, 64), (4, 128), (2, 256)), ((2, 20),)):
            yield partial(_exact_segments, bench, heads, dim, dtype)


def bandwidth(bench: Bench, name: str, moved: float, seconds: float, least: float | None) -> Figure:
    """Measure bandwidth; `moved` is the number of bytes to read and write."""
    note = f"{moved / seconds / 1e9:,.0f} GB/s, {seconds * 1e6:,.1f} us"
    return Figure(name, moved / seconds / bench.copy, "of copy bandwidth", least, note=note)


def timed(bench: Bench, name: str, moved: float, run: Callable[[], object], least: float | None = None) -> Figure:
    """Measure the bandwidth of a run, as `bandwidth` does."""
    return bandwidth(bench, name, moved, bench.seconds(run), least)


def rate(bench: Bench, name: str, operations: float, seconds: float, least: float | None) -> Figure:
    note = f"{operations / seconds / 1e12:,.1f} TFLOP/s, {seconds * 1e3:,.3f} ms"
    return Figure(name, operations / seconds / bench.matmul, bench.ceiling, least, note=note)


def _attend(one: Case, soft_cap: float | None = None) -> Tensor:
    return paged_attention(one.q, None, None, one.cache, one.meta, one.q.shape[2] ** -0.5, soft_cap)


def _contiguous(bench: Bench, heads: int, dim: int, length: int, least: float | None) -> Figure:
    q, k, v = (bench.randn(length, heads, dim) for _ in range(3))
    seconds = bench.seconds(lambda: varlen_attention(q, k, v, [length], dim**-0.5))
    name = f"contiguous, not causal, {length} rows, {heads} heads of {dim}"
    return rate(bench, name, 4 * heads * dim * length**2, seconds, least)


def _paged(
    bench: Bench, name: str, requests: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, least: float | None
) -> Figure:
    one = case(bench, requests, heads, kv_heads, dim, bench.dtype)
    keys = sum(rows * done + rows * (rows + 1) // 2 for done, rows in requests)
    return rate(bench, name, 4 * heads * dim * keys, bench.seconds(lambda: _attend(one)), least)


def _rows(
    bench: Bench, count: int, length: int, heads: int, kv_heads: int, dim: int, kind: str = "", codes: torch.dtype | None = None
) -> Figure:
    one = case(bench, [(length - 1, 1)] * count, heads, kv_heads, dim, bench.dtype)
    one = one if codes is None else in_codes(one, codes)
    moved = 2 * count * length * one.cache[0, 0, 0].nbytes
    name = f"{count} x {length} keys, {heads}/{kv_heads} heads of {dim}{f', {kind}' if kind else ''}"
    return bandwidth(bench, name, moved, bench.seconds(lambda: _attend(one)), None if kind else 0.80)


def _tower(bench: Bench, name: str, lengths: list[int], heads: int, dim: int, least: float | None) -> Figure:
    q, k, v = bench.randn(sum(lengths), 3, heads, dim).unbind(1)
    seconds = bench.seconds(lambda: varlen_attention(q, k, v, lengths, dim**-0.5))
    label = f"{name}, {len(lengths)} x {lengths[0]} rows, {heads} heads of {dim}"
    return rate(bench, label, 4 * heads * dim * sum(n * n for n in lengths), seconds, least)


def _exact(
    bench: Bench,
    name: str,
    requests: list[tuple[int, int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    mask: Mask = lambda meta: meta,
    soft_cap: float | None = None,
    planes: int = 2,
    codes: torch.dtype | None = None,
) -> Figure:
    made = case(bench, requests, *shape, dtype, planes)
    one = replace(made if codes is None else in_codes(made, codes), meta=mask(made.meta))
    found, meta, slots = _attend(one, soft_cap), one.meta, one.cache.flatten(1, 2)
    wanted = []
    for i, length in enumerate(meta.seq_lens):
        token = torch.arange(length, device=one.q.device)
        sides = slots[:, meta.block_tables[i].long()[token // meta.block_size] * meta.block_size + token % meta.block_size]
        first, stop = meta.key_ranges(i)[..., None]
        sides = sides if codes is None else kv_quant.dequantize(sides, shape[2])
        rows = one.q[meta.query_start_loc[i] : meta.query_start_loc[i + 1]]
        visible = (token >= first) & (token < stop)
        wanted.append(exact.attend(rows, sides[0], sides[-1], visible, one.q.shape[2] ** -0.5, soft_cap))
    return exact.checked(name, found, torch.cat(wanted))


def _atoms(meta: AttentionMetadata) -> AttentionMetadata:
    """Make the second half of every request's tokens attend to each other."""
    key_range = torch.cat([meta.key_ranges(i) for i in range(len(meta.seq_lens))], 1)
    for (first, last), length in zip(pairwise(meta.query_start_loc), meta.seq_lens, strict=True):
        key_range[1, (first + last) // 2 : last] = length
    return replace(meta, key_range=key_range)


def _exact_segments(bench: Bench, heads: int, dim: int, dtype: torch.dtype) -> Figure:
    lengths = bench.pick([64] * 9 + [1, 333, 1200], [4, 4, 1, 9])
    q, k, v = bench.randn(sum(lengths), 3, heads, dim, dtype=dtype).unbind(1)
    wanted = exact.attend(q, k, v, exact.segments(lengths, bench.device), dim**-0.5)
    return exact.checked(f"segments, {heads} heads of {dim}", varlen_attention(q, k, v, lengths, dim**-0.5), wanted)
