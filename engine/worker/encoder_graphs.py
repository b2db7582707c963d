"""Records small encoder calls as CUDA graphs and replays them."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ...callers.errors import is_out_of_memory
from ...kernels.backends import interpreted
from ...kernels.graph import CallGraph, CaptureFailed, capture_cuda, capture_pool
from ...models.interface import Model, StepLimits

Rows = list[Tensor]
Encode = Callable[[str, Mapping[str, Any]], Rows]
Record = Callable[[Callable[[], Rows], Sequence[Tensor]], tuple[Rows, CallGraph[Rows] | None]]
"""Runs an encoder call, given the tensors that are the same in every replay, and returns its rows and its graph, if any."""

MAX_ROWS = 1536  # encoder rows of a recorded call, such as 30 s of audio; in larger ones, launching kernels costs little
MAX_GRAPHS = 16
_NUM_RECENT = 64  # calls that are remembered
_log = logging.getLogger(__name__)


def graph_bytes(model: Model, called: Mapping[str, int], work: StepLimits) -> int:
    """Return the maximum bytes that graphs hold: inputs and results of each, and the memory they all share.

    Args:
        called: maximum encoder rows of a call, by modality.
    """
    if work.device.type == "cpu" or not model.recordable:
        return 0
    size = model.row_size * model.cache_specs[0].dtype.itemsize
    rows = {modality: min(most, MAX_ROWS) for modality, most in called.items()}
    input_bytes = max((model.input_bytes(modality, n) + n * size for modality, n in rows.items()), default=0)
    return MAX_GRAPHS * input_bytes + max((model.encoder_bytes(modality, n, work) for modality, n in rows.items()), default=0)


class EncoderGraphs:
    """Runs encoder calls. On a GPU it records and replays small ones, whose time is mostly spent on launching kernels.

    A call that matches a recent one is recorded, and later matching calls replay the graph. Calls match if their tensors on the
    device have the same shapes and their tensors on the host, such as grids, have the same values. Modalities that cannot be
    replayed run eagerly. If recording ran out of memory, it is tried again later. Graphs share memory, so calls must run one
    after another on the device.

    Args:
        record: for tests. By default nothing is recorded on a CPU, where launching is cheap.
    """

    def __init__(self, device: torch.device, record: Record | None = None) -> None:
        self._device, self._record = device, record
        if record is None and device.type == "cuda":
            pool = capture_pool(device)
            self._record = lambda encode, _: capture_cuda(encode, pool)
        self._graphs: OrderedDict[Hashable, _EncoderGraph] = OrderedDict()
        self._recent: deque[Hashable] = deque(maxlen=_NUM_RECENT)
        self._eager: set[str] = set()  # modalities that cannot be replayed

    def __call__(self, encode: Encode, modality: str, tensors: Mapping[str, Any]) -> Rows:
        """Return `encode(modality, tensors)`. Later calls do not overwrite the rows."""
        if self._record is None or modality in self._eager or interpreted():
            return encode(modality, tensors)
        key = (modality, torch.get_num_threads(), encode, *map(self._signature, tensors.items()))
        if not _hashable(key):
            return encode(modality, tensors)
        graph, again = self._graphs.get(key), key in self._recent
        if graph is not None:
            self._recent.append(key)
            self._graphs.move_to_end(key)
            return graph.replay(self._inputs(tensors))
        if again and self._has_room():
            self._recent.append(key)
            return self._record_call(key, encode, modality, tensors)
        rows = encode(modality, tensors)
        if sum(map(len, rows)) <= MAX_ROWS:
            self._recent.append(key)
        return rows

    def _has_room(self) -> bool:
        """Return whether a graph may be added. The least recently used one makes room unless a recent call replayed it."""
        if len(self._graphs) == MAX_GRAPHS and next(iter(self._graphs)) not in self._recent:
            self._graphs.popitem(last=False)
        return len(self._graphs) < MAX_GRAPHS

    def _record_call(self, key: Hashable, encode: Encode, modality: str, tensors: Mapping[str, Any]) -> Rows:
        assert self._record is not None
        # inputs are written before each replay
        copied = tree_map(lambda leaf: leaf.clone() if self._is_input(leaf) else leaf, dict(tensors))
        fixed = [leaf for leaf in tree_leaves(copied) if isinstance(leaf, Tensor) and not self._is_input(leaf)]
        try:
            rows, graph = self._record(partial(encode, modality, copied), fixed)
        except CaptureFailed as failed:
            if is_out_of_memory(failed):
                self._recent.clear()  # so that not every call tries again
                return cast(Rows, failed.result)
            rows, graph = failed.result, None
        except RuntimeError as error:  # the encoder failed, or an operator cannot be recorded
            if is_out_of_memory(error):
                raise
            rows, graph = encode(modality, tensors), None
        if graph is None:
            _log.warning(
                "encoder calls for %s are not recorded: they read tensors on the host, or wait for the device", modality
            )
            self._eager.add(modality)
            return rows
        self._graphs[key] = _EncoderGraph(graph, tuple(self._inputs(copied)))
        return [part.clone() for part in rows]

    def _signature(self, value: Any) -> Hashable:
        """Return the part of the graph key for one value; matching calls have equal parts."""
        if isinstance(value, tuple | list):
            return type(value), *map(self._signature, value)
        if not isinstance(value, Tensor):
            return type(value), value
        numbers = None if self._is_input(value) else value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return value.shape, value.dtype, numbers

    def _is_input(self, leaf: object) -> bool:
        """Return whether a leaf is a tensor whose values may differ between replays: any on a GPU; on a CPU, float ones."""
        if not isinstance(leaf, Tensor) or leaf.device.type != self._device.type:
            return False
        return leaf.device.type != "cpu" or leaf.is_floating_point()

    def _inputs(self, tensors: Mapping[str, Any]) -> Iterator[Tensor]:
        return (leaf for leaf in tree_leaves(list(tensors.values())) if self._is_input(leaf))


@dataclass(frozen=True, eq=False)
class _EncoderGraph:
    """A recorded call and the tensors that it reads."""

    graph: CallGraph[Rows]
    inputs: tuple[Tensor, ...]

    def replay(self, inputs: Iterator[Tensor]) -> Rows:
        for to, tensor in zip(self.inputs, inputs, strict=True):
            to.copy_(tensor)
        return [rows.clone() for rows in self.graph.replay()]


def _hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
