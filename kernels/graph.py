"""A forward, recorded while it runs and replayed later: a CUDA graph, and what takes its place on a CPU. Knows no model.

A decode step is a hundred short kernels, and finding the way to them through modules, views and allocations takes as long as
some of them do. A replay is nothing but the calls, on the same memory: those of `native.call` with their addresses, and
torch's own operators with their tensors. It gives the bits of the forward, since it is the same kernels on the same numbers.

What a forward asks of its inputs beyond their shapes cannot be replayed: a number read into Python, a result whose size
depends on the data, randomness. It is noticed while recording, and that forward has no graph.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import native

_log = logging.getLogger(__name__)
_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_VARYING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}


class Graph:
    """The calls of one forward, the memory they use, and where its result is."""

    def __init__(self, calls: Sequence[Callable[[], object]], memory: Sequence[object], result: Tensor) -> None:
        self.calls, self._memory, self._result = tuple(calls), tuple(memory), result

    def replay(self) -> Tensor:
        """Run it on what its inputs hold now. The result is overwritten by the next replay."""
        for call in self.calls:
            call()
        return self._result


class Watched(Sequence[int]):
    """Numbers that are others in the next step: whoever looks at them is noticed."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values, self.seen = values, False

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        self.seen = True
        return self._values[index]

    def __iter__(self) -> Iterator[int]:
        self.seen = True
        return iter(self._values)


class CudaGraph:
    """A forward as a GPU's driver keeps it. `replay` as that of Graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph, self._result = graph, result

    def replay(self) -> Tensor:
        self._graph.replay()
        return self._result


def capture_cuda(forward: Callable[[], Tensor], pool: Any) -> tuple[Tensor, CudaGraph | None]:
    """As `capture`, on a GPU; `pool`: memory that graphs share which never run at the same time (`graph_pool_handle`).

    The forward runs once as it is, since what compiles or allocates on first use cannot be recorded.
    """
    result, graph = forward(), torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            kept = forward()
    except RuntimeError:  # it asked for a number, or for memory that is not there
        _log.warning("decode steps of this shape are not recorded", exc_info=True)
        return result, None
    return result, CudaGraph(graph, kept)


def capture(forward: Callable[[], Tensor], watched: Sequence[Watched] = ()) -> tuple[Tensor, Graph | None]:
    """Run `forward` once; its result, and its graph, None if it cannot be replayed.

    Its inputs must be written in place before a replay. Memory that a part of it has done with is used again by later ones,
    so the graph holds about as much as the forward does.
    """
    recorder, reads = _Recorder(), _Reads()
    with native.recording(recorder.native), reads, recorder:
        result = forward()
    if recorder.varies or reads.seen or any(values.seen for values in watched):
        return result, None
    return result, Graph(recorder.calls, recorder.memory(), result)


class _Reads(TorchFunctionMode):
    """Notices tensors that are read in Python past torch's dispatcher."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func in _READS
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Keeps native calls and operators in order; allocations are served from what earlier tensors left behind."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.varies = False
        self._given: dict[int, Tensor] = {}  # by address: tensors that were there before, as weights are
        self._made: dict[int, tuple[Tensor, list[weakref.ref[Tensor]]]] = {}  # by address: memory, and who looks at it

    def memory(self) -> list[object]:
        return [*self._given.values(), *(memory for memory, _ in self._made.values())]

    def native(self, call: Callable[[], object], tensors: Sequence[Tensor]) -> None:
        """Of `native.call`, which holds addresses only."""
        self.calls.append(call)
        for tensor in tensors:
            if _address(tensor) not in self._made:
                self._given[tensor.data_ptr()] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        there = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _address(leaf) not in there]
        if func in _ALLOCATIONS:
            return self._allocate(result)
        self.varies |= _varies(func, args)
        if fresh or func._schema.is_mutable:
            self.calls.append(partial(_again, func, args, kwargs, fresh) if fresh else partial(func, *args, **kwargs))
        for leaf in fresh:
            self._made[_address(leaf)] = (leaf.detach(), [])
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _address(leaf) in self._made:
                self._made[_address(leaf)][1].append(weakref.ref(leaf))
        return result

    def _allocate(self, like: Tensor) -> Tensor:
        """The same tensor in memory that nobody looks at any more, if there is some of its size."""
        size = like.untyped_storage().nbytes()
        for memory, users in self._made.values():
            if memory.untyped_storage().nbytes() == size and all(user() is None for user in users):
                users[:] = [weakref.ref(like.set_(memory.untyped_storage(), 0, like.shape, like.stride()))]
                return like
        self._made[_address(like)] = (like.detach(), [weakref.ref(like)])
        return like


def _address(tensor: Tensor) -> int:
    """Of all the memory that the tensor is a part of; 0 for none, and for the packed weights of oneDNN."""
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _varies(func: Any, args: Any) -> bool:
    """Whether its result's size, or its numbers, are others the next time. An index has the size of a mask's ones only."""
    if func is _aten.index.Tensor:
        return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor))
    return bool(_VARYING.intersection(func.tags))


def _again(func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
    """Compute once more into the tensors that were made before."""
    for to, leaf in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
        to.copy_(leaf)
