"""The adapters of requests: their tensors, read from folders in peft's layout, and the rows of a step that use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import CheckpointError, ConfigError, InputError, is_out_of_memory
from ...checkpoints.files import read_json
from ...checkpoints.merged_adapter import MergedAdapter
from ...checkpoints.weight_files import ADAPTER_WEIGHTS, file_headers, read_file
from ...models.interface import Model
from ...models.layers.row_adapter import PackedPairs, RowGroup
from ...models.request_adapters import AdaptedLayers, ShardPair, adapted_layers, content_digest
from ...processors.files import ADAPTER
from ..types import LoadedAdapter
from .batch import ScheduledSequence
from .staging import ToDevice

_PICKLE = "adapter_model.bin"


@dataclass(frozen=True, eq=False)
class _StoredAdapter:
    """An adapter as the layers read it.

    Args:
        pairs: by the number of the layer.
        encoder_identity: as in LoadedAdapter.
        changes_decoder: it has pairs of the decoder.
    """

    pairs: Mapping[int, PackedPairs]
    num_bytes: int
    encoder_identity: str
    changes_decoder: bool


class AdapterStore:
    """The adapters that are loaded, by identity.

    Args:
        capacity: bytes of all adapters.
        max_rank: largest rank of a matrix.
    """

    def __init__(self, capacity: int, max_rank: int) -> None:
        self.capacity, self.max_rank = capacity, max_rank
        self._adapters: dict[str, _StoredAdapter] = {}

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def load(self, layers: AdaptedLayers, folder: Path) -> LoadedAdapter:
        """Read the adapter of a folder. Nothing is packed again if its content is loaded already.

        Raises:
            ConfigError: a setting of the adapter, or its rank, is not supported.
            CheckpointError: a file is missing or broken, or the matrices do not fit the model.
            InputError: the loaded adapters leave too little of the capacity, or the memory is full.
        """
        try:
            return self._load(layers, folder)
        except OSError as error:
            raise CheckpointError(f"the adapter {folder} cannot be read: {error.strerror or error}") from None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = f"there is too little memory to read the adapter {folder}; unload another one, or free memory"
            raise InputError(reason, code="out_of_memory") from None

    def _load(self, layers: AdaptedLayers, folder: Path) -> LoadedAdapter:
        raw, weights = _read_config(folder), folder / ADAPTER_WEIGHTS
        planned = _shard_pairs(layers, raw, file_headers(weights))
        rank = max(len(pair.down) for pair in planned)
        if rank > self.max_rank:
            raise ConfigError(
                f"the adapter {folder} has rank {rank}, above <<param=>>{self.max_rank}; raise it", param="max_lora_rank"
            )
        pairs = _shard_pairs(layers, raw, {name: tensor.clone() for name, tensor in read_file(weights)})
        identity, size = f"lora:{content_digest(pairs)}", layers.num_bytes(pairs)
        of_encoder = [pair for pair in pairs if layers.changes_encoder(pair)]
        encoder_identity = content_digest(of_encoder) if of_encoder else ""
        if identity not in self._adapters:
            if self.num_bytes + size > self.capacity:
                raise InputError(
                    f"the adapter takes {size:,} bytes, and those in use leave {self.capacity - self.num_bytes:,} of "
                    f"{self.capacity:,}; unload another one, or raise <<param>>",
                    code="over_limit",
                    param="max_loras",
                    limit=self.capacity,
                )
            changes_decoder = len(of_encoder) < len(pairs)
            self._adapters[identity] = _StoredAdapter(layers.pack(pairs), size, encoder_identity, changes_decoder)
        return LoadedAdapter(identity, size, rank, encoder_identity)

    def unload(self, identity: str) -> None:
        self._adapters.pop(identity, None)

    def clear(self) -> None:
        self._adapters.clear()

    def encoder_pairs(self, encoder_identity: str) -> Mapping[int, PackedPairs]:
        """Return the pairs of an adapter that changes the encoder in this way. One of those is loaded."""
        adapters = self._adapters.values()
        return next(adapter.pairs for adapter in adapters if adapter.encoder_identity == encoder_identity)

    def groups(self, scheduled: Sequence[ScheduledSequence], starts: Sequence[int], to_device: ToDevice) -> list[RowGroup]:
        """Return the rows of each adapter in a step. `starts`: first row of each sequence, and the number of rows."""
        rows = dict[str, list[range]]()
        for (sequence, _), start, stop in zip(scheduled, starts, starts[1:], strict=False):
            if sequence.adapter and self._adapters[sequence.adapter].changes_decoder:
                rows.setdefault(sequence.adapter, []).append(range(start, stop))
        has_all_rows = len(rows) == 1 and sum(map(len, next(iter(rows.values())))) == starts[-1]
        return [
            RowGroup(
                None if has_all_rows else to_device(np.concatenate([np.arange(r.start, r.stop) for r in ranges])),
                self._adapters[name].pairs,
            )
            for name, ranges in rows.items()
        ]


def layers_of(model: Model) -> AdaptedLayers:
    """Return the layers that adapters of requests change. Raise InputError if the engine was made without `enable_lora`."""
    layers = adapted_layers(model)
    if layers is None:
        raise InputError("this engine takes no adapters of requests; load the model with <<param=>>True", code="unsupported",
                         param="enable_lora")  # fmt: skip
    return layers


def _read_config(folder: Path) -> Mapping[str, object]:
    if not (folder / ADAPTER).is_file():
        raise ConfigError(f"{folder} has no {ADAPTER}; give a folder as peft writes it, with {ADAPTER} and {ADAPTER_WEIGHTS}")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        has_pickle = (folder / _PICKLE).is_file()
        reason = f", and pickles ({_PICKLE}) are never read; save it as safetensors" if has_pickle else ""
        raise CheckpointError(f"{folder} has no {ADAPTER_WEIGHTS}{reason}")
    return read_json(folder / ADAPTER)


def _shard_pairs(layers: AdaptedLayers, raw: Mapping[str, object], tensors: Mapping[str, Tensor]) -> list[ShardPair]:
    wrong = next((name for name, tensor in tensors.items() if not tensor.is_floating_point() or tensor.itemsize == 1), None)
    if wrong is not None:
        kind = str(tensors[wrong].dtype).removeprefix("torch.")
        raise CheckpointError(f"the adapter's {wrong} holds {kind}; it must hold floating-point numbers of 16 or 32 bits")
    adapter = MergedAdapter(raw, tensors.items(), layers.prefixes, torch.float32)
    pairs = [part for pair in adapter.pairs(layers.stored) for part in layers.split(pair)]
    if not pairs:
        raise CheckpointError(f"the adapter's {ADAPTER_WEIGHTS} holds no matrices")
    return pairs
