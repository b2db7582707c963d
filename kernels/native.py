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

from .installation import build_command

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_LINEAR = ("avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "neon", "neon_dot", "neon_bf16", "neon_i8mm", "amx")
_GROUPS = ("avx2", "avx_vnni", "avx512_vnni", "avx512_bf16", "neon", "neon_dot", "amx")
_SEQUENCES = (_P, _P, _P, _N, _N, _P, _N)
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
    "low_rank": (_I, _P, _N, _P, _N, _N, _N, _N, _P, _I),
    "channel_norm": (_I, _I, _P, _P, _P, _P, _P, _N, _N, _F, _F, _I),
    "convolution": (_I, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _I),
    "causal_conv": (_I, _P, _N, _P, _P, _P, _N, _N, *_SEQUENCES, _I),
    "linear_recurrence": (_I, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N, *_SEQUENCES, _I),
    **{
        f"group_linear_{name}": (
            *(_I, _P, _N, _N, _P, _N, _P, _P, _N, _P, _P, _N, _P, _P, _N, _P, _N, _P, _P),
            *(_N, _N, _N, _N, _N, _P, _P, _I),
        )
        for name in _GROUPS
    },
    **{f"linear_{name}": (_I, _I, _P, _N, _N, _P, _P, _P, _P, _N, _N, _P, _P, _I) for name in _LINEAR},
}
"""Argument types of each function of kernels/cpu."""
ABI = 5
"""Version of these functions and their data layouts. A library with another version (cpu/instructions.cpp) is not used."""
LEVELS = {
    "base": 0,
    "avx2": 1,
    "avx_vnni": 1,
    "avx512": 2,
    "avx512_vnni": 2,
    "avx512_bf16": 3,
    "neon": 0,
    "neon_dot": 0,
    "neon_bf16": 0,
    "neon_i8mm": 0,
    "amx": 4,
}
"""Instruction sets of linear layers, in the order of `Products` in cpu/common.h, with the `Level` of all other kernels."""

NEWEST = "newest"
"""Value of SENSORIUM_CPU for the newest instruction set in every op, without measuring which is the fastest."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled kernels, or None if there are none that this system can load."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            kernels = ctypes.CDLL(str(path))
        except OSError:  # built for another system
            continue
        try:
            stale = _abi(kernels) != ABI
            for name, types in _SIGNATURES.items():
                function = getattr(kernels, f"sensorium_{name}")
                function.argtypes, function.restype = types, None
        except AttributeError:
            stale = True
        if stale:
            reason = "was built from other sources and is not used; torch runs in its place, several times slower"
            warnings.warn(f"{path} {reason}. Rebuild it: {build_command()}", RuntimeWarning, stacklevel=2)
            continue
        if (wanted := restriction()) in (has := supported(kernels)):
            use(kernels, str(wanted))
        elif wanted is not None:
            warnings.warn(f"SENSORIUM_CPU={wanted} is ignored: this CPU has {', '.join(has)}", RuntimeWarning, stacklevel=2)
        return kernels
    return None


def _abi(library: ctypes.CDLL) -> int:
    """Return the library's version, or 0 if it states none."""
    try:
        return ctypes.c_int.in_dll(library, "sensorium_abi").value
    except ValueError:
        return 0


def _variable(library: ctypes.CDLL, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(library, f"sensorium_{name}")


def supported(library: ctypes.CDLL) -> list[str]:
    """Return the names of LEVELS that this CPU has, the best one last."""
    bits = _variable(library, "found").value
    return [name for at, name in enumerate(LEVELS) if bits >> at & 1]


def use(library: ctypes.CDLL, name: str) -> None:
    """Make the kernels use this instruction set of LEVELS."""
    _variable(library, "products").value = list(LEVELS).index(name)
    set_level(library, LEVELS[name])


def set_level(library: ctypes.CDLL, level: int) -> int:
    """Set the level of all kernels but products (`Level` in cpu/common.h); return the level before."""
    variable = _variable(library, "level")
    before, variable.value = variable.value, level
    return before


def instructions() -> str:
    """Return the instruction set that the C++ kernels use on this CPU, one of LEVELS, or "not built"."""
    kernels = library()
    return "not built" if kernels is None else list(LEVELS)[_variable(kernels, "products").value]


def restriction() -> str | None:
    """Return the instruction set that replaces the best one, or None (SENSORIUM_CPU=avx2, for debugging).

    The variable is read when the kernels are loaded and has to be set before the process starts. Every op then runs with this
    set; "newest" is that of the CPU, and `op=body,...` sets single ops (bodies.py). torch has its own switches:
    ATEN_CPU_CAPABILITY=avx2, ONEDNN_MAX_CPU_ISA=AVX2.

    Raises:
        ValueError: the variable has another value.
    """
    wanted = os.environ.get("SENSORIUM_CPU", "")
    if wanted == NEWEST or "=" in wanted:
        return None
    if wanted and wanted not in LEVELS:
        how = f"leave it unset, or set it to one of {', '.join(LEVELS)} that the CPU has, {NEWEST}, or op=body"
        raise ValueError(f"SENSORIUM_CPU={wanted[:40]!r} is unknown; {how}")
    return wanted or None


def hides_avx512() -> bool:
    """Return whether our kernels must behave as on a CPU without AVX-512 (SENSORIUM_CPU)."""
    wanted = restriction()
    return wanted is not None and LEVELS[wanted] < LEVELS["avx512"]


def has_avx512() -> bool:
    """Return whether the C++ kernels use AVX-512."""
    kernels = library()
    return kernels is not None and _variable(kernels, "level").value >= LEVELS["avx512"]


def has_vnni() -> bool:
    """Return whether torch multiplies int8 with AVX-512 VNNI."""
    return bool(torch.cpu._is_vnni_supported()) and restriction() in (None, "avx512_vnni", "avx512_bf16", "amx")


def products() -> str | None:
    """Return the instruction set of the C++ linear layers on this CPU, one of LEVELS, or None without any."""
    name = instructions()
    return None if name in ("base", "not built") else name


def obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the C++ kernels cannot run, or None."""
    if device.type != "cpu":
        return "the C++ kernels run on a CPU"
    if dtype not in _TYPES:
        return "the C++ kernels take float32 and bfloat16"
    return None if library() is not None else "the C++ kernels are not built"


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
