"""Record a forward pass once and replay it: as a CUDA graph, or as a list of calls on a CPU.

A decode step is a hundred short kernels. On a CPU, the Python code and allocations around a kernel can take as long as the
kernel. A replay only makes the calls again on the same memory: `native.call` with its addresses, torch operators with their
tensors. It gives the same bits as the forward, since the same kernels run on the same values.

A forward cannot be replayed if it reads a value into Python, makes a result whose size depends on data, or draws random
numbers. This is detected while recording, and such a forward has no graph.

A CUDA graph also cannot record a copy from host memory, such as of indices that a forward computes on the host. These are the
same in every replay, so they are uploaded once and the graph reads them from the device.
"""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Generic, TypeVar

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
_READ_TAGS = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
_READ_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}
_COPIES = {_aten.clone.default, _aten._to_copy.default}
_WRITES = {_aten.index_put.default, _aten.index_put_.default}

_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd

_failed_captures: dict[Any, torch.cuda.CUDAGraph] = {}  # by pool handle

Result = TypeVar("Result")


class CallGraph(Generic[Result]):
    """The calls of one forward (or the launch of a CUDA graph), the memory that they use, and the result."""

    def __init__(self, calls: Sequence[Callable[[], object]], memory: Sequence[object], result: Result) -> None:
        self.calls, self._memory, self._result = tuple(calls), tuple(memory), result

    def replay(self) -> Result:
        """Run the calls on the current content of the inputs. The next replay overwrites the result."""
        for call in self.calls:
            call()
        return self._result


class WatchedInts(Sequence[int]):
    """Ints that change from step to step. `was_read` is set when any of them is read."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values, self.was_read = values, False

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        self.was_read = True
        return self._values[index]


@dataclass(frozen=True)
class CapturePool:
    """Memory and capture stream of graphs that never run at the same time.

    torch has one cuBLAS workspace per stream, and a graph writes to that of its capture stream wherever it is replayed. Graphs
    that may run at the same time therefore need separate pools.
    """

    handle: Any  # from `torch.cuda.graph_pool_handle`
    stream: torch.cuda.Stream


class CaptureFailed(RuntimeError):
    """Capturing failed after an eager run had succeeded. `result` is that of the eager run."""

    def __init__(self, result: Any, why: str) -> None:
        super().__init__(why)
        self.result = result


def capture_pool(device: torch.device) -> CapturePool:
    """Create a pool on the GPU."""
    return CapturePool(torch.cuda.graph_pool_handle(), torch.cuda.Stream(device))


def capture_cuda(forward: Callable[[], Result], pool: CapturePool) -> tuple[Result, CallGraph[Result] | None]:
    """Do what `capture` does, on a GPU. Raises CaptureFailed if the forward succeeds but its capture fails.

    The forward first runs eagerly, because compilation and allocation on first use cannot be captured.
    """
    if pool.handle in _failed_captures:
        return forward(), None
    from .gpu.upload import capture_tables

    sent = UploadCache()
    with _HostReadDetector(_on_host) as reads, sent:
        result = forward()
    if sent.data_dependent or reads.found:
        return result, None
    sent.capturing, graph = True, torch.cuda.CUDAGraph()
    try:
        with capture_tables() as tables, _recording(graph, pool), sent:
            kept = forward()
    except RuntimeError as error:  # the forward synchronises in a way that was not detected, or memory is short
        _log.warning("a forward could not be captured as a CUDA graph and runs without one", exc_info=True)
        _end(graph, pool)
        raise CaptureFailed(result, str(error)) from error
    return result, CallGraph([graph.replay], [graph, *sent.captured, *tables.values()], kept)


@contextmanager
def _recording(graph: torch.cuda.CUDAGraph, pool: CapturePool) -> Iterator[None]:
    """Capture as `torch.cuda.graph` does, but restore the current stream even if the capture cannot be ended."""
    before = torch.cuda.current_stream(pool.stream.device)
    recording = torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local")
    with torch.cuda.stream(before), recording:
        yield


def _end(graph: torch.cuda.CUDAGraph, pool: CapturePool) -> None:
    """Clean up after a failed capture, so that torch allocates and frees memory normally again.

    If the driver refuses to end a capture, some versions of torch leave their allocators in capture mode: memory that other
    streams used is never reused, and emptying the cache fails. The device allocator is reset here; an error means that it was
    not in capture mode. The host allocator cannot be reset: it asks the failed graph, so that graph is kept alive, and no other
    graph is captured in its pool.
    """
    graph.reset()
    try:
        torch._C._cuda_endAllocateToPool(pool.stream.device.index, pool.handle)
    except RuntimeError:  # the allocator is not in capture mode
        return
    _failed_captures[pool.handle] = graph


def capture(
    forward: Callable[[], Result], watched: Sequence[WatchedInts] = (), constants: Sequence[Tensor] = ()
) -> tuple[Result, CallGraph[Result] | None]:
    """Run `forward` once. Return its result, and its graph or None if it cannot be replayed.

    Inputs must be written in place before a replay. `constants` are tensors that never change and may be read in Python.
    Memory that one part of the forward has released is reused by later parts, so a graph holds about as much as the forward.
    """
    same = {_address(tensor) for tensor in constants}

    def is_constant(tensor: Tensor) -> bool:
        return _address(tensor) in same

    recorder, reads = _CallRecorder(is_constant), _HostReadDetector(is_constant)
    with native.recording(recorder.native), reads, recorder:
        result = forward()
    if recorder.data_dependent or reads.found or any(values.was_read for values in watched):
        return result, None
    return result, CallGraph(recorder.calls, recorder.memory(), result)


def _on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class _HostReadDetector(TorchFunctionMode):
    """Detect tensors, constants excepted, whose values Python reads without torch's dispatcher."""

    def __init__(self, is_constant: Callable[[Tensor], bool]) -> None:
        self.found, self._is_constant = False, is_constant

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func in _READ_METHODS and not self._is_constant(args[0])
        return func(*args, **(kwargs or {}))


class _OperatorMode(TorchDispatchMode, ABC):
    """Intercept every primitive operator, and detect those whose result depends on the values of non-constant tensors."""

    def __init__(self, is_constant: Callable[[Tensor], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.data_dependent, self._is_constant = False, is_constant

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True makes torch import its compiler, which takes seconds, at the first operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSED):
            return self.run(func, args, kwargs)
        with self:  # not `decompose`, whose resize rounds differently
            return func._op_dk(_COMPOSED, *args, **kwargs)

    @abstractmethod
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one primitive operator."""

    def reads(self, func: Any, args: Any, masked: set[Any]) -> bool:
        """Return whether the host reads values, or a size that depends on data (as when it indexes with a mask)."""
        if func in masked:
            return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor))
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        return bool(_READ_TAGS.intersection(func.tags)) and not all(map(self._is_constant, tensors))


class UploadCache(_OperatorMode):
    """Upload host tensors once and reuse the copies, so that a second run of the same forward uploads nothing.

    Host tensors with equal values share a copy.
    """

    def __init__(self) -> None:
        super().__init__(_on_host)
        self.capturing = False
        self.captured: list[Tensor] = []
        self._uploaded: dict[object, Tensor] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device for tensor in tensors if not _on_host(tensor)}
        if func is _aten._to_copy.default and kwargs.get("device") is not None:
            target = torch.device(kwargs["device"])
            self.data_dependent |= bool(devices) and target.type == "cpu"
            if not devices and target.type != "cpu":
                return func(self._upload(args[0], target), **kwargs)
        elif devices:
            self.data_dependent |= self.reads(func, args, {_aten.index.Tensor, *_WRITES})
            self.data_dependent |= func is _aten.copy_.default and _on_host(args[0])
            device = next(iter(devices))
            # host tensors without dimensions are scalars, which operators take from the host
            from_host = {id(leaf) for leaf in tensors if _on_host(leaf) and (leaf.ndim or func in _WRITES)}
            args = tree_map_only(Tensor, lambda leaf: self._upload(leaf, device) if id(leaf) in from_host else leaf, args)
        return func(*args, **kwargs)

    def _upload(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the copy on the device, which must not be written to."""
        key = (device, tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        if key not in self._uploaded:
            if self.capturing:  # the values differ from those of the first run
                return tensor
            self._uploaded[key] = tensor.to(device)
        elif self.capturing:
            self.captured.append(self._uploaded[key])
        return self._uploaded[key]


class _CallRecorder(_OperatorMode):
    """Record native calls and operators in order. Allocations reuse the memory of tensors that no longer exist."""

    def __init__(self, is_constant: Callable[[Tensor], bool]) -> None:
        super().__init__(is_constant)
        self.calls: list[Callable[[], object]] = []
        self._external: dict[int, Tensor] = {}  # by address: tensors that existed before, such as weights
        # by address: memory, and the tensors that use it
        self._allocated: dict[int, tuple[Tensor, list[weakref.ref[Tensor]]]] = {}

    def memory(self) -> list[object]:
        return [*self._external.values(), *(memory for memory, _ in self._allocated.values())]

    def native(self, call: Callable[[], object], tensors: Sequence[Tensor]) -> None:
        """Record a `native.call`, which holds addresses only."""
        self.calls.append(call)
        for tensor in tensors:
            if _address(tensor) not in self._allocated:
                self._external[tensor.data_ptr()] = tensor

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        inputs = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _address(leaf) not in inputs]
        if func in _ALLOCATIONS:
            if not self._reuse_memory(result, copied=False):
                self._allocated[_address(result)] = (result.detach(), [weakref.ref(result)])
            return result
        self.data_dependent |= torch.Tag.nondeterministic_seeded in func.tags or self.reads(func, args, {_aten.index.Tensor})
        if len({_address(leaf) for leaf in fresh}) == len(fresh):  # no two share a storage
            for leaf in fresh:
                self._reuse_memory(leaf, copied=True)
        for leaf in fresh:
            self._allocated.setdefault(_address(leaf), (leaf.detach(), []))
        if fresh or func._schema.is_mutable:
            # the call keeps the memory but not the tensors, so that the memory can be released
            args, kwargs, targets = tree_map_only(Tensor, Tensor.detach, (args, kwargs, fresh))
            self.calls.append(_rerun(func, args, kwargs, targets))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _address(leaf) in self._allocated:
                self._allocated[_address(leaf)][1].append(weakref.ref(leaf))
        return result

    def _reuse_memory(self, tensor: Tensor, copied: bool) -> bool:
        """Move a new tensor into memory of the same size that no tensor uses any more. Return False if there is none.

        `copied`: its content is copied, too.
        """
        if _address(tensor) == 0:
            return False
        size = tensor.untyped_storage().nbytes()
        for memory, users in self._allocated.values():
            if _address(memory) and memory.untyped_storage().nbytes() == size and all(user() is None for user in users):
                storage = memory.untyped_storage()
                if copied:
                    storage.copy_(tensor.untyped_storage())
                users[:] = [weakref.ref(tensor.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride()))]
                return True
        return False


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage; 0 for an empty one and for oneDNN's packed weights."""
    return 0 if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


def _rerun(func: Any, args: Any, kwargs: Any, targets: Sequence[Tensor]) -> Callable[[], object]:
    """Return a call that runs the operator again and writes its new tensors into `targets`, those of the first run."""
    if not targets:
        return partial(func, *args, **kwargs)
    if func in _COPIES:
        return partial(targets[0].copy_, args[0])
    variant = _out_variant(func) if len(targets) == 1 else None
    if variant is not None:
        return partial(variant, *args, **kwargs, out=targets[0])
    return partial(_rerun_into, func, args, kwargs, targets)


@cache
def _out_variant(func: Any) -> Any:
    """Return the overload of an operator that writes its one result into a tensor `out`, or None."""
    inputs = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        variant = getattr(func.overloadpacket, name)
        *others, last = variant._schema.arguments or (None,)
        if last is not None and last.is_out and [(argument.name, str(argument.type)) for argument in others] == inputs:
            return variant if last.name == "out" else None
    return None


def _rerun_into(func: Any, args: Any, kwargs: Any, targets: Sequence[Tensor]) -> None:
    """Run the operator again and copy its results into the tensors of the first run."""
    for target, leaf in zip(targets, tree_leaves(func(*args, **kwargs)), strict=True):
        target.copy_(leaf)
