"""Load and call the C++ kernels, a library beside this file. Without it, every op runs in torch.

Kernels take pointers, strides in elements, and sizes. They use torch's own threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_SIGNATURES = {
    "paged_attention": (
        *(_I, _P, _N, _P, _N, _P, _N, _P, _N, _N, _I, _P, _N, _N, _N, _F, _F, _P, _P, _N, _P, _N, _N, _P, _N),
        *(_I, _N, _P, _N, _P, _I),
    ),
    "varlen_attention": (_I, _P, _N, _P, _N, _P, _N, _P, _N, _N, _N, _F, _P, _P, _N, _I),
    "norm": (_I, _P, _P, _P, _P, _N, _N, _F, _F, _I),
    "norm_heads": (_I, _P, _N, _P, _N, _N, _N, _F, _F, _I),
    "rotate": (_I, _P, _N, _N, _P, _P, _N, _N, _N, _I, _I),
    "activation": (_I, _I, _P, _P, _N, _I),
    "gated": (_I, _I, _P, _P, _N, _N, _I),
    "linear": (_I, _P, _N, _P, _P, _N, _N, _P, _I),
    "linear_avx2": (_I, _P, _N, _P, _P, _N, _N, _P, _I),
    "int8_linear": (_I, _P, _N, _N, _P, _P, _P, _P, _N, _N, _P, _P, _I),
    "int8_linear_avx2": (_I, _P, _N, _N, _P, _P, _P, _N, _N, _P, _I),
    "int4_linear": (_I, _P, _N, _N, _P, _P, _P, _N, _P, _P, _N, _N, _N, _N, _N, _P, _P, _I),
    "int4_linear_avx2": (_I, _P, _N, _N, _P, _P, _P, _N, _P, _P, _N, _N, _N, _N, _N, _P, _P, _I),
}
"""Argument types of each function of kernels/cpu."""
ABI = 1
"""Version of these functions and their data layouts. A library with another version (cpu/instructions.cpp) is not used."""
REBUILD = "pip install --no-build-isolation --no-deps -e ."
LEVELS = ("base", "avx2", "avx512", "avx512_bf16")
"""The instruction sets that kernels/cpu is compiled for, in the order of `Level` in common.h."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if there are none that this system can load."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            found = ctypes.CDLL(str(path))
        except OSError:  # built for another system
            continue
        try:
            stale = _abi(found) != ABI
            for name, types in _SIGNATURES.items():
                function = getattr(found, f"sensorium_{name}")
                function.argtypes, function.restype = types, None
        except AttributeError:
            stale = True
        if stale:
            reason = "was built from other sources and is not used; torch runs in its place, several times slower"
            warnings.warn(f"{path} {reason}. Rebuild it: {REBUILD}", RuntimeWarning, stacklevel=2)
            continue
        if hides_avx512():
            level(found).value = min(level(found).value, LEVELS.index("avx2"))
        return found
    return None


def _abi(found: ctypes.CDLL) -> int:
    """Return the library's version, or 0 if it states none."""
    try:
        return ctypes.c_int.in_dll(found, "sensorium_abi").value
    except ValueError:
        return 0


def level(found: ctypes.CDLL) -> ctypes.c_int:
    """Return the library's variable with the instruction set in use, an index of LEVELS."""
    return ctypes.c_int.in_dll(found, "sensorium_level")


def instructions() -> str:
    """Return the instruction set that the C++ kernels use on this CPU, one of LEVELS, or "not built"."""
    found = library()
    return "not built" if found is None else LEVELS[level(found).value]


def hides_avx512() -> bool:
    """Return whether our kernels must behave as on a CPU without AVX-512 (SENSORIUM_CPU=avx2, for debugging).

    The variable is read when the kernels are loaded and has to be set before the process starts. torch has its own switches:
    ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2.

    Raises:
        ValueError: the variable has another value.
    """
    wanted = os.environ.get("SENSORIUM_CPU", "")
    if wanted not in ("", "avx2"):
        raise ValueError(f"SENSORIUM_CPU={wanted[:40]!r} is unknown; leave it unset, or set it to avx2 to hide AVX-512")
    return wanted == "avx2"


def has_vnni() -> bool:
    """Return whether the CPU multiplies int8 with AVX-512 VNNI."""
    return bool(torch.cpu._is_vnni_supported()) and not hides_avx512()


def products() -> str | None:
    """Return which C++ linear layers run on this CPU: "avx512" (with BF16 and VNNI), "avx2", or None."""
    if instructions() == "avx512_bf16" and has_vnni():
        return "avx512"
    return "avx2" if instructions() in LEVELS[1:] else None


def available(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in _TYPES and library() is not None


@functools.cache
def _function(name: str) -> Any:
    return getattr(library(), f"sensorium_{name}")


def call(name: str, dtype: torch.dtype, *args: int | float | Tensor | None) -> None:
    """Run a kernel. A tensor is passed as the address of its first element; the number of threads is appended."""
    plain = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
    function, number, threads = _function(name), _TYPES[dtype], torch.get_num_threads()
    function(number, *plain, threads)
    if _local.record is not None:
        again = functools.partial(function, number, *plain, threads)
        _local.record(again, [arg for arg in args if isinstance(arg, Tensor)])


Record = Callable[[Callable[[], object], Sequence[Tensor]], None]


class _Local(threading.local):
    record: Record | None = None


_local = _Local()


@contextmanager
def recording(record: Record) -> Iterator[None]:
    """Pass every call made in this context and thread to `record`: a callable that repeats it, and its tensors."""
    _local.record = record
    try:
        yield
    finally:
        _local.record = None


def contiguous_heads(x: Tensor) -> Tensor:
    """Return `x [rows, heads, dim]` with contiguous heads within each row; rows may stay strided."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
