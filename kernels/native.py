"""The C++ kernels: found beside this file if the build could compile them, called through plain C. Knows no model.

Pointers, strides in elements and sizes go over; the threads are torch's own. Without the library every op runs in torch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
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
        *(_I, _N, _P, _N, _I),
    ),
    "varlen_attention": (_I, _P, _N, _P, _N, _P, _N, _P, _N, _N, _N, _F, _P, _P, _N, _I),
    "norm": (_I, _P, _P, _P, _P, _N, _N, _F, _F, _I),
    "norm_heads": (_I, _P, _N, _P, _N, _N, _N, _F, _F, _I),
    "rotate": (_I, _P, _N, _N, _P, _P, _N, _N, _N, _I, _I),
    "activation": (_I, _I, _P, _P, _N, _I),
    "gated": (_I, _I, _P, _P, _N, _N, _I),
    "linear": (_I, _P, _N, _P, _P, _N, _N, _P, _I),
    "int8_linear": (_I, _P, _N, _N, _P, _P, _P, _P, _N, _N, _P, _P, _I),
}
"""Argument types of each function of kernels/cpu."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where there are none, or none that this system can load."""
    for path in sorted(Path(__file__).parent.glob("_native*.so")):
        try:
            found = ctypes.CDLL(str(path))
            for name, types in _SIGNATURES.items():
                function = getattr(found, f"sensorium_{name}")
                function.argtypes, function.restype = types, None
        except (OSError, AttributeError):  # made for another system, or from other sources
            continue
        return found
    return None


def available(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in _TYPES and library() is not None


@functools.cache
def _function(name: str) -> Any:
    return getattr(library(), f"sensorium_{name}")


def call(name: str, dtype: torch.dtype, *args: int | float | Tensor | None) -> None:
    """Run a kernel; a tensor goes over as the address of its first element, the number of threads is added."""
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
    """Inside, in this thread, `record` is given every call after it was made, ready to be made again, and its tensors."""
    _local.record = record
    try:
        yield
    finally:
        _local.record = None


def rows(x: Tensor) -> Tensor:
    """`x [rows, heads, dim]` with the numbers of each row end to end; rows may be apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
