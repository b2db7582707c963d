"""Linear layers for CPUs that this machine is not: NEON in qemu, and AVX-VNNI with the same instruction of AVX-512 VNNI."""

from __future__ import annotations

import importlib.util
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpu import PRODUCTS
from sensorium.kernels import native, panels
from sensorium.kernels.int8 import Int8Weight, int8_linear_reference, quantize_rows
from torch import Tensor

pytestmark = pytest.mark.full
SOURCES = Path(native.__file__).with_name("cpu")
RUNNER = Path(__file__).parents[1] / "helpers" / "run_linear.cpp"
ROWS = (1, 2, 3, 6, 7, 13)
X86 = ['-DTARGET="avx2,fma,f16c,avx512f,avx512vl,avx512vnni"', "-DDPBUSD=_mm256_dpbusd_epi32"]
"""Compile the body for AVX-VNNI with the instruction of AVX-512 VNNI, which computes the same."""


def command(kernel: str) -> tuple[list[str], list[str]]:
    """Return the compiler with its options, and the emulator. Skips the test without them."""
    if kernel == "avx_vnni":
        if "avx512_vnni" not in PRODUCTS or shutil.which("g++") is None:
            pytest.skip("needs a CPU with AVX-512 VNNI and g++")
        return ["g++", *X86], []
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


def run(program: list[str], x: Tensor, packed: panels.Panels) -> Tensor:
    w, number = packed, {torch.float32: 0, torch.bfloat16: 1}[x.dtype]
    blobs = [
        b"" if t is None else bytes(t.contiguous().view(torch.uint8).numpy()) for t in (x, w.weight, w.shift, w.scale, w.bias)
    ]
    sizes = (*x.shape, w.weight.shape[1], w.outputs, *map(len, blobs))
    head = struct.pack("11q", number, panels._TYPES[w.weight.dtype], *sizes)
    done = subprocess.run(program, input=head + b"".join(blobs), capture_output=True, check=True)
    return torch.frombuffer(bytearray(done.stdout), dtype=x.dtype).view(len(x), w.outputs)


@pytest.mark.parametrize("kernel", ["neon", "neon_dot", "neon_bf16", "avx_vnni"])
def test_linear(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, emulator = command(kernel)
    source, target = SOURCES / f"linear_{kernel}.cpp", tmp_path / "run"
    options = ["-std=c++17", "-O2", "-w", f"-I{SOURCES}", f"-DNAME=sensorium_linear_{kernel}"]
    subprocess.run([*compiler, *options, str(RUNNER), str(source), "-o", str(target)], check=True)
    monkeypatch.setattr(native, "products", lambda: kernel)
    for stored in (dtype for dtype, form in panels._LAYOUTS[kernel].items() if form.kernel == kernel):
        both = stored in (torch.int8, torch.bfloat16)
        computed = (
            [torch.float32] if not both else [torch.bfloat16] if kernel == "neon_bf16" else [torch.float32, torch.bfloat16]
        )
        for dtype in computed:
            check([*emulator, str(target)], stored, dtype)


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
