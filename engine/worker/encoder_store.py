"""Stores encoder rows by the hash of their item: on the device until the scheduler frees them, and optionally in connectors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...kernels import bodies, native
from ...kernels.dispatch import active_backends
from ...mm.hashing import digest
from ..connectors.interface import Connector
from ..connectors.packing import PackedSpec
from ..connectors.tensor_store import TensorStore
from ..stats import TransferStats

_FORMAT = 3
_ROWS = "rows"  # the name of an item's tensor
_ROOT, _CODE = Path(__file__).parents[2], ("checkpoints", "kernels", "mm", "models", "processors")  # code that computes rows


class EncoderStore:
    """Encoder rows by hash and, with `connectors`, copies of them that other processes can load.

    A copy holds one item's rows. Its key is the item's hash, which includes the tenant's salt, in a namespace of everything
    else that rows depend on. A connector that fails costs a warning and an encoder call, never an error.

    Args:
        connectors: they are asked in order, and closed with the store.
        fingerprint: hash of the weights and their quantisation. The namespace also depends on sensorium's code and the backend
            of every op.
        width, dtype: width and dtype of a row; copies with another width or dtype count as damaged.
    """

    def __init__(
        self,
        connectors: Sequence[Connector],
        fingerprint: str,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rows: dict[str, Tensor] = {}  # hash -> [rows, width]
        self.dtype = dtype
        self.width, self._device = width, device
        self.tensors: TensorStore | None = None
        if connectors:
            namespace = digest("sensorium.rows", _FORMAT, fingerprint, str(dtype), width, *versions(device, dtype))
            self.tensors = TensorStore("encoder rows", namespace, connectors)

    @property
    def row_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @property
    def stats(self) -> tuple[TransferStats, ...]:
        return () if self.tensors is None else self.tensors.stats

    def put(self, key: str, rows: Tensor, write: bool = True) -> None:
        """Keep `[n, width]` rows until `drop`. With `write`, rows of the store's width and dtype are saved later."""
        self.rows[key] = rows
        if self.tensors is not None and write and self.fits(rows):
            self.tensors.put(key, {_ROWS: rows})

    def load(self, key: str, num_rows: int) -> Tensor | None:
        """Load `[num_rows, width]` from a connector and keep them as `put` does; None if there is no valid copy."""
        if self.tensors is None:
            return None
        found = self.tensors.get(key, {_ROWS: PackedSpec((num_rows, self.width), self.dtype)})
        if found is None:
            return None
        self.rows[key] = found.tensors[_ROWS].to(self._device)
        return self.rows[key]

    def drop(self, keys: Iterable[str]) -> None:
        """Drop rows from the device; copies stay. Unknown keys are ignored."""
        for key in keys:
            self.rows.pop(key, None)

    def clear(self) -> None:
        """Drop all rows, once pending ones are written."""
        self.flush()
        self.rows.clear()

    def drop_folder(self) -> None:
        """Use no connectors from now on, once pending rows are written."""
        self.close()
        self.tensors = None

    def flush(self) -> None:
        """Wait until pending rows are written."""
        if self.tensors is not None:
            self.tensors.flush()

    def close(self) -> None:
        """Write pending rows and end the thread. `put` must not be called afterwards."""
        if self.tensors is not None:
            self.tensors.close()

    def fits(self, rows: Tensor) -> bool:
        """Return whether rows have the store's width and dtype."""
        return rows.ndim == 2 and rows.shape[1] == self.width and rows.dtype == self.dtype


def versions(device: torch.device, dtype: torch.dtype) -> tuple[object, ...]:
    """Return what the bits of computed rows and of keys and values depend on besides model and input."""
    return code_digest(_ROOT), active_backends(device, dtype), torch.__version__, _hardware(device)


@functools.cache
def code_digest(root: Path) -> str:
    """Hash the code below `root` that computes rows, compiled kernels included."""
    files = (path for room in _CODE for path in (root / room).rglob("*") if path.suffix in (".py", ".so"))
    return digest("sensorium.code", {path.relative_to(root).as_posix(): path.read_bytes() for path in files})


def _hardware(device: torch.device) -> str:
    """Return the kind of processor: rows differ in their last bits between kinds."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.backends.cpu.get_cpu_capability()} {native.instructions()} {' '.join(bodies.bodies_in_use())}"
