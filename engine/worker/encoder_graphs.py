"""Encoder calls that replay a recorded one: which ones may, and of how many rows. Knows no model and no item."""

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

from ..kernels.dispatch import interpreted
from ..kernels.graph import NotRecorded, Recorded, capture_cuda, capture_pool
from ..models.interface import Model, Work
from .quarantine import is_out_of_memory

Rows = list[Tensor]
Encode = Callable[[str, Mapping[str, Any]], Rows]
Record = Callable[[Callable[[], Rows], Sequence[Tensor]], tuple[Rows, Recorded[Rows] | None]]
"""An encoder call on these inputs, and the tensors among them that are the same in every replay; see `kernels.graph`."""

MOST_ROWS = 1536  # of a call, as a sound of 30 s has: beyond, its products take longer than finding the way to them
MOST_GRAPHS = 16
_REMEMBERED = 64  # calls
_log = logging.getLogger(__name__)


def graph_bytes(model: Model, called: Mapping[str, int], work: Work) -> int:
    """At most so many bytes stay with the graphs: each has its inputs and its result, what lies between is shared.

    `called`: encoder rows of one call at most, by modality.
    """
    if work.device.type == "cpu" or not model.recordable:
        return 0
    size = model.row_size * model.cache_specs[0].dtype.itemsize
    rows = {modality: min(most, MOST_ROWS) for modality, most in called.items()}
    own = max((model.input_bytes(modality, n) + n * size for modality, n in rows.items()), default=0)
    return MOST_GRAPHS * own + max((model.encoder_bytes(modality, n, work) for modality, n in rows.items()), default=0)


class EncoderGraphs:
    """Graphs of encoder calls on a GPU, where kernels of small items are over before the next is found: the last few used.

    A call like one of the last is recorded, the next like it replays that. Calls are alike whose tensors on the device have
    the same shapes, and whose tensors on the host, as grids, the same numbers. A modality that cannot be replayed stays as
    it is; a call that memory was short for is tried again later. Calls must follow one another on the device, since they
    share memory.
    """

    def __init__(self, device: torch.device, record: Record | None = None) -> None:
        """`record`: for tests; without it nothing is recorded on a CPU, whose kernels take far longer than the way to them."""
        self._device, self._record = device, record
        if record is None and device.type == "cuda":
            pool = capture_pool(device)
            self._record = lambda encode, _: capture_cuda(encode, pool)
        self._graphs: OrderedDict[Hashable, _Call] = OrderedDict()
        self._last: deque[Hashable] = deque(maxlen=_REMEMBERED)
        self._plain: set[str] = set()  # modalities that have no graphs

    def __call__(self, encode: Encode, modality: str, tensors: Mapping[str, Any]) -> Rows:
        """`encode(modality, tensors)`, by whatever way. The result is the caller's own."""
        if self._record is None or modality in self._plain or interpreted():
            return encode(modality, tensors)
        key = (modality, torch.get_num_threads(), encode, *map(self._like, tensors.items()))
        if not _hashable(key):
            return encode(modality, tensors)
        known, again = self._graphs.get(key), key in self._last
        if known is not None:
            self._last.append(key)
            self._graphs.move_to_end(key)
            return known.replay(self._inputs(tensors))
        if again and self._has_room():
            self._last.append(key)
            return self._recorded(key, encode, modality, tensors)
        rows = encode(modality, tensors)
        if sum(map(len, rows)) <= MOST_ROWS:
            self._last.append(key)
        return rows

    def _has_room(self) -> bool:
        """A graph is dropped for another only when none of the last calls replayed it."""
        if len(self._graphs) == MOST_GRAPHS and next(iter(self._graphs)) not in self._last:
            self._graphs.popitem(last=False)
        return len(self._graphs) < MOST_GRAPHS

    def _recorded(self, key: Hashable, encode: Encode, modality: str, tensors: Mapping[str, Any]) -> Rows:
        assert self._record is not None
        own = {
            name: tree_map(lambda leaf: leaf.clone() if self._varies(leaf) else leaf, value) for name, value in tensors.items()
        }
        fixed = [leaf for leaf in tree_leaves(own) if isinstance(leaf, Tensor) and not self._varies(leaf)]
        try:
            rows, graph = self._record(partial(encode, modality, own), fixed)
        except NotRecorded as failed:
            if is_out_of_memory(failed):
                self._last.clear()  # so that it is not tried in every call
                return cast(Rows, failed.result)
            rows, graph = failed.result, None
        except RuntimeError as error:  # its own, or of an operator that cannot be seen from outside
            if is_out_of_memory(error):
                raise
            rows, graph = encode(modality, tensors), None
        if graph is None:
            _log.warning("encoder calls for %s are not recorded: they read numbers, or wait for the device", modality)
            self._plain.add(modality)
            return rows
        self._graphs[key] = _Call(graph, tuple(self._inputs(own)))
        return [part.clone() for part in rows]

    def _like(self, value: Any) -> Hashable:
        """What has to be equal in calls that are alike."""
        if isinstance(value, tuple | list):
            return type(value), *map(self._like, value)
        if not isinstance(value, Tensor):
            return type(value), value
        numbers = None if self._varies(value) else value.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return value.shape, value.dtype, numbers

    def _varies(self, leaf: object) -> bool:
        """Whether it is a tensor that the device computes with; on a CPU not integers, from which the host makes its plans."""
        if not isinstance(leaf, Tensor) or leaf.device.type != self._device.type:
            return False
        return leaf.device.type != "cpu" or leaf.is_floating_point()

    def _inputs(self, tensors: Mapping[str, Any]) -> Iterator[Tensor]:
        return (leaf for leaf in tree_leaves(list(tensors.values())) if self._varies(leaf))


@dataclass(frozen=True, eq=False)
class _Call:
    """A recorded call and what it reads."""

    graph: Recorded[Rows]
    inputs: tuple[Tensor, ...]

    def replay(self, inputs: Iterator[Tensor]) -> Rows:
        for to, given in zip(self.inputs, inputs, strict=True):
            to.copy_(given)
        return [rows.clone() for rows in self.graph.replay()]


def _hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True
