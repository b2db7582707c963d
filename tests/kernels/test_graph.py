"""Recorded forwards: a replay gives the bits of an eager run; forwards that cannot be replayed are detected."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sensorium.engine.worker.decode_graphs import capture_config
from sensorium.engine.worker.encoder_graphs import EncoderGraphs
from sensorium.kernels import graph as graphs
from sensorium.kernels import native
from sensorium.kernels.activation import act_and_mul
from sensorium.kernels.gpu.upload import capture_tables, keep_alive
from sensorium.kernels.graph import CaptureFailed, CapturePool, UploadCache, WatchedInts, capture, capture_cuda, capture_pool
from sensorium.kernels.linear import LinearWeight, linear, pack
from sensorium.kernels.norm import rms_norm
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

needs_library = pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(autouse=True)
def inference() -> Any:
    with torch.inference_mode():
        yield


def weights(dtype: torch.dtype, layers: int) -> list[tuple[Tensor, LinearWeight, LinearWeight]]:
    torch.manual_seed(0)
    made = []
    for _ in range(layers):
        up, down = torch.randn(96, 32, dtype=dtype) / 6, torch.randn(32, 48, dtype=dtype) / 6
        made.append((torch.rand(32, dtype=dtype), pack(up, None), pack(down, torch.ones(32, dtype=dtype))))
    return made


def stack(ids: Tensor, table: Tensor, layers: list[tuple[Tensor, LinearWeight, LinearWeight]]) -> Tensor:
    """Run torch operators, views, kernels, and a residual stream that is written in place."""
    x = F.embedding(ids, table) * 2
    add = None
    for norm, up, down in layers:
        add = linear(act_and_mul("silu", linear(rms_norm(x, norm, 1e-5, add), up)), down).view(-1, 4, 8).flatten(1)
    return rms_norm(x, layers[0][0], 1e-5, add)


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_a_replay_gives_the_same_bits(dtype: torch.dtype, rows: int) -> None:
    layers, table, ids = weights(dtype, 5), torch.randn(11, 32, dtype=dtype), torch.zeros(rows, dtype=torch.int64)
    result, graph = capture(lambda: stack(ids, table, layers))
    assert graph is not None
    assert torch.equal(result, stack(ids, table, layers)), "recording is running"
    for turn in range(4):
        ids.copy_((torch.arange(rows) * 3 + turn) % 11)
        expected = stack(ids.clone(), table, layers)
        noise = [torch.full((rows, width), torch.nan, dtype=dtype) for width in (32, 48, 96)]  # unrelated allocations
        assert torch.equal(graph.replay(), expected)
        assert all(values.isnan().all() for values in noise)


@DTYPES
@pytest.mark.parametrize("kernels", ["", "linear=torch", "torch"])
def test_layers_share_memory(dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the number of layers, also if torch runs them operator by operator."""
    monkeypatch.setenv("SENSORIUM_KERNELS", kernels)

    def held(layers: int) -> int:
        given = weights(dtype, layers)
        _, graph = capture(lambda: stack(torch.arange(4), torch.ones(11, 32, dtype=dtype), given))
        assert graph is not None
        weight = {id(t) for norm, up, down in given for t in (norm, *vars(up).values(), *vars(down).values())}
        kept = [memory for memory in graph._memory if id(memory) not in weight]
        return sum(memory.untyped_storage().nbytes() for memory in kept)  # type: ignore[attr-defined]

    assert held(12) == held(3)


class Operators(TorchDispatchMode):
    """Collects the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.funcs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.funcs.append(func)
        return func(*args, **(kwargs or {}))


def test_a_replay_writes_into_the_memory_of_the_first_run() -> None:
    x, index = torch.rand(3, 4), torch.tensor([2, 0])

    def forward() -> Tensor:
        return torch.cos(x.index_select(0, index)).to(torch.float64).remainder(0.5)

    result, graph = capture(forward)
    assert graph is not None
    x.mul_(0.5)
    with Operators() as operators:
        replayed = graph.replay()
    aten = torch.ops.aten
    expected = [aten.index_select.out, aten.cos.out, aten.copy_.default, aten.remainder.Scalar_out]
    assert operators.funcs == expected, "no operator makes a new tensor"
    assert replayed.data_ptr() == result.data_ptr()
    assert torch.equal(replayed, forward())


def test_two_results_of_an_operator_do_not_share_memory() -> None:
    x = torch.arange(6.0).view(2, 3)

    def forward() -> Tensor:
        base = (x[0] * 2).neg() + 1  # releases memory of the size of both results
        low, high = torch.aminmax(x + base.sum(), dim=0)
        return high * 10 + low

    _, graph = capture(forward)
    assert graph is not None
    for _ in range(3):
        x.add_(torch.rand(2, 3))
        assert torch.equal(graph.replay(), forward())


def test_weights_live_as_long_as_their_graph() -> None:
    layers, table, ids = weights(torch.float32, 2), torch.randn(11, 32), torch.arange(3)
    expected = stack(ids, table, layers)
    _, graph = capture(lambda: stack(ids, table, layers))
    layers.clear()
    noise = [torch.full((96, 32), torch.nan) for _ in range(64)]
    assert graph is not None
    assert torch.equal(graph.replay(), expected)
    assert len(noise) == 64


X = torch.arange(6.0)


@pytest.mark.parametrize(
    "forward",
    [
        lambda: X * X.sum().item(),
        lambda: X if (X > 3).any() else X + 1,
        lambda: X[X > 3],
        lambda: X.nonzero(),
        lambda: X + len(X.tolist()),
        lambda: X + torch.from_numpy(X.numpy()),
        lambda: X + torch.rand(6),
        lambda: F.dropout(X, 0.5),
    ],
    ids=["item", "bool", "mask", "nonzero", "tolist", "numpy", "random", "dropout"],
)
def test_what_depends_on_the_numbers_has_no_graph(forward: Any) -> None:
    torch.manual_seed(0)
    expected = forward()
    torch.manual_seed(0)
    result, graph = capture(forward)
    assert torch.equal(result, expected)
    assert graph is None


@pytest.mark.parametrize("read", [max, sum, lambda v: v[0], lambda v: torch.tensor(v)[1]], ids=["max", "sum", "item", "tensor"])
def test_watched_numbers_have_no_graph_once_they_are_read(read: Any) -> None:
    watched = WatchedInts((3, 5))
    assert capture(lambda: X * len(watched), [watched])[1] is not None
    assert capture(lambda: X * read(watched), [watched])[1] is None


def test_an_error_ends_the_recording() -> None:
    with pytest.raises(ZeroDivisionError):
        capture(lambda: X / (1 // 0))
    seen = []
    with native.recording(lambda call, tensors: seen.append(call)):
        act_and_mul("silu", torch.ones(2, 4))
    act_and_mul("silu", torch.ones(2, 4))
    assert len(seen) == (native.library() is not None)


@pytest.mark.parametrize(
    "read", [lambda t: t.tolist()[0], lambda t: t[1].item(), lambda t: int(t.sum())], ids=["list", "item", "sum"]
)
def test_what_is_fixed_may_be_read(read: Any) -> None:
    constants = torch.tensor([3, 5])
    assert capture(lambda: X * read(constants))[1] is None
    result, graph = capture(lambda: X * read(constants), constants=[constants])
    assert (graph is None) == (read(constants) == 8), "what is computed from it is not fixed itself"
    assert torch.equal(result, X * read(constants))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize("antialias", [False, True])
def test_images_are_resized_to_the_same_bits(mode: str, antialias: bool) -> None:
    x = torch.randn(1, 3, 9, 7)

    def forward() -> Tensor:
        return F.interpolate(x, (5, 11), mode=mode, antialias=antialias and mode != "nearest")

    result, graph = capture(forward)
    assert graph is not None
    assert torch.equal(result, forward())
    x.copy_(torch.randn(x.shape))
    assert torch.equal(graph.replay(), forward())


THERE = torch.device("meta")
"""A device that is not the host and has shapes but no data."""


def twice(forward: Any) -> tuple[UploadCache, list[Tensor]]:
    """Run a forward twice; return its upload cache, and the tensors that the second run would upload again."""
    sent, missed = UploadCache(), []
    with sent:
        forward()
    known, sent.capturing = sent._upload, True

    def look(tensor: Tensor, device: torch.device) -> Tensor:
        found = known(tensor, device)
        if found is tensor:
            missed.append(found)
        return found

    sent._upload = look  # type: ignore[method-assign]
    with sent:
        forward()
    return sent, missed


TABLE = torch.empty(8, 4, device=THERE)
INDEX = torch.tensor([3, 1])


@pytest.mark.parametrize(
    "forward",
    [
        lambda: TABLE[(INDEX + 1).to(THERE)],
        lambda: TABLE[INDEX],
        lambda: TABLE.index_select(0, INDEX.to(THERE, torch.int32)),
        lambda: TABLE.clone().copy_(torch.ones(4)),
        lambda: torch.ones(3).to(THERE).add_(1),
        lambda: torch.tensor(3.0).to(THERE) * TABLE,
        lambda: TABLE.clone().index_put_((INDEX,), torch.ones(2, 4)),
        lambda: TABLE.clone().index_put_((INDEX.to(THERE),), torch.tensor(2.0)),
        lambda: torch.tensor([True, False]).to(THERE).logical_not(),
    ],
    ids=["to", "index", "dtype", "copy", "in place", "scalar", "put", "put one", "mask"],
)
def test_what_the_host_sends_is_there_the_second_time(forward: Any) -> None:
    sent, missed = twice(forward)
    assert not sent.data_dependent
    assert not missed
    assert sent.captured
    assert {id(tensor) for tensor in sent.captured} == {id(tensor) for tensor in sent._uploaded.values()}


def test_numbers_of_the_host_are_used_where_they_are() -> None:
    sent, missed = twice(lambda: TABLE * torch.tensor(3.0) + torch.arange(5)[2] + 1.5)
    assert not sent.data_dependent
    assert not missed
    assert not sent.captured


def test_what_was_sent_is_nobodys_to_write_to() -> None:
    made = []
    sent, _ = twice(lambda: made.append(torch.ones(3).to(THERE)))
    (kept,) = sent._uploaded.values()
    assert all(tensor is not kept for tensor in made)


def test_other_numbers_than_the_first_time_are_sent() -> None:
    count = iter(range(9))
    sent, missed = twice(lambda: torch.full((2,), next(count)).to(THERE))
    assert [tensor.tolist() for tensor in missed] == [[1, 1]]
    assert not sent.captured


@pytest.mark.parametrize(
    "forward",
    [
        lambda: TABLE.cpu(),
        lambda: TABLE.to("cpu", torch.float64),
        lambda: torch.ones(8, 4).copy_(TABLE),
        lambda: TABLE.sum().item(),
        lambda: bool((TABLE > 3).any()),
        lambda: TABLE[TABLE > 3],
        lambda: TABLE.nonzero(),
        lambda: TABLE.clone().index_put_((TABLE > 3,), TABLE.sum()),
        lambda: torch.equal(TABLE, TABLE),
    ],
    ids=["cpu", "to", "copy", "item", "bool", "mask", "nonzero", "put", "equal"],
)
def test_waiting_for_the_device_is_noticed(forward: Any) -> None:
    sent = UploadCache()
    with sent, contextlib.suppress(NotImplementedError, RuntimeError):  # meta tensors have no values
        forward()
    assert sent.data_dependent


class Driver:
    """A fake CUDA driver that counts runs and captures, and fails on request as torch 2.13 does."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.runs, self.recorded, self.recording, self.resets = 0, 0, False, 0
        self.ends, self.ended_by_torch = True, False  # the capture can be ended; its memory is released even if not
        self.current: Any = "main"
        self.pools: list[tuple[Any, Any]] = []  # of captures, in order, with their streams
        self.giving: set[tuple[int, Any]] = set()  # device and pool that allocations go to

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert (graph, capture_error_mode) == (self, "thread_local")
        self.pools.append((pool, stream))
        self.giving.add((stream.device.index, pool))
        before, self.current, self.recording = self.current, stream, True
        try:
            yield
        finally:
            self.recording = False
            if self.ends or self.ended_by_torch:
                self.end_allocate(stream.device.index, pool)
            if not self.ends:
                raise RuntimeError("operation failed due to a previous error during capture")
            self.current = before

    def end_allocate(self, device: int, pool: Any) -> None:
        if (device, pool) not in self.giving:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.giving.remove((device, pool))

    def reset(self) -> None:
        self.resets += 1

    def forward(self) -> Tensor:
        self.runs += 1
        self.recorded += self.recording
        if self.recording and self.error is not None:
            raise self.error
        return TABLE[INDEX.to(THERE)]

    def replay(self) -> None:
        self.runs += 100


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made, handles = Driver(), count()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(handles)))
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_allocate)
    monkeypatch.setattr(graphs, "_failed_captures", {})
    return made


@pytest.fixture
def pool(driver: Driver) -> CapturePool:
    return capture_pool(torch.device("cuda", 1))


def test_a_gpus_graph_is_recorded_in_a_second_run(driver: Driver, pool: CapturePool) -> None:
    result, graph = capture_cuda(driver.forward, pool)
    assert (driver.runs, driver.recorded) == (2, 1)
    assert graph is not None
    assert len(graph._memory) == 2, "the CUDA graph and a table"
    kept = graph.replay()
    assert driver.runs == 102
    assert kept is graph.replay()
    assert kept is not result
    assert driver.pools == [(pool.handle, pool.stream)]
    assert driver.current == "main"


def test_graphs_that_run_at_the_same_time_share_no_stream(driver: Driver) -> None:
    device = torch.device("cuda", 1)
    records: list[Any] = [EncoderGraphs(device)._record, EncoderGraphs(device)._record, capture_config(device).record]
    for record in records * 2:
        record(driver.forward, ())
    assert driver.pools[:3] == driver.pools[3:], "one stream for a pool"
    assert len({id(stream) for _, stream in driver.pools}) == len({handle for handle, _ in driver.pools}) == 3
    assert all(stream.device == device for _, stream in driver.pools)


def test_what_cannot_be_recorded_there_has_run_once(
    driver: Driver, pool: CapturePool, caplog: pytest.LogCaptureFixture
) -> None:
    def reads() -> Tensor:
        result = driver.forward()
        with contextlib.suppress(NotImplementedError):
            result.cpu()
        return result

    assert capture_cuda(reads, pool)[1] is None
    assert (driver.runs, driver.recorded) == (1, 0)
    driver.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(CaptureFailed, match="CUDA out of memory") as caught:
        capture_cuda(driver.forward, pool)
    assert caught.value.result.shape == (2, 4)
    assert "could not be captured as a CUDA graph" in caplog.text
    driver.error = None
    assert capture_cuda(driver.forward, pool)[1] is not None


@pytest.mark.parametrize("ended_by_torch", [True, False])
def test_a_recording_that_cannot_be_ended_leaves_stream_and_memory_as_they_were(
    ended_by_torch: bool, driver: Driver, pool: CapturePool
) -> None:
    driver.ends, driver.ended_by_torch = False, ended_by_torch
    with pytest.raises(CaptureFailed):
        capture_cuda(driver.forward, pool)
    assert driver.current == "main"
    assert not driver.giving
    assert driver.resets == 1
    driver.ends = True
    result, graph = capture_cuda(driver.forward, pool)
    assert result.shape == (2, 4)
    assert (graph is not None) == ended_by_torch, "memory of the host is given out of that pool for ever"
    assert capture_cuda(driver.forward, capture_pool(pool.stream.device))[1] is not None


def test_a_first_run_that_fails_is_not_repeated(driver: Driver, pool: CapturePool) -> None:
    def fails() -> Tensor:
        driver.runs += 1
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        capture_cuda(fails, pool)
    assert driver.runs == 1
    assert not driver.pools


def test_tables_that_a_graph_reads_are_its_own(driver: Driver, pool: CapturePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: driver.recording)
    there: Any = SimpleNamespace(is_cuda=True, record_stream=lambda stream: None)
    there.device = THERE

    def forward() -> Tensor:
        assert keep_alive(there) is there
        assert keep_alive(there) is there
        return driver.forward()

    _, graph = capture_cuda(forward, pool)
    assert graph is not None
    assert [held is there for held in graph._memory] == [False, False, True]
    with capture_tables() as tables:
        keep_alive(there)
    assert not tables, "nothing is being recorded"


def test_recording_imports_no_compiler():
    code = (
        "import sys, torch; from sensorium.kernels.graph import capture\n"
        "with torch.inference_mode(): assert capture(lambda: torch.ones(2) + 1)[1] is not None\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
