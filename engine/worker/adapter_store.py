"""The adapters of requests: their tensors, read from folders in peft's layout, and the rows of a step that use them."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...callers.errors import CheckpointError, ConfigError, InputError, is_out_of_memory
from ...checkpoints.files import read_json
from ...checkpoints.merged_adapter import MergedAdapter
from ...checkpoints.weight_files import ADAPTER_WEIGHTS, file_headers, read_file
from ...models.adapter_packing import ReplacedTensor, ShardPair
from ...models.interface import Model
from ...models.layers.row_adapter import PackedAdapter, RowGroup
from ...models.request_adapters import AdaptedLayers, ModelPart, adapted_layers, change_digest, content_digest
from ...processors.files import ADAPTER
from ..types import LoadedAdapter
from .staging import ToDevice

_PICKLE = "adapter_model.bin"


@dataclass(frozen=True, eq=False)
class _StoredAdapter:
    """An adapter as the layers read it.

    Args:
        encoder_identity: as in LoadedAdapter.
        parts: those that it changes.
        called: parts in which it changes a layer by more than products of the C++ kernel; their steps are not recorded.
    """

    packed: PackedAdapter
    num_bytes: int
    encoder_identity: str
    parts: frozenset[ModelPart]
    called: frozenset[ModelPart]


class AdapterStore:
    """The adapters that are loaded, by identity.

    Args:
        capacity: bytes of all adapters.
        max_rank: largest rank of a matrix.
    """

    def __init__(self, capacity: int, max_rank: int) -> None:
        self.capacity, self.max_rank = capacity, max_rank
        self._adapters: dict[str, _StoredAdapter] = {}
        self._loading: tuple[Path, Generator[None, None, LoadedAdapter]] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(adapter.num_bytes for adapter in self._adapters.values())

    def load(
        self, layers: AdaptedLayers, folder: Path, seconds: float = math.inf, resume: bool = False
    ) -> LoadedAdapter | None:
        """Read the adapter of a folder. Nothing is packed again if its content is loaded already.

        Args:
            seconds: read for about so long, and return None if that was not enough. Steps can be computed meanwhile.
            resume: go on with the last call's folder. If it was another one, or there is none, reading begins.

        Raises:
            ConfigError: a setting of the adapter, or its rank, is not supported.
            CheckpointError: a file is missing or broken, or the matrices do not fit the model.
            InputError: the loaded adapters leave too little of the capacity, or the memory is full.
        """
        deadline = time.perf_counter() + seconds
        if not resume or self._loading is None or self._loading[0] != folder:
            self._loading = folder, self._load(layers, folder)
        (_, loading), self._loading = self._loading, None
        try:
            while True:
                next(loading)
                if time.perf_counter() >= deadline:
                    self._loading = folder, loading
                    return None
        except StopIteration as done:
            loaded: LoadedAdapter = done.value
            return loaded
        except OSError as error:
            raise CheckpointError(f"the adapter {folder} cannot be read: {error.strerror or error}") from None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = f"there is too little memory to read the adapter {folder}; unload another one, or free memory"
            raise InputError(reason, code="out_of_memory") from None

    def _load(self, layers: AdaptedLayers, folder: Path) -> Generator[None, None, LoadedAdapter]:
        """Read an adapter. Yields often; until the end, nothing else has changed."""
        raw, weights = _read_config(folder), folder / ADAPTER_WEIGHTS
        planned, tensors = yield from _read(layers, raw, file_headers(weights))
        rank = max((len(pair.down) for pair in planned), default=0)
        if rank > self.max_rank:
            raise ConfigError(
                f"the adapter {folder} has rank {rank}, above <<param=>>{self.max_rank}; raise it", param="max_lora_rank"
            )
        # The room is checked before tensors are read. Tensors that may equal the model's own are not counted.
        self._check_room(layers.num_bytes(*layers.held(planned, [part for part in tensors if not part.is_base])), self.capacity)
        stored = dict[str, Tensor]()
        for name, tensor in read_file(weights):
            stored[name] = tensor.clone()
            yield
        pairs, replaced = yield from _read(layers, raw, stored)
        replaced = layers.without_own(replaced)
        yield
        digests, of_encoder, numbers = list[str](), list[str](), list[int]()
        for change in chain[ShardPair | ReplacedTensor](pairs, replaced):
            numbers.append(change.number)
            digests.append(change_digest(change))
            if layers.is_of_encoder(change.number):
                of_encoder.append(digests[-1])
            yield
        identity, own = f"lora:{content_digest(digests)}", layers.held(pairs, replaced)
        size = layers.num_bytes(*own)
        encoder_identity = content_digest(of_encoder) if of_encoder else ""
        if identity not in self._adapters:
            self._check_room(size, self.capacity - self.num_bytes)
            packed, parts = (yield from layers.pack(*own)), layers.parts_of(numbers)
            self._check_room(size, self.capacity - self.num_bytes)
            self._adapters[identity] = _StoredAdapter(packed, size, encoder_identity, parts, layers.parts_of(packed.changes))
        embeddings = any(map(layers.is_embedding, numbers))
        return LoadedAdapter(identity, size, rank, encoder_identity, embeddings)

    def _check_room(self, size: int, room: int) -> None:
        """Raise InputError if an adapter of so many bytes does not fit into this room. `value` above `limit`: it never does."""
        if size > room:
            advice = "unload another one, or raise <<param>>" if size <= self.capacity else "raise <<param>>"
            raise InputError(
                f"the adapter takes {size:,} bytes, and {room:,} of {self.capacity:,} are free; {advice}",
                code="over_limit",
                param="max_loras",
                limit=self.capacity,
                value=size,
            )

    def cancel_loading(self) -> None:
        """Free what `load` has read so far of an adapter that is not complete."""
        self._loading = None

    def unload(self, identity: str) -> None:
        self._adapters.pop(identity, None)

    def clear(self) -> None:
        self._adapters.clear()
        self._loading = None

    def of_encoder(self, encoder_identity: str) -> PackedAdapter:
        """Return an adapter that changes the encoder in this way. One of those is loaded."""
        adapters = self._adapters.values()
        return next(adapter.packed for adapter in adapters if adapter.encoder_identity == encoder_identity)

    def are_recorded(self, part: ModelPart, names: Iterable[str]) -> bool:
        """Return whether the calls of adapters in a part of the model can be recorded and repeated with other adapters."""
        return all(part not in self._adapters[name].called for name in names if name)

    def groups(self, part: ModelPart, names: Sequence[str], counts: Sequence[int], to_device: ToDevice) -> list[RowGroup]:
        """Return the rows of each adapter in a part of the model.

        Args:
            names: the adapter of each sequence, "" for none. counts: rows of each sequence, which are in order.
        """
        rows = dict[str, list[range]]()
        starts = [0, *accumulate(counts)]
        for name, start, stop in zip(names, starts, starts[1:], strict=False):
            if name and start < stop and part in self._adapters[name].parts:
                rows.setdefault(name, []).append(range(start, stop))
        has_all_rows = len(rows) == 1 and sum(map(len, next(iter(rows.values())))) == starts[-1]
        return [
            RowGroup(
                None if has_all_rows else to_device(np.concatenate([np.arange(r.start, r.stop) for r in ranges])),
                self._adapters[name].packed,
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


def _read(
    layers: AdaptedLayers, raw: Mapping[str, object], tensors: Mapping[str, Tensor]
) -> Generator[None, None, tuple[list[ShardPair], list[ReplacedTensor]]]:
    """Return the pairs of an adapter, and the tensors that replace those of the model. Yields after each one."""
    wrong = next((name for name, tensor in tensors.items() if not tensor.is_floating_point() or tensor.itemsize == 1), None)
    if wrong is not None:
        kind = str(tensors[wrong].dtype).removeprefix("torch.")
        raise CheckpointError(f"the adapter's {wrong} holds {kind}; it must hold floating-point numbers of 16 or 32 bits")
    adapter = MergedAdapter(raw, tensors.items(), layers.prefixes, torch.float32)
    pairs, replaced = list[ShardPair](), list[ReplacedTensor]()
    for pair in adapter.pairs(layers.stored):
        pairs += layers.split(pair)
        yield
    for weight in adapter.replaced(layers.stored):
        replaced += layers.split_replaced(weight)
        yield
    if not pairs and not replaced:
        raise CheckpointError(f"the adapter's {ADAPTER_WEIGHTS} holds no matrices")
    _check_distinct((pair.weight, pair.module) for pair in pairs)
    _check_distinct({(part.name, part.module): None for part in replaced})  # rows of a tied table are two tensors
    return pairs, replaced


def _check_distinct(changes: Iterable[tuple[str, str]]) -> None:
    """Raise CheckpointError if two modules of the adapter change one weight, as a joined layer and a part of it do.

    Shards of a layer are changed at the same time.
    """
    modules = dict[str, str]()
    for weight, module in changes:
        if weight in modules:
            raise CheckpointError(f"the adapter changes one weight twice, with {modules[weight]} and {module}; leave one out")
        modules[weight] = module
