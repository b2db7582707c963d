"""Pytest plugin for Triton's interpreter: bfloat16 and fp8 as a GPU rounds them, poisoned and guarded outputs, fresh data.

The interpreter of Triton 3.7 to 3.9 holds bfloat16 as raw uint16 and computes on the bits; float32 becomes bfloat16 by
truncation and fp8 by rounding halves up. Here such an operand is widened to float32 first and a result is rounded to nearest,
ties to even.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is decorated

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

Handle, Builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
FP8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
GUARD = 64  # poisoned elements before and after every buffer, which keep it aligned to 256 bytes


def widen(handle: Any) -> Any:
    """Convert a bfloat16 operand to float32; return anything else unchanged."""
    if not isinstance(handle, Handle) or handle.dtype.scalar != tl.bfloat16 or handle.data.dtype != np.uint16:
        return handle
    return Handle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def narrow(data: np.ndarray) -> Any:
    """Round float32 numbers to bfloat16, to nearest, ties to even."""
    rounded = torch.from_numpy(np.ascontiguousarray(data, np.float32)).to(torch.bfloat16)
    return Handle(rounded.view(torch.uint16).numpy().reshape(data.shape), tl.bfloat16)


def in_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Widen operands; round the result to bfloat16 if one of them was, unless it is boolean."""

    @functools.wraps(operation)
    def run(self: Any, *operands: Any) -> Any:
        wide = [widen(operand) for operand in operands]
        out = operation(self, *wide)
        if all(new is old for new, old in zip(wide, operands, strict=True)):
            return out
        return Handle(out.data, tl.int1) if out.data.dtype == bool else narrow(out.data)

    return run


def ternary_op(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Pass `where` through, since it only moves bits; compute a clamp in float32."""
    computed = in_float32(operation)
    return lambda self, a, b, c, op: (operation if op is np.where else computed)(self, a, b, c, op)


def cast(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Cast from and to bfloat16 through float32; to fp8 like the hardware: ties to even, saturating."""

    @functools.wraps(operation)
    def run(self: Any, source: Any, kind: Any, *rounding: Any) -> Any:
        target, wide = kind.scalar, widen(source)
        if target == source.dtype.scalar:
            return source
        if target == tl.bfloat16:
            return narrow(wide.data.astype(np.float32))
        if target in FP8 and wide.data.dtype in (np.float16, np.float32):
            largest = torch.finfo(FP8[target]).max
            numbers = torch.from_numpy(np.ascontiguousarray(wide.data, np.float32)).clamp(-largest, largest).to(FP8[target])
            return Handle(numbers.view(torch.uint8).numpy().reshape(wide.data.shape), target)
        return wide if wide.dtype.scalar == target else operation(self, wide, kind, *rounding)

    return run


def reduction(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return sums, maxima and scans of bfloat16 in float32, as on a GPU."""

    def run(self: Any, inputs: tuple[Any, ...]) -> Any:
        wide = [widen(x.handle) for x in inputs]
        kinds = [tl.block_type(h.dtype.scalar, list(h.data.shape)) if x.type.is_block() else h.dtype.scalar
                 for h, x in zip(wide, inputs, strict=True)]  # fmt: skip
        return operation(self, tuple(tl.core.tensor(h, kind) for h, kind in zip(wide, kinds, strict=True)))

    return run


def dot(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Multiply bfloat16 exactly and sum in the accumulator's type."""
    return lambda self, a, b, *rest: operation(self, widen(a), widen(b), *rest)


def teach_bfloat16() -> None:
    """Patch the interpreter's arithmetic. Its other casts call cast_impl."""
    for name in ("binary_op", "unary_op", "create_fma"):
        setattr(Builder, name, in_float32(getattr(Builder, name)))
    Builder.ternary_op = ternary_op(Builder.ternary_op)
    Builder.create_dot = dot(Builder.create_dot)
    Builder.cast_impl, Builder.create_fp_to_fp = cast(Builder.cast_impl), cast(Builder.create_fp_to_fp)
    Builder.get_bf16 = lambda self, value: narrow(np.array([value], np.float32))
    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind.apply_impl = reduction(kind.apply_impl)


def poison(buffer: Tensor) -> Tensor:
    """Fill with NaN, or the largest integer, so that values a kernel forgets or reads too early show up."""
    if buffer.dtype == torch.bool:
        return buffer.fill_(True)
    return buffer.fill_(float("nan") if buffer.is_floating_point() or buffer.is_complex() else torch.iinfo(buffer.dtype).max)


def guarded(make: Callable[..., Tensor], held: list[tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Wrap `make`: its result is poisoned, with poisoned margins that reveal out-of-bounds writes."""

    @functools.wraps(make)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        plain = make(*args, **kwargs)
        if plain.device.type != "cpu" or not plain.numel() or plain.layout != torch.strided:
            return plain
        if not plain.is_contiguous():
            return poison(plain)
        margin = poison(torch.zeros(plain.numel() + 2 * GUARD, dtype=plain.dtype))
        held.append((margin, margin.clone()))
        return margin[GUARD : GUARD + plain.numel()].view(plain.shape).requires_grad_(plain.requires_grad)

    return run


def margins_are_whole(held: list[tuple[Tensor, Tensor]]) -> bool:
    """Return whether every margin still has its original bytes."""
    ends = (slice(None, GUARD), slice(-GUARD, None))
    return all(torch.equal(now[end].view(torch.uint8), then[end].view(torch.uint8)) for now, then in held for end in ends)


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seed by the test's name; poison empty tensors while it runs."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
    held: list[tuple[Tensor, Tensor]] = []
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name), held))
    with np.errstate(all="ignore"):  # infinities raise no warning, as on a GPU
        yield
    assert margins_are_whole(held), "a kernel wrote outside of its output"


teach_bfloat16()
