"""Tensors as bytes: safetensors with the key and a checksum of the content in the header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

_MAX_HEADER = 4096  # bytes of the header, at most


@dataclass(frozen=True)
class PackedSpec:
    """The shape and the dtype that a tensor must have."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def fits(self, tensor: Tensor) -> bool:
        return tuple(tensor.shape) == self.shape and tensor.dtype == self.dtype


@dataclass(frozen=True)
class BytesSpec:
    """A tensor of at most so many bytes: uint8 `[bytes]`."""

    num_bytes: int

    def fits(self, tensor: Tensor) -> bool:
        return tensor.ndim == 1 and tensor.dtype == torch.uint8 and tensor.nbytes <= self.num_bytes


Specs = Mapping[str, PackedSpec | BytesSpec]


def max_packed_bytes(specs: Specs) -> int:
    """Return the maximum length of what `pack` returns for such tensors."""
    return sum(spec.num_bytes for spec in specs.values()) + _MAX_HEADER


def pack(key: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of tensors, which may be on any device."""
    from safetensors.torch import save

    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save(on_host, {"key": key, "sha256": checksum(on_host)})


def unpack(key: str, data: bytes, specs: Specs) -> dict[str, Tensor]:
    """Return the tensors that `pack` packed for this key.

    Raises:
        ValueError: the bytes are damaged, are of another key, or hold other tensors than `specs`.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        is_whole = metadata["key"] == key and metadata["sha256"] == checksum(tensors)
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"the bytes are no tensors ({type(error).__name__}: {error})") from None
    if not is_whole:
        raise ValueError("the checksum or the key does not match")
    if tensors.keys() != specs.keys() or not all(specs[name].fits(tensor) for name, tensor in tensors.items()):
        shapes = ", ".join(f"{name}: {tensor.dtype} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"they are other tensors ({shapes})")
    return tensors


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of tensors on the host, by name, as hex digits."""
    state = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        state.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
