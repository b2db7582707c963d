"""Norms, rotation, the dispatcher; Triton interpreted and compiled ahead of time, in its own process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sensorium.kernels import dispatch
from sensorium.kernels.norm import layer_norm, rms_norm, rms_norm_reference
from sensorium.kernels.rope import rotary_cos_sin, rotate_

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (2, 3, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_as_the_published_model(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm

    gen = torch.Generator().manual_seed(7)
    x, weight = torch.randn(shape, generator=gen).to(dtype) * 3, torch.rand(shape[-1], generator=gen).to(dtype) + 0.5
    oracle = Qwen2_5_VLRMSNorm(shape[-1], 1e-6)
    oracle.weight.data = weight
    kept = x.clone()
    if dtype == torch.float32:  # the order of a sum shows in the last bit
        torch.testing.assert_close(rms_norm(x, weight, 1e-6), oracle(x), rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(rms_norm(x, weight, 1e-6), oracle(x))
    assert torch.equal(rms_norm_reference(x, weight, 1e-6), oracle(x))
    assert torch.equal(x, kept)


def test_layer_norm_by_hand() -> None:
    x, weight, bias = torch.randn(4, 16), torch.rand(16), torch.rand(16)
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-6), (x - mean) / (var + 1e-6).sqrt() * weight + bias)


def test_rotary_turns_pairs_by_their_axis() -> None:
    """A vector (1, 0) in the plane of frequency j ends at (cos, sin) of position[axis j] * frequency j."""
    freq, axis = torch.tensor([1.0, 0.5, 0.25]), torch.tensor([0, 1, 2])
    positions = torch.tensor([[3, 4], [5, 6], [7, 8]])
    cos, sin = rotary_cos_sin(positions, freq, axis)
    assert cos.is_contiguous(), "or every layer lays them out anew"
    assert sin.is_contiguous()
    x = torch.cat((torch.ones(2, 1, 3), torch.zeros(2, 1, 3)), -1)
    turned = x.clone()
    rotate_(turned, cos, sin)
    angle = torch.tensor([[3 * 1.0, 5 * 0.5, 7 * 0.25], [4 * 1.0, 6 * 0.5, 8 * 0.25]])
    torch.testing.assert_close(turned[:, 0, :3], angle.cos())
    torch.testing.assert_close(turned[:, 0, 3:], angle.sin())


def test_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.active(CPU, torch.float32).keys() == dispatch.BACKENDS.keys()
    monkeypatch.setenv("SENSORIUM_KERNELS", "linear=torch, attention=reference")
    assert dispatch.active(CPU, torch.float32)["attention"] == "reference"
    monkeypatch.setenv("SENSORIUM_KERNELS", "linear=fast")
    with pytest.raises(ValueError, match="known are"):
        dispatch.backend("linear", CPU, torch.float32)


def run_alone(code: str, **env: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@needs_triton
def test_triton_rms_norm_interpreted() -> None:
    run_alone(
        "import torch\n"
        "from sensorium.kernels.norm import rms_norm_reference\n"
        "from sensorium.kernels.norm_triton import rms_norm_triton\n"
        "for shape in ((1, 8), (5, 100), (2, 3, 64)):\n"
        "    x, w = torch.randn(shape) * 3, torch.rand(shape[-1]) + 0.5\n"
        "    torch.testing.assert_close(rms_norm_triton(x, w, 1e-6), rms_norm_reference(x, w, 1e-6))\n"
        "    x, w = x.half(), w.half()\n"
        "    close = dict(atol=2e-3, rtol=2e-3)\n"
        "    torch.testing.assert_close(rms_norm_triton(x, w, 1e-6), rms_norm_reference(x, w, 1e-6), **close)\n",
        TRITON_INTERPRET="1",
    )


@needs_triton
@pytest.mark.parametrize("capability", [80, 90])
def test_triton_rms_norm_compiles(capability: int, tmp_path: Path) -> None:
    run_alone(
        "import triton\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from triton.compiler import ASTSource\n"
        "from sensorium.kernels.norm_triton import _rms_norm_kernel as kernel\n"
        "types = {'x_ptr': '*bf16', 'weight_ptr': '*bf16', 'out_ptr': '*bf16'}\n"
        "types |= {'dim': 'i32', 'eps': 'fp32', 'BLOCK': 'constexpr'}\n"
        f"made = triton.compile(ASTSource(kernel, types, {{'BLOCK': 1024}}), target=GPUTarget('cuda', {capability}, 32))\n"
        "assert len(made.asm['cubin']) > 1000\n",
        TRITON_CACHE_DIR=str(tmp_path),
    )
