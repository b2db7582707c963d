"""The backends of every op: which module computes it, and what each can run."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from . import native

Obstacle = Callable[[torch.device, torch.dtype, int], str | None]
"""Function from a device, a dtype and the width of a row or head (0: any) to why a backend cannot run them, or None."""
_TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _runs_everywhere(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """One way to compute an op.

    Args:
        name: the name in `kernels=` and SENSORIUM_KERNELS.
        module: module below kernels that has the op's functions, imported when it is chosen. Empty: of a product, which
            follows from how its weight was packed.
        obstacle: why it cannot run here, or None.
        slow_dtypes: dtypes in which it is slower than the next one, so that it runs only if requested.
    """

    name: str
    module: str = ""
    obstacle: Obstacle = _runs_everywhere
    slow_dtypes: tuple[torch.dtype, ...] = ()


def _native(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    return native.obstacle(device, dtype)


def _native_product(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    return native.obstacle(device, dtype) or (None if native.products() else "the C++ products need AVX2 or NEON")


def _native_float32(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    return native.obstacle(device, dtype) or (None if dtype == torch.float32 else "the C++ kernel takes float32")


def _native_filter(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Without AVX-512, the kernel has too few registers and is slower than oneDNN."""
    reason = _native_float32(device, dtype, width) or (None if native.has_avx512() else "the C++ kernel needs AVX-512")
    return reason or (f"the C++ kernel computes 8 channels at a time, not {width}" if width % 8 else None)


def _triton(widest: int = 0) -> Obstacle:
    """Return the obstacles of Triton kernels. `widest`: row or head that the kernel holds in one tile; 0: any."""

    def obstacle(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
        if device.type != "cuda" and not interpreted():
            return "Triton needs a GPU"
        if not has_triton():
            return "triton is not installed"
        if dtype not in _TRITON_DTYPES:
            return "Triton kernels take float32, bfloat16 and float16"
        return f"the Triton kernel takes widths up to {widest}" if widest and width > widest else None

    return obstacle


def _numpy(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    return None if device.type == "cpu" else "numpy runs on a CPU"


def _onednn(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    return None if onednn_packs(device, dtype) else "oneDNN packs float32, and bfloat16 and float16 on CPUs with such products"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Return whether Triton kernels run in the interpreter, for debugging. Graphs cannot record those launches."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def onednn_packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN packs weights of this dtype: float32 always, bfloat16 and float16 if the CPU supports them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and not native.hides_avx512()
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()) and not native.hides_avx512()
    return dtype == torch.float32


def _table(ops: Mapping[str, tuple[Backend, ...]]) -> Mapping[str, Mapping[str, Backend]]:
    return {op: {backend.name: backend for backend in backends} for op, backends in ops.items()}


_TORCH = Backend("torch")
BACKENDS = _table(
    {
        "attention": (
            Backend("native", "attention.native", _native),
            Backend("triton", "attention.triton", _triton(widest=576)),
            Backend("torch", "attention.sdpa"),
            Backend("reference", "attention.reference"),
        ),
        "varlen_attention": (
            Backend("native", "varlen.native", _native),
            Backend("triton", "varlen.triton", _triton(widest=256), slow_dtypes=(torch.float32,)),
            Backend("torch", "varlen.sdpa"),
            Backend("reference", "varlen.reference"),
        ),
        "scatter": (Backend("triton", "scatter.triton", _triton()), Backend("torch", "scatter.reference")),
        "pixels": (Backend("triton", "pixels.triton", _triton()), Backend("torch", "pixels.reference")),
        "mel": (Backend("triton", "mel.triton", _triton()), Backend("torch", "mel.reference")),
        "rms_norm": (
            Backend("native", "norm.native", _native),
            Backend("triton", "norm.triton", _triton(widest=32768)),
            Backend("torch", "norm.reference"),
        ),
        "layer_norm": (Backend("triton", "norm.triton", _triton(widest=32768)), Backend("torch", "norm.reference")),
        "rotary": (
            Backend("native", "rope.native", _native),
            Backend("triton", "rope.triton", _triton(widest=512)),
            Backend("torch", "rope.reference"),
        ),
        "qkv_prepare": (
            Backend("triton", "qkv_prepare.triton", _triton(widest=512)),
            Backend("torch", "qkv_prepare.reference"),
        ),
        "activation": (
            Backend("native", "activation.native", _native),
            Backend("triton", "activation.triton", _triton()),
            Backend("torch", "activation.reference"),
        ),
        "act_and_mul": (
            Backend("native", "activation.native", _native),
            Backend("triton", "activation.triton", _triton()),
            Backend("torch", "activation.reference"),
        ),
        "linear": (Backend("native", obstacle=_native_product), Backend("onednn", obstacle=_onednn), _TORCH),
        "int8_linear": (Backend("native", obstacle=_native_product), Backend("triton", obstacle=_triton()), _TORCH),
        "fp8_linear": (Backend("triton", obstacle=_triton()), _TORCH),
        "int4_linear": (Backend("native", obstacle=_native_product), Backend("triton", obstacle=_triton()), _TORCH),
        "low_rank": (Backend("native", obstacle=_native), _TORCH),
        "moe": (Backend("triton", "moe.triton", _triton()), Backend("torch", "moe.reference")),
        "channel_norm": (Backend("native", "channel_norm.native", _native_float32), Backend("torch", "channel_norm.reference")),
        "convolution": (Backend("native", "convolution.native", _native_filter), Backend("torch", "convolution.reference")),
        "causal_conv": (
            Backend("native", "state.native", _native),
            Backend("triton", "state.triton", _triton()),
            Backend("torch", "state.reference"),
        ),
        "linear_recurrence": (
            Backend("native", "state.native", _native),
            Backend("triton", "state.triton", _triton()),
            Backend("torch", "state.reference"),
        ),
        "sample": (
            Backend("triton", "sampling.triton", _triton()),
            Backend("numpy", "sampling.cpu", _numpy),
            Backend("torch", "sampling.reference"),
        ),
        "log_probs": (Backend("triton", "sampling.triton", _triton()), Backend("torch", "sampling.reference")),
        "penalties": (Backend("triton", "sampling.triton", _triton()), Backend("torch", "sampling.reference")),
    }
)
"""Op -> name -> backend, best first."""
MEDIA_OPS = ("pixels", "mel")
"""Ops that run where media are processed (`media_device`), which may differ from the model's device."""
