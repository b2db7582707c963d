"""Reads the weights of an update: pairs of names and tensors, or safetensors files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from ...callers.errors import CheckpointError, InputError, short_repr, typed
from ...checkpoints.weight_files import read_file

SharedHandle = tuple[Callable[..., Tensor], tuple[Any, ...]]
"""A handle of shared memory: the result of `torch.multiprocessing.reductions.reduce_tensor` in another process."""
WeightsSource = Iterable[tuple[str, Tensor | SharedHandle]] | Mapping[str, Tensor | SharedHandle] | str | os.PathLike[str]
_REBUILD = (reductions.rebuild_tensor, reductions.rebuild_cuda_tensor)
UpdateMode = Literal["wait", "abort", "pause", "restart"]
KEEPS_REQUESTS: frozenset[UpdateMode] = frozenset(("pause", "restart"))
"""Modes in which requests go on after the update."""


def read_update(weights: WeightsSource) -> dict[str, Tensor]:
    """Return copies of the tensors on the host, by name.

    Args:
        weights: pairs of a name and a tensor, a mapping, or the path of a safetensors file or of a folder with such files. A
            `SharedHandle` may stand for a tensor.

    Raises:
        InputError: another form, a name that is given twice, or nothing.
        CheckpointError: a file cannot be read, or a tensor holds other numbers than finite ones of 16 or 32 bits.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in _pairs(weights):
        tensor = _open_handle(name, value)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            reason = f"<<param>> must be pairs of a name and a tensor, not {typed(name)} and {typed(tensor)}"
            raise InputError(reason, code="invalid_value", param="weights")
        if name in tensors:
            raise InputError(f"<<param>> holds {short_repr(name)} twice", code="invalid_value", param="weights")
        if not tensor.is_floating_point() or tensor.itemsize == 1:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise CheckpointError(f"{name} of the update holds {kind}; it must hold floating-point numbers of 16 or 32 bits")
        with torch.inference_mode(False):
            tensors[name] = tensor.detach().to("cpu", copy=True)
        if not tensors[name].isfinite().all():
            raise CheckpointError(f"{name} of the update holds NaN or infinity")
    if not tensors:
        raise InputError("<<param>> holds no tensors", code="invalid_value", param="weights")
    return tensors


def check_mode(mode: object) -> None:
    if mode not in get_args(UpdateMode):
        reason = f"<<param=>>{short_repr(mode)} must be one of {', '.join(get_args(UpdateMode))}"
        raise InputError(reason, code="invalid_value", param="mode")


def _pairs(weights: object) -> Iterable[tuple[object, object]]:
    if isinstance(weights, str | os.PathLike):
        return ((name, tensor) for file in _files(weights) for name, tensor in read_file(file))
    if isinstance(weights, Mapping):
        return weights.items()
    if not isinstance(weights, Iterable):
        reason = f"<<param>> must be pairs of a name and a tensor, or a path, not {typed(weights)}"
        raise InputError(reason, code="invalid_value", param="weights")
    return (entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None) for entry in weights)


def _open_handle(name: object, value: object) -> object:
    """Return the tensor of a handle of shared memory, other values unchanged. Raise InputError if it cannot be opened."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], tuple):
        return value
    if not any(value[0] is rebuild for rebuild in _REBUILD):
        return value
    try:
        _check_storage(name, value)
        return value[0](*value[1])
    except InputError:
        raise
    except Exception as error:  # torch raises errors of many classes here, AssertionError without CUDA
        reason = f"<<param>> holds a handle of shared memory that cannot be opened ({error})"
        raise InputError(reason, code="invalid_value", param="weights") from None


def _check_storage(name: object, handle: Any) -> None:
    """Raise InputError if the memory of a handle is smaller than its tensor: torch would make ordinary memory larger."""
    if handle[0] is reductions.rebuild_tensor:
        _, storage, (offset, shape, strides, *_) = handle[1]
        has, itemsize = storage._untyped_storage.nbytes(), storage.dtype.itemsize
    else:
        _, shape, strides, offset, _, dtype, _, _, has, *_ = handle[1]
        itemsize = dtype.itemsize
    last = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    needs = (last + 1) * itemsize if 0 not in shape else 0
    if needs > has:
        reason = f"<<param>> holds a handle of {short_repr(name)} whose tensor needs {needs} bytes, but its memory has {has}"
        raise InputError(reason, code="invalid_value", param="weights", limit=has, value=needs)


def _files(path: str | os.PathLike[str]) -> list[Path]:
    name = os.fspath(path)
    if not isinstance(name, str) or "\0" in name:
        raise InputError(f"<<param>> must be a path, not {short_repr(path)}", code="invalid_value", param="weights")
    place = Path(name)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files or not all(file.is_file() and file.suffix == ".safetensors" for file in files):
        reason = f"{short_repr(name)} is neither a safetensors file nor a folder with such files"
        raise CheckpointError(f"{reason}; pickles are never read")
    return files
