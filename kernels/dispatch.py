"""Which backend runs each op: by device, dtype and width, unless told. Knows names only; the ops live in their own files."""

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
    "rotary_cache": ("triton", "torch"),
    "activation": ("native", "triton", "torch"),
    "gated": ("native", "triton", "torch"),
    "linear": ("native", "onednn", "torch"),
    "int8_linear": ("native", "triton", "torch"),
    "fp8_linear": ("triton", "torch"),
    "moe": ("triton", "torch"),
    "draw": ("triton", "torch"),
    "log_probs": ("triton", "torch"),
    "penalise": ("triton", "torch"),
}
"""Every op and the backends it has, best first."""
MEDIA_OPS = ("pixels", "mel")
"""Those that run where media are processed, which need not be where the model is."""
_WIDEST = {
    "attention": 576,
    "varlen_attention": 256,
    "rms_norm": 32768,
    "layer_norm": 32768,
    "rotary": 512,
    "rotary_cache": 512,
}
"""Of the Triton kernels that hold a whole row, or head, at once."""
_SLOW_IN_SINGLES = {"varlen_attention"}
"""Of the Triton kernels, those whose products of float32 torch makes sooner: they run where they are asked for."""
_told: ContextVar[str] = ContextVar("sensorium_kernels", default="")


@functools.cache
def overrides(text: str) -> dict[str, str]:
    """`"linear=torch,attention=reference"` as a table; a backend alone is for all ops that have it and are not named.

    Raises:
        ValueError: an op or backend that is unknown, with those that are known.
    """
    every: dict[str, str] = {}
    named: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        op, equals, backend = map(str.strip, part.partition("="))
        if not equals:
            every |= _all_with(part)
        elif op not in BACKENDS:
            raise ValueError(f"{op[:40]!r} is no op; {_known(op, BACKENDS)}")
        elif backend not in BACKENDS[op]:
            raise ValueError(f"{op} has no backend {backend[:40]!r}; {_known(backend, BACKENDS[op])}")
        else:
            named[op] = backend
    return every | named


def _all_with(backend: str) -> dict[str, str]:
    table = {op: backend for op, names in BACKENDS.items() if backend in names}
    if not table:
        names = dict.fromkeys(name for several in BACKENDS.values() for name in several)
        how = "write op=backend, or a backend for all ops that have it"
        raise ValueError(f"{backend[:40]!r} is no backend; {how}; {_known(backend, names)}")
    return table


def _known(name: str, known: Iterable[str]) -> str:
    """What ends a message about an unknown name."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"{f'did you mean {near[0]}? The' if near else 'the'} known ones are {', '.join(names)}"


@contextmanager
def using(wanted: str) -> Iterator[None]:
    """Inside, in this thread, ops run as `wanted` says, in the words of `overrides`."""
    token = _told.set(wanted)
    try:
        yield
    finally:
        _told.reset(token)


def backend(op: str, device: torch.device, dtype: torch.dtype, width: int = 0) -> str:
    """The backend of `op` for numbers of `dtype` on `device`: what it was told (`using`), if that can run here, or the best.

    The environment variable SENSORIUM_KERNELS overrides both for debugging. `width`: of a row, or of a head; 0: any.
    """
    return _choose(op, device, dtype, width, _told.get(), os.environ.get("SENSORIUM_KERNELS", ""))


def fused(op: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `op` is one kernel of ours, which holds no tensors between its input and its result."""
    return backend(op, device, dtype) in ("native", "triton")


@functools.cache
def _choose(op: str, device: torch.device, dtype: torch.dtype, width: int, told: str, debug: str) -> str:
    try:
        wanted = {**overrides(told), **overrides(debug)}.get(op)
    except ValueError as error:
        raise ValueError(f"SENSORIUM_KERNELS: {error}") from None
    if wanted is not None and can_run(op, wanted, device, dtype, width):
        return wanted
    slow = op in _SLOW_IN_SINGLES and dtype == torch.float32
    kept_back = "triton" if device.type == "cpu" or slow else None  # its interpreter runs where it is asked for
    return next(name for name in BACKENDS[op] if name != kept_back and can_run(op, name, device, dtype, width))


def can_run(op: str, name: str, device: torch.device, dtype: torch.dtype, width: int = 0) -> bool:
    """Whether this backend of the op is installed, and made for such numbers on such a device."""
    if name == "native":
        return native.available(device, dtype) and _has_instructions(op, dtype)
    if name == "triton":
        return (
            (device.type == "cuda" or interpreted())
            and has_triton()
            and dtype in _HALVES_AND_SINGLES
            and width <= _WIDEST.get(op, width)
        )
    return name != "onednn" or _packs(device, dtype)


def interpreted() -> bool:
    """Whether Triton's kernels run on a CPU, for debugging. Nothing records their launches."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def active(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Backend of every op on this device, for `sensorium doctor`."""
    return {op: backend(op, device, dtype) for op in BACKENDS}


_HALVES_AND_SINGLES = (torch.float32, torch.bfloat16, torch.float16)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_instructions(op: str, dtype: torch.dtype) -> bool:
    """The C++ products are compiled for CPUs that have both of their instructions, everything else for any CPU."""
    if op not in ("linear", "int8_linear"):
        return True
    both = bool(torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_vnni_supported())
    return both and (dtype == torch.bfloat16 or op == "int8_linear")


def _packs(device: torch.device, dtype: torch.dtype) -> bool:
    """oneDNN packs float32 anywhere, bfloat16 and float16 where the CPU has instructions for them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
