"""Norms, rotary embedding and the dispatcher."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from sensorium.kernels import dispatch
from sensorium.kernels.backends import BACKENDS, Backend, has_triton
from sensorium.kernels.norm import layer_norm, rms_norm
from sensorium.kernels.norm.reference import rms_norm_reference
from sensorium.kernels.rope import rotary_cos_sin, rotate_

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (2, 3, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_rounds_as_the_published_model(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm

    gen = torch.Generator().manual_seed(7)
    x, weight = torch.randn(shape, generator=gen).to(dtype) * 3, torch.rand(shape[-1], generator=gen).to(dtype) + 0.5
    oracle = Qwen2_5_VLRMSNorm(shape[-1], 1e-6)
    oracle.weight.data = weight
    kept = x.clone()
    if dtype == torch.float32:  # the last bit depends on the order of the sum
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
    assert cos.is_contiguous(), "else every layer copies them"
    assert sin.is_contiguous()
    x = torch.cat((torch.ones(2, 1, 3), torch.zeros(2, 1, 3)), -1)
    turned = x.clone()
    rotate_(turned, cos, sin)
    angle = torch.tensor([[3 * 1.0, 5 * 0.5, 7 * 0.25], [4 * 1.0, 6 * 0.5, 8 * 0.25]])
    torch.testing.assert_close(turned[:, 0, :3], angle.cos())
    torch.testing.assert_close(turned[:, 0, 3:], angle.sin())


def test_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dispatch.active_backends(CPU, torch.float32).keys() == BACKENDS.keys()
    monkeypatch.setenv("SENSORIUM_KERNELS", "linear=torch, attention=reference")
    assert dispatch.active_backends(CPU, torch.float32)["attention"] == "reference"
    monkeypatch.setenv("SENSORIUM_KERNELS", "linear=fast")
    with pytest.raises(ValueError, match="SENSORIUM_KERNELS: linear has no backend 'fast'; the known ones are"):
        dispatch.backend("linear", CPU, torch.float32)


def test_told_in_one_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = dispatch.backend("attention", CPU, torch.float32)
    with dispatch.use_backends("attention=reference,rotary=torch"), ThreadPoolExecutor(1) as pool:
        assert dispatch.backend("attention", CPU, torch.float32) == "reference"
        assert pool.submit(dispatch.backend, "attention", CPU, torch.float32).result() == usual
        monkeypatch.setenv("SENSORIUM_KERNELS", "attention=torch")
        assert dispatch.backend("attention", CPU, torch.float32) == "torch"
        assert dispatch.backend("rotary", CPU, torch.float32) == "torch"
        monkeypatch.delenv("SENSORIUM_KERNELS")
    assert dispatch.backend("attention", CPU, torch.float32) == usual


def test_a_gpu_runs_triton_where_it_fits() -> None:
    gpu = torch.device("cuda")
    assert dispatch.backend("rms_norm", gpu, torch.bfloat16, 4096) == ("triton" if has_triton() else "torch")
    assert dispatch.backend("rms_norm", gpu, torch.bfloat16, 100_000) == "torch"
    assert dispatch.backend("rms_norm", gpu, torch.float64) == "torch"


def test_what_cannot_run_here_is_not_chosen() -> None:
    with dispatch.use_backends("rms_norm=triton"):
        assert dispatch.backend("rms_norm", CPU, torch.float32) != "triton"
    assert not dispatch.can_run("rms_norm", "triton", CPU, torch.float32)


@pytest.mark.parametrize(
    ("op", "name", "device", "dtype", "width", "reason"),
    [
        ("attention", "native", "cuda", torch.float32, 64, "run on a CPU"),
        ("attention", "native", "cpu", torch.float16, 64, "take float32 and bfloat16"),
        ("rms_norm", "triton", "cpu", torch.float32, 64, "needs a GPU"),
        ("sample", "numpy", "cuda", torch.float32, 0, "on a CPU"),
        ("linear", "onednn", "cpu", torch.float64, 0, "packs float32"),
    ],
)
def test_a_backend_says_what_it_cannot_run(
    op: str, name: str, device: str, dtype: torch.dtype, width: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert reason in str(BACKENDS[op][name].obstacle(torch.device(device), dtype, width))
    assert not dispatch.can_run(op, name, torch.device(device), dtype, width)


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
def test_a_triton_kernel_holds_rows_up_to_a_width() -> None:
    obstacle = BACKENDS["rotary"]["triton"].obstacle
    assert obstacle(torch.device("cuda"), torch.float32, 512) is None
    assert "up to 512" in str(obstacle(torch.device("cuda"), torch.float32, 513))
    assert "bfloat16" in str(obstacle(torch.device("cuda"), torch.float64, 512))


def test_the_last_backend_of_an_op_runs_everywhere() -> None:
    for op, backends in BACKENDS.items():
        last = list(backends.values())[-1]
        assert last.obstacle(torch.device("meta"), torch.int64, 1 << 20) is None, op
        assert not last.slow_dtypes, op


@pytest.fixture
def fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Forget which backends were chosen, before and after a test that changes the table."""
    for cache in (dispatch._choose_backend, dispatch.parse_overrides):
        cache.cache_clear()
    yield monkeypatch
    for cache in (dispatch._choose_backend, dispatch.parse_overrides):
        cache.cache_clear()


def test_a_new_backend_is_one_row(fresh_choices: pytest.MonkeyPatch) -> None:
    """A backend without obstacles in the first row of an op is chosen and can be requested."""
    table = cast(dict[str, Mapping[str, Backend]], BACKENDS)
    fresh_choices.setitem(table, "mel", {"new": Backend("new"), **BACKENDS["mel"]})
    assert dispatch.backend("mel", CPU, torch.float32) == "new"
    assert dispatch.parse_overrides("mel=new") == {"mel": "new"}
    with dispatch.use_backends("mel=torch"):
        assert dispatch.backend("mel", CPU, torch.float32) == "torch"


def test_every_module_of_an_op_has_the_functions_of_its_interface() -> None:
    """The interfaces call `implementation(op, ...).function(...)`; each module in the op's rows has the function."""
    called = set()
    for path in Path(dispatch.__file__).parent.glob("*/__init__.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call):
                call = node.value
                if ast.unparse(call.func) == "implementation" and isinstance(call.args[0], ast.Constant):
                    called.add((str(call.args[0].value), node.attr))
    assert {op for op, _ in called} == {op for op, rows in BACKENDS.items() if any(row.module for row in rows.values())}
    for op, function in called:
        for name, row in BACKENDS[op].items():
            if name != "triton" or has_triton():
                assert callable(getattr(dispatch._import_backend(row.module), function, None)), f"{op}={name}: {function}"
