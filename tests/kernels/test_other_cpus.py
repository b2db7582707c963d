"""Linear layers and attention for CPUs that this machine is not.

NEON runs in qemu, AVX-VNNI with the same instruction of AVX-512 VNNI, AMX with tiles and AVX-512 with instructions in scalar
code.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu import PRODUCTS
from group_weights import STORED_FORMATS, stored_weight
from sensorium.kernels import native
from sensorium.kernels.linear import groups, panels
from sensorium.kernels.linear.eight_bit import Int8Weight
from sensorium.kernels.linear.int4 import Int4Options, quantize_int4
from sensorium.kernels.linear.int8 import int8_linear_reference, quantize_rows
from sensorium.kernels.varlen import varlen_attention
from sensorium.kernels.varlen.reference import varlen_attention as varlen_attention_reference
from torch import Tensor

pytestmark = pytest.mark.full
HELPERS = Path(__file__).parents[1] / "helpers"
SOURCES = Path(native.__file__).with_name("cpu")
ROWS = (1, 2, 3, 6, 7, 13, 33)
AVX512 = ["-include", str(HELPERS / "emulated_avx512.h")]
X86 = {
    "avx_vnni": ['-DTARGET="avx2,fma,f16c,avx512f,avx512vl,avx512vnni"', "-DDPBUSD=_mm256_dpbusd_epi32"],
    "amx": ["-include", str(HELPERS / "emulated_tiles.h")],
}
"""Options that compile a body with other instructions, which compute the same."""
AVX512_BODIES = ("avx512", "avx512_vnni", "avx512_bf16")


def command(kernel: str) -> tuple[list[str], list[str]]:
    """Return the compiler with its options, and the emulator. Skips the test without them."""
    if kernel in AVX512_BODIES:
        if "avx2" not in PRODUCTS or shutil.which("g++") is None:
            pytest.skip("needs a CPU with AVX2 and g++")
        return ["g++", *AVX512], []
    if kernel in X86:
        if "avx512_vnni" not in PRODUCTS or shutil.which("g++") is None:
            pytest.skip("needs a CPU with AVX-512 VNNI and g++")
        return ["g++", *X86[kernel]], []
    found = [name for name in ("qemu-aarch64", "qemu-aarch64-static") if shutil.which(name)]
    if not found:
        pytest.skip("needs qemu-aarch64 (qemu-user)")
    emulator = [found[0], "-cpu", "max"]
    if shutil.which("aarch64-linux-gnu-g++"):
        return ["aarch64-linux-gnu-g++", "-static"], emulator
    zig = [sys.executable, "-m", "ziglang"] if importlib.util.find_spec("ziglang") else ["zig"] if shutil.which("zig") else []
    if not zig:
        pytest.skip("needs aarch64-linux-gnu-g++ or zig")
    return [*zig, "c++", "-target", "aarch64-linux-musl", "-static"], emulator


def build(kernel: str, source: str, function: str, runner: str, target: Path) -> list[str]:
    """Compile the runner with a kernel's source. Return the command that runs it."""
    compiler, emulator = command(kernel)
    scratch = ["-DSCRATCH=scratch.data()"] if kernel == "neon_i8mm" else []  # others convert rows themselves
    options = ["-std=c++17", "-O2", "-w", f"-I{SOURCES}", f"-DNAME=sensorium_{function}", *scratch]
    subprocess.run([*compiler, *options, str(HELPERS / runner), str(SOURCES / f"{source}.cpp"), "-o", str(target)], check=True)
    return [*emulator, str(target)]


def call(program: list[str], x: Tensor, numbers: list[int], tensors: list[Tensor | None], outputs: int) -> Tensor:
    """Send the numbers, the sizes of the tensors and the tensors; return the result."""
    blobs = [b"" if t is None else bytes(t.contiguous().flatten().view(torch.uint8).numpy()) for t in tensors]
    sizes = [{torch.float32: 0, torch.bfloat16: 1}[x.dtype], *numbers, *map(len, blobs)]
    done = subprocess.run(
        program, input=struct.pack(f"{len(sizes)}q", *sizes) + b"".join(blobs), capture_output=True, check=True
    )
    return torch.frombuffer(bytearray(done.stdout), dtype=x.dtype).view(len(x), outputs)


def run(program: list[str], x: Tensor, w: panels.Panels) -> Tensor:
    numbers = [panels._TYPES[w.weight.dtype], *x.shape, w.weight.shape[1], w.outputs]
    return call(program, x, numbers, [x, w.weight, w.shift, w.scale, w.bias], w.outputs)


def run_groups(program: list[str], x: Tensor, w: groups.GroupPanels, int8_rows: bool) -> Tensor:
    """Tensors among the arguments are sent after them; in their place stands their number from 1 on, or 0 for None."""
    tensors: list[Tensor | None] = [x]
    numbers: list[int] = []
    for argument in (*x.shape, *groups.kernel_arguments(w)):
        if isinstance(argument, int):
            numbers.append(argument)
        else:
            numbers.append(0 if argument is None else len(tensors))
            tensors += [] if argument is None else [argument]
    numbers += [int8_rows, len(x) * groups.row_bytes(w, x.dtype, int8_rows), len(tensors)]
    return call(program, x, numbers, tensors, w.outputs)


@pytest.mark.parametrize("kernel", ["neon", "neon_dot", "neon_bf16", "neon_i8mm", "avx_vnni", "amx", *AVX512_BODIES])
def test_linear(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(kernel, f"linear_{kernel}", f"linear_{kernel}", "run_linear.cpp", tmp_path / "run")
    monkeypatch.setattr(native, "products", lambda: kernel)
    for stored in (dtype for dtype, form in panels._LAYOUTS[kernel].items() if form.kernel == kernel):
        computed = [torch.bfloat16] if stored == torch.bfloat16 else [torch.float32]
        if stored == torch.int8 or (stored == torch.bfloat16 and kernel not in ("neon_bf16", "amx", "avx512_bf16")):
            computed = [torch.float32, torch.bfloat16]
        for dtype in computed:
            check(program, stored, dtype)


def check(program: list[str], stored: torch.dtype, dtype: torch.dtype) -> None:
    """Compare with the reference; a row's bits do not depend on the batch."""
    x, weight, bias = torch.randn(max(ROWS), 70).to(dtype), torch.randn(45, 70), torch.randn(45)
    if stored == torch.int8:
        codes, scale = quantize_rows(weight)
        packed = panels.pack_panels(codes, bias, scale.flatten())
        expected = int8_linear_reference(x, Int8Weight(codes, scale.flatten(), bias))
        assert torch.equal(run(program, x, packed), expected)
    else:
        weight = weight.to(stored)
        packed = panels.pack_panels(weight, bias)
        expected = x.double() @ weight.double().T + bias.double()
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(run(program, x, packed).double(), expected, rtol=limit, atol=limit)
    whole = run(program, x, packed)
    assert [rows for rows in ROWS if not torch.equal(run(program, x[:rows], packed), whole[:rows])] == []


@pytest.mark.parametrize("kernel", ["neon", "neon_dot", "avx_vnni", "amx", *AVX512_BODIES[1:]])
def test_group_linear(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(kernel, f"linear_groups_{kernel}", f"group_linear_{kernel}", "run_groups.cpp", tmp_path / "run")
    monkeypatch.setattr(native, "products", lambda: kernel)
    for options in (Int4Options(32), Int4Options(64, symmetric=False), Int4Options(32, symmetric=False, int8_rows=True)):
        for dtype in (torch.float32, torch.bfloat16):
            weight = quantize_int4(torch.randn(45, 70).to(dtype), options)
            check_groups(program, weight, dtype, options.int8_rows)
    for name in STORED_FORMATS:
        for dtype in (torch.float32, torch.bfloat16):
            check_groups(program, stored_weight(name, 45), dtype)


def check_groups(program: list[str], weight: groups.QuantizedWeight, dtype: torch.dtype, int8_rows: bool = False) -> None:
    """Compare with the dequantised weight; a row's bits do not depend on the batch."""
    outputs, width = weight.shape
    x, bias = torch.randn(max(ROWS), width).to(dtype), torch.randn(outputs).to(dtype)
    parsed = groups._packable([weight], dtype, torch.device("cpu"))
    assert parsed is not None
    packed, inputs = groups._to_panels(parsed[0], bias), x.double()
    if int8_rows:
        codes, scale = quantize_rows(x)
        inputs = codes.double() * scale
    expected, limit = inputs @ weight.dequantize().double().T + bias.double(), 1e-2 if dtype == torch.bfloat16 else 3e-5
    whole = run_groups(program, x, packed, int8_rows)
    torch.testing.assert_close(whole.double(), expected, rtol=limit, atol=limit)
    assert [n for n in ROWS if not torch.equal(run_groups(program, x[:n], packed, int8_rows), whole[:n])] == []


@pytest.fixture
def emulated_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Run `varlen_attention` as on a CPU with AMX; returns the library, which counts products of tiles."""
    if "avx512_bf16" not in PRODUCTS or shutil.which("g++") is None:
        pytest.skip("needs a CPU with AVX-512 BF16 and g++")
    target, made = '-DTARGET="avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma"', tmp_path / "attention.so"
    options = ["-std=c++17", "-O2", "-w", "-fPIC", "-shared", target, *X86["amx"]]
    sources = [str(SOURCES / name) for name in ("attention.cpp", "instructions.cpp")]
    subprocess.run(["g++", *options, *sources, "-o", str(made)], check=True)
    library = ctypes.CDLL(str(made))
    native.use(library, "amx")
    function = library.sensorium_varlen_attention
    function.argtypes, function.restype = native._SIGNATURES["varlen_attention"], None
    monkeypatch.setattr(native, "_function", {"varlen_attention": function}.__getitem__)
    monkeypatch.setenv("SENSORIUM_KERNELS", "varlen_attention=native")
    return library


@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (3, 80), (2, 22)])
def test_attention_in_tiles(heads: int, dim: int, emulated_attention: ctypes.CDLL) -> None:
    """Attention with AMX equals its reference; a segment's bits do not depend on the batch."""
    lengths = [64, 64, 0, 16, 1, 33, 190, 65, 97]
    parts = torch.randn(sum(lengths), 3 * heads, dim).bfloat16()
    out = varlen_attention(*parts.split(heads, 1), lengths, dim**-0.5)
    expected = varlen_attention_reference(*parts.split(heads, 1), lengths, dim**-0.5)
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
    for rows, own in zip(parts.split(lengths), out.split(lengths), strict=True):
        assert torch.equal(varlen_attention(*rows.split(heads, 1), [len(rows)], dim**-0.5), own)
    assert ctypes.c_int64.in_dll(emulated_attention, "emulated_products").value > 0
