"""Choose the backend of each kernel by device, dtype and width. `use_backends` and SENSORIUM_KERNELS override the choice."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from . import bodies, native
from .backends import BACKENDS, onednn_packs

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


def _suggest(name: str, choices: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest match and the known names."""
    names = list(choices)
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


def implementation(op: str, device: torch.device, dtype: torch.dtype, width: int = 0) -> Any:
    """Return the module of the chosen backend, which has the op's functions."""
    return _import_backend(BACKENDS[op][backend(op, device, dtype, width)].module)


@functools.cache
def _import_backend(module: str) -> ModuleType:
    return import_module(f"..{module}", __name__)


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
    measured = _measured_backend(op, device, dtype)
    if measured is not None and can_run(op, measured, device, dtype, width):
        return measured
    return next(name for name in BACKENDS[op] if _is_fast(op, name, device, dtype) and can_run(op, name, device, dtype, width))


def _measured_backend(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return oneDNN or torch if it has been measured to be faster on this CPU than every C++ body, else None.

    Asking for the body of attention also sets its instruction set.
    """
    kind = str(dtype).removeprefix("torch.")
    attention = f"attention_{kind}"
    measured = {"linear": f"linear_{kind}", "int8_linear": "linear_int8", "attention": attention, "varlen_attention": attention}
    name = measured.get(op, "")
    chosen = bodies.body(name) if device.type == "cpu" and name in bodies.OPS else ""
    return chosen if chosen in BACKENDS[op] else None


def _is_fast(op: str, name: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a backend may be chosen without a request. On a CPU, Triton runs in its slow interpreter."""
    return dtype not in BACKENDS[op][name].slow_dtypes and (name != "triton" or device.type != "cpu")


def can_run(op: str, name: str, device: torch.device, dtype: torch.dtype, width: int = 0) -> bool:
    """Return whether this backend of the op is installed and supports the device, dtype and width."""
    return BACKENDS[op][name].obstacle(device, dtype, width) is None


def active_backends(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """Return the backend of every op on this device, for `sensorium doctor`."""
    return {op: backend(op, device, dtype) for op in BACKENDS}


def multiplies_fast(dtype: torch.dtype) -> bool:
    """Return whether linear layers in this dtype are as fast on the CPU as in float32."""
    return dtype == torch.float32 or (dtype == torch.bfloat16 and (native.products() is not None or onednn_packs(_CPU, dtype)))


def multiplies_pairs() -> bool:
    """Return whether attention on this CPU multiplies pairs of bfloat16, which takes half the time of float32."""
    return bodies.body("attention_bfloat16") in ("avx512_bf16", "amx")
