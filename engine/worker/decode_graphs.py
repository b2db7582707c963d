"""Records the forward pass of decode steps and replays it: as kernel calls on a CPU, as a CUDA graph on a GPU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.backends import interpreted
from ...kernels.graph import CallGraph, CaptureFailed, WatchedInts, capture, capture_cuda, capture_pool
from ...kernels.metadata import AttentionMetadata
from ...models.interface import ForwardBatch, Model, StepLimits

Forward = Callable[[ForwardBatch], Tensor]
_Key = tuple[object, ...]
_Run = tuple[Tensor, CallGraph[Tensor] | None]
_BATCH_SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))  # sizes that batches are padded to on a GPU
_MAX_GRAPHS = 64  # on a GPU
_ROW_INPUT_BYTES = 128  # token, positions, slots and length of a row


@dataclass(frozen=True)
class CaptureConfig:
    """The recording settings of a device.

    Args:
        batch_sizes: sizes that batches are padded to; None gives every size its own graph.
        max_rows: larger batches are not recorded, since launching their kernels takes a small part of their time.
        max_graphs: number of graphs to keep; the least recently used one is dropped first.
        record: runs a forward, and returns its result and its graph, or None if it cannot be replayed.
    """

    batch_sizes: Sequence[int] | None
    max_rows: int
    max_graphs: int
    record: Callable[[Callable[[], Tensor], Sequence[AttentionMetadata]], _Run]


def _record_on_cpu(forward: Callable[[], Tensor], groups: Sequence[AttentionMetadata]) -> _Run:
    return capture(forward, [cast(WatchedInts, attn.seq_lens) for attn in groups])


def capture_config(device: torch.device) -> CaptureConfig:
    if device.type == "cpu":
        return CaptureConfig(None, 64, 4, _record_on_cpu)
    pool = capture_pool(device)
    return CaptureConfig(_BATCH_SIZES, _BATCH_SIZES[-1], _MAX_GRAPHS, lambda forward, _: capture_cuda(forward, pool))


def graph_bytes(model: Model, seqs: int, groups: int, blocks: int, work: StepLimits) -> int:
    """Return the maximum bytes that graphs hold on a GPU: inputs and results of each, and the memory they all share.

    Args:
        seqs: maximum number of sequences of a step.
        groups: number of cache groups; each has its own block tables.
        blocks: number of blocks of the longest sequence.
    """
    if work.device.type == "cpu":
        return 0
    sizes = [size for size, smaller in zip(_BATCH_SIZES, (0, *_BATCH_SIZES), strict=False) if smaller < seqs]
    widths = [1 << power for power in range((blocks - 1).bit_length() + 1)]
    row = model.hidden_size * model.cache_specs[0].dtype.itemsize + _ROW_INPUT_BYTES
    sizes_of_graphs: list[int] = sorted((size * (4 * groups * width + row) for size in sizes for width in widths), reverse=True)
    return sum(sizes_of_graphs[:_MAX_GRAPHS]) + model.forward_bytes(replace(work, rows=min(work.rows, sizes[-1])))


class DecodeGraphs:
    """Runs the forward pass of each step, and records and replays those of decode steps.

    The second of two successive steps of the same shape is recorded; later ones replay it. Steps with prompt or encoder rows,
    and forward passes that cannot be replayed, run eagerly.
    """

    def __init__(self, device: torch.device, config: CaptureConfig | None = None) -> None:
        self._config = config or capture_config(device)
        self._graphs: OrderedDict[_Key, _DecodeGraph | None] = OrderedDict()  # None: it cannot be replayed
        self._last: _Key | None = None

    def __call__(self, forward: Forward, batch: ForwardBatch, adapters: int = 0) -> Tensor:
        """Return `forward(batch)`. The result may be overwritten by the next call.

        `adapters`: address of the table of the step's adapters (`StepTable`); 0: it has none.
        """
        last, self._last = self._last, self._key(forward, batch, adapters)
        key = self._last
        if key is None:
            return forward(batch)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            graph = self._graphs[key]
            return forward(batch) if graph is None else graph.replay(batch)
        if key != last:
            return forward(batch)
        result, self._graphs[key] = self._record(forward, batch)
        if len(self._graphs) > self._config.max_graphs:
            self._graphs.popitem(last=False)
        return result

    def _key(self, forward: Forward, batch: ForwardBatch, adapters: int) -> _Key | None:
        """Return what a graph depends on: everything except lengths and the values in tensors. None if it runs eagerly."""
        rows, groups = len(batch.input_ids), _groups(batch)
        if rows > self._config.max_rows or batch.embed_index is not None or batch.cross_rows is not None or interpreted():
            return None
        if batch.captures or batch.hidden_captures:
            return None
        if not all(len(attn.seq_lens) == rows for attn in groups):
            return None
        size = self._size(rows)
        parts = [(_width(attn), *_fixed(attn, _PARTS, rows, size)) for attn in groups]
        return forward, adapters, id(batch.kv_caches), torch.get_num_threads(), *_fixed(batch, _INPUTS, rows, size), *parts

    def _size(self, rows: int) -> int:
        """Return the size that a batch of `rows` rows is padded to."""
        return rows if self._config.batch_sizes is None else next(size for size in self._config.batch_sizes if size >= rows)

    def _record(self, forward: Forward, batch: ForwardBatch) -> tuple[Tensor, _DecodeGraph | None]:
        rows, size = len(batch.input_ids), self._size(len(batch.input_ids))
        groups = {id(attn): _static_metadata(attn, size, watched=self._config.batch_sizes is None) for attn in batch.attn}
        inputs = replace(batch, attn=[groups[id(attn)] for attn in batch.attn], **_copies(batch, _INPUTS, rows, size))
        static = tuple(groups.values())
        for to, attn in zip(static, _groups(batch), strict=True):
            _fill_group(to, attn)
        try:
            result, graph = self._config.record(partial(forward, inputs), static)
        except CaptureFailed as failed:
            result, graph = failed.result, None
        return result[:rows], None if graph is None else _DecodeGraph(graph, inputs, static)


@dataclass(frozen=True, kw_only=True)
class _StaticMetadata(AttentionMetadata):
    """Attention metadata of a graph. Its tensors, including `lengths` `[rows]`, are written again before each replay."""

    lengths: Tensor

    @cached_property
    def cpu_starts_and_lens(self) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.query_start_loc), self.lengths

    @cached_property
    def device_starts_and_lens(self) -> tuple[Tensor, Tensor]:
        return self.on_device(torch.tensor(self.query_start_loc, dtype=torch.int32)), self.lengths


@dataclass(frozen=True, eq=False)
class _DecodeGraph:
    """A recorded step and the tensors that it reads."""

    graph: CallGraph[Tensor]
    inputs: ForwardBatch
    groups: tuple[_StaticMetadata, ...]

    def replay(self, batch: ForwardBatch) -> Tensor:
        _fill(self.inputs, batch, _INPUTS)
        for to, attn in zip(self.groups, _groups(batch), strict=True):
            _fill_group(to, attn)
        return self.graph.replay()[: len(batch.input_ids)]


_INPUTS = tuple(f.name for f in fields(ForwardBatch) if f.name not in ("attn", "kv_caches"))
_PARTS = tuple(f.name for f in fields(AttentionMetadata) if f.name not in ("query_start_loc", "seq_lens", "block_tables"))


def _fixed(part: ForwardBatch | AttentionMetadata, names: Sequence[str], rows: int, size: int) -> list[object]:
    """Return the values of these fields, with the padded shape in place of each tensor."""
    values = [getattr(part, name) for name in names]
    return [_padded_shape(value.shape, rows, size) if isinstance(value, Tensor) else value for value in values]


def _padded_shape(shape: Sequence[int], rows: int, size: int) -> tuple[int, ...]:
    """Pad the last axis if it has one entry per row. The slots of cross-attention do not."""
    return (*shape[:-1], size) if shape[-1] == rows else tuple(shape)


def _groups(batch: ForwardBatch) -> Sequence[AttentionMetadata]:
    return tuple({id(attn): attn for attn in batch.attn}.values())


def _width(attn: AttentionMetadata) -> int:
    """Return the width of the block tables, rounded up to a power of two so that growing sequences seldom change it."""
    return 1 << (attn.block_tables.shape[1] - 1).bit_length()


def _static_metadata(attn: AttentionMetadata, size: int, watched: bool) -> _StaticMetadata:
    """Make the metadata that a graph of `size` rows reads.

    Args:
        watched: `seq_lens` notices when a forward pass reads it in Python, which cannot be replayed. Otherwise it holds the
            longest lengths that the tables have room for.
    """
    width, rows = _width(attn), len(attn.seq_lens)
    lengths = WatchedInts(attn.seq_lens) if watched else (width * attn.block_size,) * size
    dtype = torch.int64 if attn.block_tables.device.type == "cpu" and watched else torch.int32
    return _StaticMetadata(
        query_start_loc=tuple(range(size + 1)),
        seq_lens=cast(tuple[int, ...], lengths),
        block_tables=attn.block_tables.new_zeros(size, width),
        lengths=torch.zeros(size, dtype=dtype, device=attn.block_tables.device),
        **_copies(attn, _PARTS, rows, size),
    )


def _copies(part: ForwardBatch | AttentionMetadata, names: Sequence[str], rows: int, size: int) -> dict[str, Any]:
    """Return the values of these fields, with padded copies of tensors. Other values are the same in all steps of the key."""
    values = {name: getattr(part, name) for name in names}
    return {name: _padded(value, name, rows, size) if isinstance(value, Tensor) else value for name, value in values.items()}


def _padded(value: Tensor, name: str, rows: int, size: int) -> Tensor:
    """Return a copy with padding rows: token 0 at position 0, with slot -1, so that nothing is written."""
    more = _padded_shape(value.shape, rows, size)[-1] - value.shape[-1]
    return F.pad(value, (0, more), value=_PADDING.get(name, 0)).clone()


_PADDING = {"slot_mapping": -1}


def _fill(to: object, part: object, names: Sequence[str]) -> None:
    for name in names:
        value = getattr(part, name)
        if isinstance(value, Tensor):
            _write(getattr(to, name), value, _PADDING.get(name, 0))


def _write(to: Tensor, value: Tensor, rest: int) -> None:
    """Write the first numbers of the last axis, and `rest` behind them."""
    rows = value.shape[-1]
    to[..., :rows].copy_(value)
    if rows < to.shape[-1]:
        to[..., rows:].fill_(rest)


def _fill_group(to: _StaticMetadata, attn: AttentionMetadata) -> None:
    """Write a step's metadata. Table entries beyond this step's are not written, because they are not read."""
    _fill(to, attn, _PARTS)
    rows, width = attn.block_tables.shape
    to.block_tables[:rows, :width].copy_(attn.block_tables)
    _write(to.lengths, attn.cpu_starts_and_lens[1] if to.lengths.dtype == torch.int64 else attn.device_starts_and_lens[1], 0)
