"""A forward, recorded while it runs and replayed later: a CUDA graph, and what takes its place on a CPU. Knows no model.

A decode step is a hundred short kernels, and finding the way to them through modules, views and allocations takes as long as
some of them do. A replay is nothing but the calls, on the same memory: those of `native.call` with their addresses, and
torch's own operators with their tensors. It gives the bits of the forward, since it is the same kernels on the same numbers.

What a forward asks of its inputs beyond their shapes cannot be replayed: a number read into Python, a result whose size
depends on the data, randomness. It is noticed while recording, and that forward has no graph.

Nor can a GPU record a copy out of the host's memory, such as of indices that a forward works out there. What the host works
out is the same in every replay, so it is sent once, and the graph reads it where it is.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

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
_READ = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_WRITES = {_aten.index_put.default, _aten.index_put_.default}

_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd

_unended: dict[Any, torch.cuda.CUDAGraph] = {}  # by the handle of their pool

Result = TypeVar("Result")
Made = TypeVar("Made", covariant=True)


class Recorded(Protocol[Made]):
    """A forward that runs again on what its inputs hold now. The result is overwritten by the next replay."""

    def replay(self) -> Made: ...


class Graph(Generic[Result]):
    """The calls of one forward, the memory they use, and where its result is."""

    def __init__(self, calls: Sequence[Callable[[], object]], memory: Sequence[object], result: Result) -> None:
        self.calls, self._memory, self._result = tuple(calls), tuple(memory), result

    def replay(self) -> Result:
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


class CudaGraph(Generic[Result]):
    """A forward as a GPU's driver keeps it, and tables that it reads. `replay` as that of Graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, tables: Sequence[Tensor], result: Result) -> None:
        self._graph, self._tables, self._result = graph, tuple(tables), result

    def replay(self) -> Result:
        self._graph.replay()
        return self._result


@dataclass(frozen=True)
class CapturePool:
    """What graphs share that never run at the same time: memory, and the stream that they are recorded on.

    torch keeps a workspace for products by stream, and a graph writes into that of the stream it was recorded on, wherever it
    is replayed. Graphs that may run at the same time therefore need pools of their own.
    """

    handle: Any  # as of `torch.cuda.graph_pool_handle`
    stream: torch.cuda.Stream


class NotRecorded(RuntimeError):
    """A forward ran, and failed when it ran again to be recorded, of which this tells. `result`: of the first run."""

    def __init__(self, result: Any, why: str) -> None:
        super().__init__(why)
        self.result = result


def capture_pool(device: torch.device) -> CapturePool:
    """A new one, on that GPU."""
    return CapturePool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


def capture_cuda(forward: Callable[[], Result], pool: CapturePool) -> tuple[Result, CudaGraph[Result] | None]:
    """As `capture`, on a GPU; NotRecorded where only recording fails.

    The forward runs once as it is, since what compiles or allocates on first use cannot be recorded.
    """
    if pool.handle in _unended:
        return forward(), None
    from .gpu.upload import keeping

    sent = Sent()
    with _Reads(_on_host) as reads, sent:
        result = forward()
    if sent.varies or reads.seen:
        return result, None
    sent.again, graph = True, torch.cuda.CUDAGraph()
    try:
        with keeping() as tables, _recording(graph, pool), sent:
            kept = forward()
    except RuntimeError as error:  # it waits for the device in a way that is not noticed, or there is no memory left
        _log.warning("a forward is not recorded", exc_info=True)
        _end(graph, pool)
        raise NotRecorded(result, str(error)) from error
    return result, CudaGraph(graph, [*sent.used, *tables.values()], kept)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: CapturePool) -> Iterator[None]:
    """As `torch.cuda.graph`, which leaves its stream the current one where the recording cannot be ended."""
    before = torch.cuda.current_stream(pool.stream.device)
    recording = torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local")
    with torch.cuda.stream(before), recording:
        yield


def _end(graph: torch.cuda.CUDAGraph, pool: CapturePool) -> None:
    """Of a recording that failed: have torch give memory out and take it back as it does elsewhere.

    Where the driver refuses to end a recording, some versions of torch leave their allocators as while it lasted: memory that
    other streams used never comes back, and emptying the cache fails. The one of the device is told here, and says whether
    that was so. The one of the host cannot be told; it asks that graph, which must stay, and takes no other of its pool.
    """
    graph.reset()
    try:
        torch._C._cuda_endAllocateToPool(pool.stream.device.index, pool.handle)
    except RuntimeError:  # it is not recording
        return
    _unended[pool.handle] = graph


def capture(
    forward: Callable[[], Result], watched: Sequence[Watched] = (), fixed: Sequence[Tensor] = ()
) -> tuple[Result, Graph[Result] | None]:
    """Run `forward` once; its result, and its graph, None if it cannot be replayed.

    Its inputs must be written in place before a replay, but for those that are `fixed`, and may be read. Memory that a part
    of it has done with is used again by later ones, so the graph holds about as much as the forward does.
    """
    same = {_address(tensor) for tensor in fixed}
    recorder, reads = _Recorder(lambda tensor: _address(tensor) in same), _Reads(lambda tensor: _address(tensor) in same)
    with native.recording(recorder.native), reads, recorder:
        result = forward()
    if recorder.varies or reads.seen or any(values.seen for values in watched):
        return result, None
    return result, Graph(recorder.calls, recorder.memory(), result)


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class _Reads(TorchFunctionMode):
    """Notices tensors that are read in Python past torch's dispatcher, and are not `fixed`."""

    def __init__(self, fixed: Callable[[Tensor], bool]) -> None:
        self.seen, self._fixed = False, fixed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= func in _READS and not self._fixed(args[0])
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode, ABC):
    """Sees what torch's compositions come down to, and notices what depends on the numbers of tensors that are not `fixed`."""

    def __init__(self, fixed: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.varies, self._fixed = False, fixed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSED):
            return self.run(func, args, kwargs)
        with self:  # not `decompose`, which resizes by operators that round otherwise
            return func._op_dk(_COMPOSED, *args, **kwargs)

    @abstractmethod
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What becomes of one of them."""

    def reads(self, func: Any, args: Any, masked: set[Any]) -> bool:
        """Whether the host reads numbers, or the size of a result. An index by a mask has as many as that has ones."""
        if func in masked:
            return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return bool(_READ.intersection(func.tags)) and not all(map(self._fixed, tensors))


class Sent(_Operators):
    """Has what the host sends to a device there before, so that a second run of the same forward sends nothing.

    A tensor of the host is known by its numbers, whatever made it.
    """

    def __init__(self) -> None:
        super().__init__(_on_host)
        self.again = False
        self.used: list[Tensor] = []
        self._there: dict[object, Tensor] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device for tensor in tensors if not _on_host(tensor)}
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            self.varies |= bool(devices) and target.type == "cpu"
            if not devices and target.type != "cpu":
                return func(self._sent(args[0], target), **kwargs)
        elif devices:
            self.varies |= self.reads(func, args, {_aten.index.Tensor, *_WRITES})
            self.varies |= func is _aten.copy_.default and _on_host(args[0])
            device = next(iter(devices))
            given = {id(leaf) for leaf in tensors if _on_host(leaf) and (leaf.ndim or func in _WRITES)}  # else it is a number
            args = tree_map_only(Tensor, lambda leaf: self._sent(leaf, device) if id(leaf) in given else leaf, args)
        return func(*args, **kwargs)

    def _sent(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor there, which nobody may write to."""
        key = (device, tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        if key not in self._there:
            if self.again:  # of other numbers than before
                return tensor
            self._there[key] = tensor.to(device)
        elif self.again:
            self.used.append(self._there[key])
        return self._there[key]


class _Recorder(_Operators):
    """Keeps native calls and operators in order; allocations are served from what earlier tensors left behind."""

    def __init__(self, fixed: Callable[[Tensor], bool]) -> None:
        super().__init__(fixed)
        self.calls: list[Callable[[], object]] = []
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

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        there = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _address(leaf) not in there]
        if func in _ALLOCATIONS:
            return self._allocate(result)
        self.varies |= torch.Tag.nondeterministic_seeded in func.tags or self.reads(func, args, {_aten.index.Tensor})
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


def _again(func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
    """Compute once more into the tensors that were made before."""
    for to, leaf in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
        to.copy_(leaf)
