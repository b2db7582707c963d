"""The C++ kernels: equal to their references over many shapes; a row's bits do not depend on the batch."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from cpu import running_with
from sensorium.callers.errors import ConfigError
from sensorium.engine.config import EngineConfig
from sensorium.kernels import dispatch, native
from sensorium.kernels.activation import act_and_mul, activation
from sensorium.kernels.activation.reference import CLAMPED_SWIGLU, REFERENCES, clamps_up, limited_silu
from sensorium.kernels.activation.reference import act_and_mul as act_and_mul_reference
from sensorium.kernels.attention import paged_attention
from sensorium.kernels.attention.reference import attend as paged_attention_reference
from sensorium.kernels.backends import BACKENDS
from sensorium.kernels.metadata import AttentionMetadata
from sensorium.kernels.norm import norm_heads_, rms_norm
from sensorium.kernels.norm.reference import rms_norm_reference
from sensorium.kernels.rope import rotate_
from sensorium.kernels.rope.reference import rotate_reference
from sensorium.kernels.varlen import varlen_attention
from sensorium.kernels.varlen.reference import varlen_attention as varlen_attention_reference
from torch import Tensor

CPU = torch.device("cpu")
TYPES = [torch.float32, torch.bfloat16]
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
PLAIN = ",".join(f"{op}=torch" for op in ("attention", "varlen_attention", "rms_norm", "rotary", "act_and_mul", "activation"))
OPS = PLAIN.replace("torch", "native")
needs_library = pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")


@pytest.fixture(params=["base", "avx2", "avx512", "avx512_bf16", "amx", "torch"])
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the C++ kernels with each instruction set that the CPU has, then torch."""
    monkeypatch.setenv("SENSORIUM_KERNELS", PLAIN if request.param == "torch" else OPS)
    with nullcontext() if request.param == "torch" else running_with(request.param):
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def noise(gen: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=gen).to(dtype)


Keys = list[tuple[Tensor, Tensor]]  # per request: keys and values [length, kv_heads, dim]


def on_blocks(keys: Keys, counts: list[int], block: int, causal: bool, order: int, poison: float = 0.0):
    """Make a cache that holds all keys except those of the last `counts` rows, which are returned as this step's.

    Unused slots hold `poison`. Not causal: the cache is empty, all keys are this step's. `order`: seed of the block order.
    """
    lengths = [len(k) for k, _ in keys]
    needs = [-(-n // block) for n in lengths]
    free = torch.randperm(sum(needs) + 2, generator=torch.Generator().manual_seed(order)).tolist()
    tables = torch.zeros(len(keys), max(needs), dtype=torch.int32)
    cache = torch.full((2, sum(needs) + 2, block, *keys[0][0].shape[1:]), poison, dtype=keys[0][0].dtype)
    slots, new = [], ([], [])
    for i, (pair, count) in enumerate(zip(keys, counts, strict=True)):
        tables[i, : needs[i]] = torch.tensor([free.pop() for _ in range(needs[i])], dtype=torch.int32)
        token = torch.arange(lengths[i])
        where = tables[i].long()[token // block] * block + token % block
        done = lengths[i] - count if causal else 0
        for side, every, fresh in zip(cache, pair, new, strict=True):
            side.flatten(0, 1)[where[:done]] = every[:done]
            fresh.append(every[done:])
        slots.append(where[done:])
    starts = (0, *accumulate(counts))
    meta = AttentionMetadata(starts, tuple(lengths), tables, torch.cat(slots), block, causal)
    return torch.cat(new[0]), torch.cat(new[1]), cache, meta


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block"), [(4, 4, 16, 4), (12, 2, 64, 16), (6, 1, 80, 5), (8, 8, 32, 32), (14, 2, 128, 16)]
)
def test_paged_attention(
    dtype: torch.dtype, causal: bool, heads: int, kv_heads: int, dim: int, block: int, generator: torch.Generator
) -> None:
    lengths, counts = [1, 63, 64, 65, 130, 200, 257], [1, 1, 64, 1, 67, 3, 257]
    keys = [(noise(generator, dtype, n, kv_heads, dim), noise(generator, dtype, n, kv_heads, dim)) for n in lengths]
    q = noise(generator, dtype, sum(counts), heads, dim)
    k, v, cache, meta = on_blocks(keys, counts, block, causal, 1)
    out = paged_attention(q, k, v, cache, meta, dim**-0.5)
    expected = paged_attention_reference(q, cache, meta, dim**-0.5)
    torch.testing.assert_close(out, expected, atol=LIMITS[dtype], rtol=LIMITS[dtype])


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (3, 80), (2, 16), (1, 128)])
def test_varlen_attention(dtype: torch.dtype, heads: int, dim: int, generator: torch.Generator) -> None:
    lengths = [64, 64, 0, 16, 1, 190, 65]
    q, k, v = noise(generator, dtype, sum(lengths), 3 * heads, dim).split(heads, 1)
    out = varlen_attention(q, k, v, lengths, dim**-0.5)
    expected = varlen_attention_reference(q, k, v, lengths, dim**-0.5)
    torch.testing.assert_close(out, expected, atol=LIMITS[dtype], rtol=LIMITS[dtype])


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_of_paged_attention_is_the_same_in_every_batch(dtype: torch.dtype, generator: torch.Generator) -> None:
    """A prompt runs whole, in chunks, token by token; with other requests, other blocks, one thread or two."""
    heads, kv_heads, dim, length = 6, 2, 64, 150
    keys = (noise(generator, dtype, length, kv_heads, dim), noise(generator, dtype, length, kv_heads, dim))
    q = noise(generator, dtype, length, heads, dim)
    k, v, cache, meta = on_blocks([keys], [length], 16, True, 1)
    whole = paged_attention(q, k, v, cache, meta, 0.2)
    for seed, (cuts, block) in enumerate(
        [((64, 128), 16), ((1, 65, 66, 149), 8), (tuple(range(1, length)), 16), ((7, 100), 64)]
    ):
        parts = []
        for start, stop in zip((0, *cuts), (*cuts, length), strict=True):
            others = [(noise(generator, dtype, n, kv_heads, dim), noise(generator, dtype, n, kv_heads, dim)) for n in (90, 3)]
            mine = (keys[0][:stop], keys[1][:stop])
            counts = [30, stop - start, 1]
            k, v, cache, meta = on_blocks([others[0], mine, others[1]], counts, block, True, seed)
            queries = torch.cat(
                (noise(generator, dtype, 30, heads, dim), q[start:stop], noise(generator, dtype, 1, heads, dim))
            )
            before = torch.get_num_threads()
            torch.set_num_threads(1 + start % 2)
            parts.append(paged_attention(queries, k, v, cache, meta, 0.2)[30 : 30 + stop - start])
            torch.set_num_threads(before)
        assert torch.equal(torch.cat(parts), whole)


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
def test_a_segment_is_the_same_in_every_batch(dtype: torch.dtype, generator: torch.Generator) -> None:
    q, k, v = noise(generator, dtype, 600, 12, 32).split(4, 1)
    alone = varlen_attention(*(t[100:311] for t in (q, k, v)), [211], 0.2)
    assert torch.equal(varlen_attention(q, k, v, [64, 36, 211, 289], 0.2)[100:311], alone)


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("causal", [True, False])
def test_slots_that_belong_to_nobody_are_not_read(dtype: torch.dtype, causal: bool, generator: torch.Generator) -> None:
    lengths, counts = [5, 70, 129], [1, 70, 2]
    keys = [(noise(generator, dtype, n, 2, 32), noise(generator, dtype, n, 2, 32)) for n in lengths]
    q = noise(generator, dtype, sum(counts), 4, 32)
    outs = []
    for poison in (0.0, float("nan"), float("inf")):
        k, v, cache, meta = on_blocks(keys, counts, 16, causal, 3, poison)
        outs.append(paged_attention(q, k, v, cache, meta, 0.2))
    assert outs[0].isfinite().all()
    assert all(torch.equal(out, outs[0]) for out in outs)


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_a_number_stays_with_its_request(dtype: torch.dtype, generator: torch.Generator) -> None:
    keys = [(noise(generator, dtype, n, 2, 16), noise(generator, dtype, n, 2, 16)) for n in (70, 80)]
    keys[0][0][3, 0, 2] = float("nan")
    q = noise(generator, dtype, 2, 2, 16)
    k, v, cache, meta = on_blocks(keys, [1, 1], 16, True, 3)
    out = paged_attention(q, k, v, cache, meta, 0.2)
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [16, 37, 768])
def test_rms_norm_adds_the_residual_first(dtype: torch.dtype, width: int, generator: torch.Generator) -> None:
    x, add, weight = (noise(generator, dtype, *shape) for shape in ((9, width), (9, width), (width,)))
    total = x + add
    out = rms_norm(x, weight, 1e-5, add)
    assert torch.equal(x, total)
    torch.testing.assert_close(out, rms_norm_reference(total, weight, 1e-5))


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_of_heads_in_place(dtype: torch.dtype, offset: float, generator: torch.Generator) -> None:
    x, weight = noise(generator, dtype, 9, 5, 40), noise(generator, dtype, 40)
    before = x.clone()
    norm_heads_(x[:, 1:4], weight, 1e-5, offset)
    torch.testing.assert_close(x[:, 1:4], rms_norm_reference(before[:, 1:4], weight, 1e-5, offset))
    torch.testing.assert_close(rms_norm(before, weight, 1e-5, None, offset), rms_norm_reference(before, weight, 1e-5, offset))
    assert torch.equal(x[:, [0, 4]], before[:, [0, 4]])


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [8, 20, 48, 64, 80])
def test_rotation_of_a_part_in_place(dtype: torch.dtype, dim: int, interleaved: bool, generator: torch.Generator) -> None:
    """Only some heads, and only their leading numbers, are rotated."""
    x = noise(generator, dtype, 7, 5, 80)
    angles = torch.rand(7, dim // 2, generator=generator) * 9
    before, expected = x.clone(), rotate_reference(x[:, :3, :dim], angles.cos(), angles.sin(), interleaved)
    rotate_(x[:, :3, :dim], angles.cos(), angles.sin(), interleaved)
    torch.testing.assert_close(x[:, :3, :dim], expected)
    assert torch.equal(x[:, 3:], before[:, 3:])
    assert torch.equal(x[..., dim:], before[..., dim:])


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", REFERENCES)
def test_activation(dtype: torch.dtype, name: str) -> None:
    x = torch.cat((torch.linspace(-12, 12, 4099), torch.tensor([-200.0, -90.0, 0.0, 90.0, 200.0]))).to(dtype)
    limit = 1e-2 if dtype == torch.bfloat16 else 2e-5  # torch's own gelu is off by 9e-7
    torch.testing.assert_close(activation(name, x), REFERENCES[name](x), rtol=limit, atol=2e-6)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inner", [16, 37, 512])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", CLAMPED_SWIGLU])
def test_gated_activation(name: str, dtype: torch.dtype, inner: int, generator: torch.Generator) -> None:
    x = noise(generator, dtype, 6, 2 * inner) * 5
    x[0, :4] = torch.tensor([-200.0, -90.0, 90.0, 0.0])
    limits = {"rtol": 3e-2, "atol": 1e-3} if name == CLAMPED_SWIGLU and dtype == torch.bfloat16 else {}  # rounds fewer times
    torch.testing.assert_close(act_and_mul(name, x), act_and_mul_reference(name, x), **limits)


@pytest.mark.usefixtures("chosen")
@pytest.mark.parametrize("limit", [0.5, 7.0, 16.0])
@pytest.mark.parametrize("dtype", TYPES)
def test_limited_silu(dtype: torch.dtype, limit: float, generator: torch.Generator) -> None:
    x = noise(generator, dtype, 6, 74) * 10
    gate, up = x.clone().chunk(2, -1)
    wanted = activation("silu", gate.contiguous()).clamp(max=limit) * up.clamp(-limit, limit)
    row = act_and_mul(limited_silu(limit), x[2:3].clone())
    result = act_and_mul(limited_silu(limit), x)
    torch.testing.assert_close(result, wanted)
    assert torch.equal(row, result[2:3])
    assert result.abs().max() <= limit**2


def test_activations_that_clamp_the_second_factor() -> None:
    assert clamps_up(limited_silu(7.0))
    assert clamps_up(CLAMPED_SWIGLU)
    assert not clamps_up("silu")


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
def test_rows_do_not_depend_on_their_number(dtype: torch.dtype, generator: torch.Generator) -> None:
    x, weight, wide = noise(generator, dtype, 50, 96), noise(generator, dtype, 96), noise(generator, dtype, 50, 6 * 40)
    angles = torch.rand(50, 20, generator=generator)

    def turned(rows: slice) -> Tensor:
        part = wide[rows].clone().view(-1, 6, 40)
        rotate_(part, angles[rows].cos(), angles[rows].sin())
        return part

    for rows in (slice(0, 1), slice(17, 18), slice(3, 20)):
        assert torch.equal(rms_norm(x[rows], weight, 1e-6), rms_norm(x, weight, 1e-6)[rows])
        assert torch.equal(act_and_mul("silu", wide[rows]), act_and_mul("silu", wide)[rows])
        assert torch.equal(activation("gelu", wide[rows, :37].contiguous()), activation("gelu", wide)[rows, :37])
        assert torch.equal(turned(rows), turned(slice(None))[rows])


@needs_library
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "quick_gelu"])
def test_activations_of_unusual_numbers(name: str, dtype: torch.dtype) -> None:
    """NaN of either sign stays NaN; large numbers become themselves or 0; zeros and the smallest numbers become 0."""
    nan, large, small = (
        torch.tensor([torch.nan, -torch.nan] * 9),
        torch.tensor([100.0, 200.0, 1e4, 1e6]),
        torch.tensor([0.0, -0.0, 1e-40]),
    )
    x = torch.cat((nan, large, -large, small)).to(dtype)
    found, wide = activation(name, x.clone()).float(), x.float()
    assert found[:18].isnan().all()
    assert torch.equal(found[18:22], wide[18:22])
    assert found[22:].abs().max() < 1e-30


@pytest.mark.parametrize(("found", "expected"), [(None, "torch"), ("library", "native")])
def test_without_the_library_torch_runs(found: str | None, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch._choose_backend.cache_clear()
    monkeypatch.setattr(native, "library", lambda: found)
    monkeypatch.setattr(native, "instructions", lambda: "avx2" if found else "not built")
    assert dispatch.active_backends(CPU, torch.bfloat16)["attention"] == expected
    assert dispatch.backend("attention", CPU, torch.float16) == "torch"
    dispatch._choose_backend.cache_clear()


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_cpu_with_vectors_runs_the_plain_bodies() -> None:
    flags = set(Path("/proc/cpuinfo").read_text("utf-8").split())
    if {"avx2", "fma", "bmi2"} <= flags:
        assert native.instructions() != "base"
    if {"avx512bw", "avx512dq", "avx512vl"} <= flags and not native.hides_avx512():
        found = native.library()
        assert found is not None
        assert native.instructions() == (native.restriction() or native.supported(found)[-1])
        assert ("amx" in native.supported(found)) == ({"amx_tile", "amx_bf16", "amx_int8"} <= flags)
        assert native.supported(found)[-1].startswith(("avx512_bf16", "amx") if "avx512_bf16" in flags else "avx512")


@needs_library
def test_avx512_is_hidden() -> None:
    """With SENSORIUM_CPU=avx2, the C++ kernels use AVX2."""
    code = (
        "import torch\n"
        "from sensorium.kernels import dispatch, native\nfrom sensorium.kernels.linear import int8\n"
        "cpu = torch.device('cpu')\n"
        "print(native.instructions(), int8.supported(cpu), *dispatch.active_backends(cpu, torch.bfloat16).values())\n"
    )
    env = {**os.environ, "SENSORIUM_CPU": "avx2"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    instructions, int8, *backends = done.stdout.split()
    table = dict(zip(BACKENDS, backends, strict=True))
    assert (instructions, int8) in (("avx2", "True"), ("base", "False"))
    matmuls = "native" if instructions == "avx2" else "torch"
    assert {op: table[op] for op in ("attention", "act_and_mul", "linear", "int8_linear")} == {
        "attention": "native",
        "act_and_mul": "native",
        "linear": matmuls,
        "int8_linear": matmuls,
    }


def test_an_unknown_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSORIUM_CPU", "avx1024")
    with pytest.raises(ValueError, match="SENSORIUM_CPU='avx1024' is unknown; leave it unset, or set it to one of base, avx2"):
        native.restriction()
    with pytest.raises(ConfigError, match="SENSORIUM_CPU='avx1024' is unknown"):
        EngineConfig("")


def test_a_file_that_cannot_be_loaded_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_native.so").write_bytes(b"not a library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    assert native.library.__wrapped__() is None


@needs_library
def test_a_stale_library_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library of another version, or without one of the functions, is not used: a warning says so, and torch runs."""
    monkeypatch.setattr(native, "ABI", native.ABI + 1)
    with pytest.warns(RuntimeWarning, match=r"was built from other sources and is not used.*Rebuild it: pip install"):
        assert native.library.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setitem(native._SIGNATURES, "missing", ())
    with pytest.warns(RuntimeWarning, match="was built from other sources"):
        assert native.library.__wrapped__() is None


def test_the_number_of_the_functions_is_raised_with_their_arguments() -> None:
    """If this fails, raise native.ABI and sensorium_abi in kernels/cpu/instructions.cpp, and put the new pair here.

    A new function needs no new number: a library without it is not used.
    """
    names = {name: [kind.__name__ for kind in kinds] for name, kinds in native._SIGNATURES.items()}
    assert (native.ABI, hashlib.sha256(repr(sorted(names.items())).encode()).hexdigest()[:8]) == (5, "574a3345")


@needs_library
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_threads_are_those_of_torch() -> None:
    """The process has one OpenMP runtime."""
    code = (
        "import torch\n"
        "from sensorium.kernels.varlen import varlen_attention\n"
        "torch.set_num_threads(2)\n"
        "x = torch.randn(500, 4, 16)\n"
        "varlen_attention(x, x, x, [250, 250], 0.3)\n"
        "print(len({line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line or 'iomp' in line}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_a_forced_backend_that_cannot_run_is_not_taken(monkeypatch):
    monkeypatch.setenv("SENSORIUM_KERNELS", "linear=native")
    assert dispatch.backend("linear", torch.device("cpu"), torch.float64) == "torch"
