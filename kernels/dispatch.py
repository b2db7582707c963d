"""Which backend runs each op, by device and dtype. Knows names only; the ops live in their own files."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from . import native

BACKENDS: dict[str, tuple[str, ...]] = {
    "attention": ("native", "torch", "reference"),
    "varlen_attention": ("native", "torch", "reference"),
    "rms_norm": ("native", "torch", "triton"),
    "rotary": ("native", "torch"),
    "activation": ("native", "torch"),
    "gated": ("native", "torch"),
    "linear": ("native", "onednn", "torch"),
    "int8_linear": ("native", "torch"),
}
"""Every op and the backends it has."""


@functools.cache
def overrides(text: str) -> dict[str, str]:
    """`"linear=torch,attention=reference"` as a table; ValueError names what is unknown and what is known."""
    table: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        op, _, backend = part.partition("=")
        if backend not in BACKENDS.get(op, ()):
            known = "; ".join(f"{name}={'|'.join(names)}" for name, names in BACKENDS.items())
            raise ValueError(f"SENSORIUM_KERNELS: {part!r} is not op=backend; known are {known}")
        table[op] = backend
    return table


def backend(op: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend of `op`; the environment variable SENSORIUM_KERNELS overrides it for debugging, by what can run here."""
    return _choose(op, device, dtype, os.environ.get("SENSORIUM_KERNELS", ""))


@functools.cache
def _choose(op: str, device: torch.device, dtype: torch.dtype, wanted: str) -> str:
    forced = overrides(wanted)
    able = "native" in BACKENDS[op] and native.available(device, dtype) and _has_instructions(op, dtype)
    if op in forced and (able or forced[op] != "native"):
        return forced[op]
    if able:
        return "native"
    if op == "linear":
        return "onednn" if _packs(device, dtype) else "torch"
    if op == "rms_norm" and device.type == "cuda" and has_triton():
        return "triton"
    return "torch"


def active(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Backend of every op on this device, for `sensorium doctor`."""
    return {op: backend(op, device, dtype) for op in BACKENDS}


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
