"""Choose the backend of each kernel by device, dtype and width. `use_backends` and SENSORIUM_KERNELS override the choice."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from . import native

BACKENDS: dict[str, tuple[str, ...]] = {
    "attention": ("native", "triton", "torch", "reference"),
    "varlen_attention": ("native", "triton", "torch", "reference"),
    "scatter": ("triton", "torch"),
    "pixels": ("triton", "torch"),
    "mel": ("triton", "torch"),
    "rms_norm": ("native", "triton", "torch"),
    "layer_norm": ("triton", "torch"),
    "rotary": ("native", "triton", "torch"),
    "qkv_prepare": ("triton", "torch"),
    "activation": ("native", "triton", "torch"),
    "act_and_mul": ("native", "triton", "torch"),
    "linear": ("native", "onednn", "torch"),
    "int8_linear": ("native", "triton", "torch"),
    "fp8_linear": ("triton", "torch"),
    "int4_linear": ("native", "triton", "torch"),
    "moe": ("triton", "torch"),
    "causal_conv": ("native", "triton", "torch"),
    "linear_recurrence": ("native", "triton", "torch"),
    "sample": ("triton", "numpy", "torch"),
    "log_probs": ("triton", "torch"),
    "penalties": ("triton", "torch"),
}
"""Backends of every op, best first."""
MEDIA_OPS = ("pixels", "mel")
"""Ops that run where media are processed (`media_device`), which may differ from the model's device."""
_MAX_WIDTH = {
    "attention": 576,
    "varlen_attention": 256,
    "rms_norm": 32768,
    "layer_norm": 32768,
    "rotary": 512,
    "qkv_prepare": 512,
}
"""Widest row or head that these Triton kernels take: they hold all of it in one tile."""
_SLOW_IN_FP32 = {"varlen_attention"}
"""Ops whose Triton kernel is slower than torch in float32 and runs there only if requested."""
_CPU = torch.device("cpu")
_overrides: ContextVar[str] = ContextVar("sensorium_kernels", default="")


@functools.cache
def parse_overrides(text: str) -> dict[str, str]:
    """Parse `"linear=torch,attention=reference"` into a table of op -> backend.

    A backend without an op applies to every op that has this backend and is not named itself.

    Raises:
        ValueError: an op or backend is unknown; the message lists the known ones.
    """
    every: dict[str, str] = {}
    named: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        op, equals, backend = map(str.strip, part.partition("="))
        if not equals:
            every |= _ops_with_backend(part)
        elif op not in BACKENDS:
            raise ValueError(f"{op[:40]!r} is not an op; {_suggest(op, BACKENDS)}")
        elif backend not in BACKENDS[op]:
            raise ValueError(f"{op} has no backend {backend[:40]!r}; {_suggest(backend, BACKENDS[op])}")
        else:
            named[op] = backend
    return every | named


def _ops_with_backend(backend: str) -> dict[str, str]:
    table = {op: backend for op, names in BACKENDS.items() if backend in names}
    if not table:
        names = dict.fromkeys(name for several in BACKENDS.values() for name in several)
        how = "write op=backend, or a backend for all ops that have it"
        raise ValueError(f"{backend[:40]!r} is not a backend; {how}; {_suggest(backend, names)}")
    return table


def _suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest match and the known names."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{f'did you mean {near[0]}? The' if near else 'the'} known ones are {', '.join(names)}"


@contextmanager
def use_backends(overrides: str) -> Iterator[None]:
    """Run ops with the backends that `overrides` names (see `parse_overrides`), inside the context and in this thread."""
    token = _overrides.set(overrides)
    try:
        yield
    finally:
        _overrides.reset(token)


def backend(op: str, device: torch.device, dtype: torch.dtype, width: int = 0) -> str:
    """Return the backend of `op` for `dtype` on `device`: the one set by `use_backends` if it can run here, else the best one.

    The environment variable SENSORIUM_KERNELS overrides both, for debugging. `width` is the width of a row or head; 0: any.
    """
    return _choose_backend(op, device, dtype, width, _overrides.get(), os.environ.get("SENSORIUM_KERNELS", ""))


def fused(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether `op` runs as one of our kernels, which allocates nothing between its input and its result."""
    return backend(op, device, dtype) in ("native", "triton")


@functools.cache
def _choose_backend(op: str, device: torch.device, dtype: torch.dtype, width: int, overrides: str, debug: str) -> str:
    try:
        requested = {**parse_overrides(overrides), **parse_overrides(debug)}.get(op)
    except ValueError as error:
        raise ValueError(f"SENSORIUM_KERNELS: {error}") from None
    if requested is not None and can_run(op, requested, device, dtype, width):
        return requested
    slow = op in _SLOW_IN_FP32 and dtype == torch.float32
    on_request = "triton" if device.type == "cpu" or slow else None  # on a CPU, Triton runs in its slow interpreter
    return next(name for name in BACKENDS[op] if name != on_request and can_run(op, name, device, dtype, width))


def can_run(op: str, name: str, device: torch.device, dtype: torch.dtype, width: int = 0) -> bool:
    """Return whether this backend of the op is installed and supports the device, dtype and width."""
    if name == "native":
        return native.available(device, dtype) and _cpu_supports(op)
    if name == "triton":
        has_device = device.type == "cuda" or interpreted()
        return has_device and has_triton() and dtype in _TRITON_DTYPES and width <= _MAX_WIDTH.get(op, width)
    if name == "numpy":
        return device.type == "cpu"
    return name != "onednn" or _onednn_packs(device, dtype)


def interpreted() -> bool:
    """Return whether Triton kernels run in the interpreter, for debugging. Graphs cannot record those launches."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def active_backends(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return the backend of every op on this device, for `sensorium doctor`."""
    return {op: backend(op, device, dtype) for op in BACKENDS}


_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _cpu_supports(op: str) -> bool:
    """Return whether the CPU can run a C++ kernel: matmuls need AVX2 or NEON, other kernels run on any CPU."""
    return op not in ("linear", "int8_linear", "int4_linear") or native.products() is not None


def multiplies_fast(dtype: torch.dtype) -> bool:
    """Return whether linear layers in this dtype are as fast on the CPU as in float32."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and (native.products() is not None or _onednn_packs(_CPU, dtype)))


def multiplies_pairs() -> bool:
    """Return whether attention on this CPU multiplies pairs of bfloat16, which takes half the time of float32."""
    return native.products() in ("avx512_bf16", "amx")


def _onednn_packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this dtype: float32 always, bfloat16 and float16 if the CPU supports them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not native.hides_avx512()
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()) and not native.hides_avx512()
    return dtype == torch.float32
