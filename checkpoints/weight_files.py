"""Reads the weight files of checkpoints (safetensors, GGUF, one file of torch.save): names, headers and tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..callers.errors import CheckpointError
from ..callers.heap import trim_heap
from .adapters import tensor_name
from .files import open_regular
from .folder import CheckpointFolder
from .resident import drop
from .torch_file import SAVED_SUFFIX, saved_tensors

_MAPPED_BYTES = 64 << 20
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32,
    "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
"""Names of dtypes in safetensors files."""
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LFS_POINTER = b"version https://git-lfs"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_addresses: set[int] = set()
"""Where the tensors begin that `read_file` maps at the moment."""


def read_checkpoint(folder: Path, is_unused: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors that are used, from one file or from shards; CheckpointError names a missing or broken file."""
    checkpoint = CheckpointFolder(folder)
    if checkpoint.gguf is not None:
        from .gguf.tensors import mapped_loader, read_tensors

        yield from read_tensors(checkpoint.gguf, mapped_loader())
        return
    if checkpoint.saved is not None:
        yield from ((name, tensor) for name, tensor in saved_tensors(checkpoint.saved) if not is_unused(name))
        return
    for file in checkpoint.weight_files():
        yield from read_file(file, is_unused)


def read_headers(folder: Path) -> dict[str, Tensor]:
    """Return the stored tensors by name, on the meta device, from the headers of the files; empty if the folder has no weights.

    A tensor of the index whose shard is not there has the shape `[0]`.

    Raises:
        CheckpointError: a file is broken.
    """
    checkpoint = CheckpointFolder(folder)
    if checkpoint.gguf is not None:
        from .gguf.tensors import on_meta, read_tensors

        return dict(read_tensors(checkpoint.gguf, on_meta))
    if checkpoint.saved is not None:
        return file_headers(checkpoint.saved)
    if not checkpoint.has_safetensors:
        return {}
    headers = {name: torch.empty(0, device="meta") for name in checkpoint.shards or ()}
    for file in checkpoint.weight_files():
        headers |= file_headers(file) if file.exists() else {}
    return headers


def file_headers(file: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name, on the meta device."""
    from safetensors import safe_open

    if file.suffix == SAVED_SUFFIX:
        return dict(saved_tensors(file, on_meta=True))
    with _typed_errors(file), safe_open(file, framework="pt") as tensors:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
        unknown = next((name for name, part in parts.items() if part.get_dtype() not in _DTYPES), None)
        if unknown is not None:
            kind = parts[unknown].get_dtype()
            raise CheckpointError(f"{unknown} in {file.name} holds {kind}, which is not supported; use another checkpoint")
        kinds = {name: (part.get_shape(), _DTYPES[part.get_dtype()]) for name, part in parts.items()}
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in kinds.items()}


def file_metadata(file: Path) -> dict[str, str]:
    """Return the metadata of one file."""
    from safetensors import safe_open

    with _typed_errors(file), safe_open(file, framework="pt") as tensors:
        return tensors.metadata() or {}


def read_adapter(folder: Path, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an adapter in the layout of peft, named as `layers.adapter.tensor_name` names them."""
    for stored, tensor in read_file(folder / name / ADAPTER_WEIGHTS):
        stem, cut, letter = stored.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        yield tensor_name(stem, letter, name) if cut else stored, tensor


def read_file(file: Path, is_unused: Callable[[str], bool] = lambda name: False) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one file that are used."""
    from safetensors import safe_open

    with _typed_errors(file):
        with safe_open(file, framework="pt") as tensors:
            names, size = deque(name for name in tensors.keys() if not is_unused(name)), file.stat().st_size  # noqa: SIM118
        while names:  # reopen the file every _MAPPED_BYTES, so that pages that were read leave memory
            with safe_open(file, framework="pt") as tensors:
                read = 0
                while names and read < _MAPPED_BYTES:
                    name, left = names.popleft(), file.stat().st_size
                    if left < size:  # reading mapped pages beyond the end of the file would kill the process
                        raise CheckpointError(f"{file} was cut from {size} to {left} bytes while it was read; load it again")
                    tensor = _channels_first(name, tensors)
                    read += tensor.nbytes
                    with _mapped(tensor):
                        yield name, tensor
                    del tensor
            trim_heap()


def rename(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """Replace the first prefix that matches."""
    return next((new + name[len(old) :] for old, new in prefixes if name.startswith(old)), name)


@contextmanager
def _mapped(tensor: Tensor) -> Iterator[None]:
    """Let `drop_pages` know inside the context that the tensor lies in a mapped file."""
    address = tensor.untyped_storage().data_ptr()
    _addresses.add(address)
    try:
        yield
    finally:
        _addresses.discard(address)


def drop_pages(tensor: Tensor) -> None:
    """Take the pages of a whole tensor of `read_file` out of this process's memory. Other tensors are left as they are."""
    storage = tensor.untyped_storage()
    if storage.data_ptr() in _addresses and storage.nbytes() == tensor.nbytes:
        drop(storage.data_ptr(), storage.nbytes())


def read_file_rows(file: Path, name: str, rows: Sequence[int]) -> Tensor:
    """Return rows of one tensor, without reading the others."""
    from safetensors import safe_open

    with _typed_errors(file), safe_open(file, framework="pt") as tensors:
        part = tensors.get_slice(name)
        return torch.cat([part[row : row + 1] for row in rows])


def _channels_first(name: str, tensors: Any) -> Tensor:
    """Return a tensor of an open file. MLX's weights of convolutions, `[out, *kernel, in]`, become `[out, in, *kernel]`."""
    tensor: Tensor = tensors.get_tensor(name)
    if tensor.ndim < 3 or (tensors.metadata() or {}).get("format") != "mlx":
        return tensor
    if tensor.ndim == 3:
        moved = "conv" in name and tensor.shape[1] < tensor.shape[2]
    else:
        moved = name.endswith(".weight") and tensor.shape[-2] == tensor.shape[-3]
    return tensor.movedim(-1, 1) if moved else tensor


@contextmanager
def _typed_errors(file: Path) -> Iterator[None]:
    """Raise CheckpointError where the file cannot be read."""
    from safetensors import SafetensorError

    try:
        open_regular(file).close()
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{file.name} is missing from {file.parent}; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error})") from None
    except SafetensorError as error:
        with file.open("rb") as opened:
            pointer = opened.read(len(_LFS_POINTER)) == _LFS_POINTER
        how = "it is a Git LFS pointer: run `git lfs pull` in its folder" if pointer else "download it again"
        raise CheckpointError(f"{file} is not readable safetensors ({error}); {how}") from None
